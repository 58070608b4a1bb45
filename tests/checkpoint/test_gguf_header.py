"""The header of a GGUF file: read as it was written, and every lie in it is one line."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.checkpoint.shards.gguf_header import parse_gguf_header, read_gguf_header
from compress.errors import CheckpointError
from compress.quant.ggml_kinds import KINDS


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


@dataclass(frozen=True)
class Made:
    """A file by hand: one tensor of 2 rows of 32 numbers in Q8_0, then one of 3 in F32."""

    version: int = 3
    tensors: int = 2
    keys: int = 1
    pairs: bytes = pair("general.architecture", 8, text("llama"))
    name: str = "a.weight"
    dims: tuple[int, ...] = (32, 2)
    kind: int = 8
    offset: int = 0
    second: int = 96
    data: int = 96 + 12

    def raw(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, self.tensors, self.keys) + self.pairs
        shape = struct.pack(f"<I{len(self.dims)}Q", len(self.dims), *self.dims)
        head += text(self.name) + shape + struct.pack("<IQ", self.kind, self.offset)
        head += text("b.weight") + struct.pack("<IQIQ", 1, 3, 0, self.second)
        return head + bytes(-len(head) % 32) + bytes(self.data)


def refusal(raw: bytes, folder: Path) -> str:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(path, path.name)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), "FILE")


def test_a_file_of_the_package_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    writer.add_tensor("odd", np.arange(5, dtype=np.float32))
    blocks = np.zeros((4, 144), np.uint8)
    writer.add_tensor("blocks", blocks, raw_dtype=GGMLQuantizationType.Q4_K)
    writer.add_tensor("halves", np.ones((2, 3), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf_header(path, path.name)
    assert found.fields == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.attention.layer_norm_rms_epsilon": 0.5,
        "tokenizer.ggml.add_bos_token": True,
    }
    shapes = {name: (info.dtype, info.shape) for name, info in found.tensors.items()}
    assert shapes == {"odd": ("F32", (5,)), "blocks": ("Q4_K", (4, 256)), "halves": ("F16", (2, 3))}
    raw = path.read_bytes()
    info = found.tensors["odd"]
    assert np.frombuffer(raw[info.start : info.start + info.nbytes], np.float32)[4] == 4
    first = min(x.start for x in found.tensors.values())
    assert parse_gguf_header(raw[:first], path, path.name, len(raw)) == found


def test_the_file_by_hand_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for made in (Made(), Made(version=2), Made(data=96 + 32)):
        path.write_bytes(made.raw())
        found = read_gguf_header(path, path.name).tensors
        assert [(x.dtype, x.shape, x.nbytes) for x in found.values()] == [
            ("Q8_0", (2, 32), 68),
            ("F32", (3,), 12),
        ]


READ = ", ".join(KINDS)
LIES: dict[str, tuple[Made | Callable[[], bytes], str]] = {
    "no GGUF": (lambda: bytes(64), "FILE is no GGUF file: its first bytes are b'\\x00"),
    "nothing": (lambda: b"", "FILE is no GGUF file: 0 bytes"),
    "version": (Made(version=1), "FILE: it has version 1; GGUF of version 2 and 3, little-endian"),
    "big-endian": (Made(version=3 << 24), "FILE: it is big-endian; GGUF of version 2 and 3"),
    "many tensors": (
        Made(tensors=1 << 40),
        "FILE is truncated or damaged: its header says 1099511627776 tensors, and",
    ),
    "many keys": (Made(keys=1 << 60), "FILE is truncated or damaged: its header says 11529215046"),
    "a long key": (
        Made(pairs=struct.pack("<Q", 1 << 50)),
        "FILE is truncated or damaged: its header says 1125899906842624 bytes of a key, and",
    ),
    "a key that is no text": (
        Made(pairs=struct.pack("<Q", 2) + b"\xff\xfe"),
        "FILE: a key is not valid UTF-8",
    ),
    "a value that is no text": (
        Made(pairs=pair("k\n", 8, struct.pack("<Q", 1) + b"\xff")),
        "FILE: the value of 'k\\n' is not valid UTF-8",
    ),
    "a key too long": (
        Made(pairs=pair("k" * 65536, 0, b"")),
        "FILE has a key of 65536 letters, 65535 are possible; download or copy it again",
    ),
    "a key twice": (
        Made(keys=2, pairs=2 * pair("k", 0, b"\1")),
        "FILE has the key 'k' twice; download",
    ),
    "a type of values": (
        Made(pairs=pair("k", 13, b"")),
        "FILE: the value of 'k' has type 13, which GGUF does not have; it is damaged, download",
    ),
    "a list of lists": (
        Made(pairs=pair("k", 9, struct.pack("<IQ", 9, 1))),
        "FILE: the value of 'k' has type 9, which GGUF does not have; it is damaged, download",
    ),
    "a long list": (
        Made(pairs=pair("k", 9, struct.pack("<IQ", 4, 1 << 61))),
        "FILE is truncated or damaged: its header says 2305843009213693952 entries of 'k', and",
    ),
    "alignment": (
        Made(pairs=pair("general.alignment", 4, struct.pack("<I", 24))),
        "FILE: general.alignment is 24; it is a power of two, 32 by default",
    ),
    "no dimension": (Made(dims=()), "tensor 'a.weight' in FILE has 0 dimensions; ggml has 1 to 4"),
    "five dimensions": (Made(dims=(32, 1, 1, 1, 1)), "tensor 'a.weight' in FILE has 5 dimensions"),
    "a type without a decoder": (
        Made(kind=17),
        f"tensor 'a.weight' in FILE is of the type IQ2_XS; {READ} can be read, so take a file",
    ),
    "a type that is none": (
        Made(kind=99),
        "tensor 'a.weight' in FILE is of type 99, which ggml did not have;",
    ),
    "no whole blocks": (
        Made(dims=(33, 2)),
        "tensor 'a.weight' in FILE has shape [2, 33], and Q8_0 has rows of whole blocks of 32;",
    ),
    "no rows": (Made(dims=(32, 0)), "tensor 'a.weight' in FILE has shape [0, 32], and Q8_0 has"),
    "beyond memory": (
        Made(dims=(1 << 40, 1 << 40)),
        "tensor 'a.weight' in FILE has shape [1099511627776, 1099511627776], larger than any",
    ),
    "outside the file": (
        Made(dims=(32, 1 << 30), second=(1 << 30) * 34),
        "FILE is truncated: expected 36507222",
    ),
    "an offset before the data": (
        Made(second=64),
        "tensor 'b.weight' in FILE lies at byte 64 of the data, and the tensors before it end",
    ),
    "an offset behind it": (
        Made(offset=1 << 62),
        "tensor 'a.weight' in FILE lies at byte 46116860",
    ),
    "a name twice": (Made(name="b.weight"), "tensor 'b.weight' in FILE is there twice; download"),
    "a long name": (
        Made(name="n" * 65),
        f"tensor '{'n' * 65}' in FILE has a name that ggml does not take;",
    ),
    "a byte too few": (Made(data=96 + 11), "FILE is truncated: expected 268 bytes, found 267;"),
    "bytes of nobody": (Made(data=96 + 33), "FILE has 21 bytes that belong to no tensor; download"),
    "cut in the header": (lambda: Made().raw()[:100], "FILE is truncated"),
}


@pytest.mark.parametrize("case", LIES)
def test_lies_are_one_line(case: str, tmp_path: Path) -> None:
    made, said = LIES[case]
    assert refusal(made.raw() if isinstance(made, Made) else made(), tmp_path).startswith(said)


def test_cuts_are_refused(tmp_path: Path) -> None:
    raw = Made().raw()
    for length in range(0, len(raw), 3):
        refusal(raw[:length], tmp_path)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_changed_bytes_are_read_or_refused(data: Any) -> None:
    """Never another error, and never a tensor outside of the file."""
    raw = bytearray(Made().raw())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 190))] = data.draw(st.integers(0, 255))
    try:
        found = parse_gguf_header(bytes(raw), Path("f.gguf"), "f.gguf", len(raw))
    except CheckpointError:
        return
    assert all(x.start + x.nbytes <= len(raw) for x in found.tensors.values())


def test_a_cut_header_of_a_longer_file_is_refused() -> None:
    """As when it shrinks while it is read."""
    raw = replace(Made()).raw()
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        parse_gguf_header(raw[:60], Path("f.gguf"), "f.gguf", len(raw))
