"""A header is believed only when everything it says agrees with everything else."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from compress.checkpoint.shards.dtype_codes import ITEMSIZES, itemsize
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.checkpoint.shards.header import build_header, parse_header, read_header
from compress.errors import CheckpointError
from helpers.raw_checkpoints import entry, raw_file

GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [3], 16, 22)}


def refusal(tmp_path: Path, header: object, data: bytes = bytes(22)) -> str:
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path, path.name)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_good_header(tmp_path: Path) -> None:
    path = raw_file(
        tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, **GOOD}, bytes(22)
    )
    infos = read_header(path, "x.safetensors")
    data = path.stat().st_size - 22
    assert [
        (i.name, i.dtype, i.shape, i.file, i.start - data, i.nbytes) for i in infos.values()
    ] == [
        ("a", "F32", (2, 2), "x.safetensors", 0, 16),
        ("b", "BF16", (3,), "x.safetensors", 16, 6),
    ]
    assert infos["a"].numel == 4


def test_order_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x", {"b": GOOD["b"], "a": GOOD["a"]}, bytes(22))
    assert list(read_header(path, "x")) == ["a", "b"]


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    header = {"s": entry("I64", [], 0, 8), "e": entry("F32", [0, 4], 8, 8), **{}}
    infos = read_header(raw_file(tmp_path / "x", header, bytes(8)), "x")
    assert infos["s"].shape == ()
    assert infos["e"].nbytes == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (entry("F4", [3], 16, 22), "has dtype 'F4'; supported are F64, F32"),
        (entry("BF16", [3, -1], 16, 22), "has shape [3, -1]; a list of sizes"),
        (entry("BF16", [True], 16, 22), "has shape [True]"),
        (entry("BF16", [3.0], 16, 22), "has shape [3.0]"),
        (entry("BF16", [1 << 63], 16, 22), "has shape [9223372036854775808]"),
        (entry("BF16", [1] * 65, 16, 22), "a list of sizes"),
        (entry("BF16", [1 << 40, 1 << 40, 0], 16, 16), "larger than any memory"),
        (entry("BF16", [4], 16, 22), "takes 8 bytes, but its data_offsets [16, 22] hold 6"),
        (entry("BF16", [3], 22, 16), "data_offsets [22, 16] hold -6"),
        (entry("BF16", [3], "16", 22), "has data_offsets ['16', 22]; two are expected"),
        (
            entry("BF16", [2], 18, 22),
            "leaves a hole: it starts at byte 18 of the data, expected 16",
        ),
        (entry("BF16", [4], 14, 22), "overlaps the tensor before it: it starts at byte 14"),
        ({"dtype": "F32"}, "must give dtype, shape and data_offsets"),
        ({**GOOD["b"], "more": 1}, "must give dtype, shape and data_offsets"),
        (None, "must give dtype, shape and data_offsets"),
        (entry("BF16", [5], 16, 26), "is truncated: expected"),
        (entry("BF16", [2], 16, 20), "has 2 bytes that belong to no tensor"),
    ],
)
def test_lying_entry_is_refused(tmp_path: Path, changed: object, message: str) -> None:
    assert message in refusal(tmp_path, {**GOOD, "b": changed})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "is no safetensors file: its first 8 bytes give a header of 0 bytes"),
        (b"[]", "its header does not start with '{'"),
        (b"{]", "is not valid JSON: Expecting property name"),
        (b'{"a": \xff}', "is not valid JSON: 'utf-8' codec"),
        (b'{"a": ' + b"[" * 100_000, "is not valid JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b'{"__metadata__": 3}', "__metadata__ that is not text to text"),
        (b'{"__metadata__": {"a": 3}}', "__metadata__ that is not text to text"),
        (
            b'{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}',
            "'\\ud800' in",
        ),
    ],
)
def test_malformed_header_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    assert message in refusal(tmp_path, header)


def test_truncated_file_says_expected_and_found(tmp_path: Path) -> None:
    assert "expected 8213 bytes, found" not in refusal(tmp_path, GOOD, bytes(5))
    path = raw_file(tmp_path / "t.safetensors", GOOD, bytes(22))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        CheckpointError, match=rf"truncated: expected {size} bytes, found {size - 3};"
    ):
        read_header(path, "t")


def test_short_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="truncated: 3 bytes is too short"):
        read_header(path, "m")
    path.write_bytes((200).to_bytes(8, "little") + b"{" * 50)
    with pytest.raises(CheckpointError, match="expected a header of 200 bytes, found 50"):
        read_header(path, "m")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"git-lfs pointer.*git lfs pull"):
        read_header(path, "m")
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"no safetensors file: its first 8 bytes"):
        read_header(path, "m")
    with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
        read_header(tmp_path / "absent", "absent")


def test_every_dtype_of_the_library_is_known() -> None:
    from safetensors.torch import _TYPES

    assert {code: TORCH_DTYPES[code] for code in _TYPES} == _TYPES
    assert {code: dtype.itemsize for code, dtype in TORCH_DTYPES.items()} == ITEMSIZES


def test_built_header_parses_back() -> None:
    tensors = {"x": ("F16", (2, 3), 0, 12), "é \n": ("U8", (), 12, 13)}
    raw = build_header(tensors)
    assert len(raw) % 8 == 0
    infos = parse_header(raw[8:], Path("p"), "p", len(raw) + 13)
    found = {
        i.name: (i.dtype, i.shape, i.start - len(raw), i.start + i.nbytes - len(raw))
        for i in infos.values()
    }
    assert found == tensors


SAMPLE = save(
    {
        "model.a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "model.b": torch.arange(5, dtype=torch.int64),
        "model.c": torch.ones(3, dtype=torch.bfloat16),
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_bytes_are_read_truly_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from("xdi")):
            case "x":
                raw[place] = data.draw(st.integers(0, 255))
            case "d":
                del raw[place : place + data.draw(st.integers(1, 9))]
            case _:
                raw[place:place] = data.draw(st.binary(max_size=9))
        if not raw:
            break
    check_whole(tmp_path, bytes(raw))


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "c", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "F3", ""]),
                "shape": st.lists(st.integers(-1, 3), max_size=3),
                "data_offsets": st.lists(st.integers(-1, 24), min_size=1, max_size=3),
            }
        ),
    ),
    size=st.integers(0, 30),
)
def test_plausible_headers_are_read_truly_or_refused(
    tmp_path: Path, header: dict[str, object], size: int
) -> None:
    path = raw_file(tmp_path / "x", header, bytes(size))
    check_whole(tmp_path, path.read_bytes())


def check_whole(tmp_path: Path, raw: bytes) -> None:
    """Refused, or every byte of the data belongs to exactly one tensor of the right size."""
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(raw)
    message, infos = "", {}
    try:
        infos = read_header(path, path.name)
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    if message:
        return
    end = 8 + int.from_bytes(raw[:8], "little")
    for info in infos.values():
        assert info.start == end
        assert info.nbytes == info.numel * itemsize(info.dtype)
        end += info.nbytes
    assert end == len(raw)
