"""Checkpoint: what it reads equals what the safetensors library reads; what lies is refused."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.checkpoint import Checkpoint, reading
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import CheckpointError
from helpers import tiny_models
from helpers.raw_checkpoints import INDEX, entry, folder_of, raw_file, sharded, write_index

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.int32)
TWO = {"one.safetensors": {"a": A}, "two.safetensors": {"b": B}}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8),
            right.contiguous().reshape(-1).view(torch.uint8),
        )
    )


def test_demo_model_reads_as_the_library_reads_it(demo_model: Path) -> None:
    checkpoint = Checkpoint.open(demo_model)
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.files == ("model.safetensors",)
    with safe_open(demo_model / "model.safetensors", "pt") as theirs:
        assert set(theirs.keys()) == set(checkpoint.tensors)
        for name in checkpoint.tensors:
            assert same_bytes(checkpoint.read(name, check_finite=True), theirs.get_tensor(name))
    assert checkpoint.params * 2 == checkpoint.nbytes
    assert {p.name for p in checkpoint.side_files()} >= {"tokenizer.json", "generation_config.json"}


def test_sharded_model_of_transformers(tmp_path: Path) -> None:
    tiny_models.make("llama", tmp_path / "s", max_shard_size="60KB")
    tiny_models.make("llama", tmp_path / "w")
    split, whole = Checkpoint.open(tmp_path / "s"), Checkpoint.open(tmp_path / "w")
    assert len(split.files) > 2
    assert split.shapes == {name: whole.shapes[name] for name in split.shapes}
    assert len(split.tensors) == len(whole.tensors)
    assert all(same_bytes(split.read(name), whole.read(name)) for name in whole.tensors)


@pytest.mark.parametrize("code", list(TORCH_DTYPES))
def test_every_dtype_and_odd_shape(tmp_path: Path, code: str) -> None:
    dtype = TORCH_DTYPES[code]
    raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(2, 3)
    tensors = {"t": tensor, "scalar": tensor[0, 0].clone(), "empty": tensor[:0].clone()}
    if code == "F8_E8M0":  # the library's torch side does not write it
        folder_of(tmp_path, {})
        header = {"t": entry(code, [2, 3], 0, 6), "scalar": entry(code, [], 6, 7)}
        header["empty"] = entry(code, [0, 3], 7, 7)
        scalar = raw[:1].numpy().tobytes()
        raw_file(
            tmp_path / "model.safetensors",
            header,
            raw.numpy().tobytes() + scalar,
        )
    else:
        folder_of(tmp_path, tensors)
    checkpoint = Checkpoint.open(tmp_path)
    for name, expected in tensors.items():
        assert same_bytes(checkpoint.read(name), expected), name


def test_read_rows(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3, 2).bfloat16()
    checkpoint = Checkpoint.open(folder_of(tmp_path, {"t": tensor, "e": torch.zeros(0, 3)}))
    for start, stop in ((0, 7), (2, 5), (6, 7), (3, 3)):
        assert torch.equal(checkpoint.read_rows("t", start, stop), tensor[start:stop])
    assert checkpoint.read_rows("e", 0, 0).shape == (0, 3)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(folder_of(tmp_path, {"t": A}))
    real = os.preadv

    def three_bytes(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][:3]], offset)

    monkeypatch.setattr(reading.os, "preadv", three_bytes)
    assert torch.equal(checkpoint.read("t"), A)


def test_file_that_shrinks_after_open(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder_of(tmp_path, {"t": A}))
    os.truncate(tmp_path / "model.safetensors", 90)
    with pytest.raises(CheckpointError, match="became shorter after it was opened"):
        checkpoint.read("t")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
        checkpoint.read("t")
    with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
        checkpoint.sha256()


def test_nonfinite_value_names_tensor_and_place(tmp_path: Path) -> None:
    bad = torch.zeros(4, 5).half()
    bad[2, 3], bad[3, 0] = float("nan"), float("-inf")
    checkpoint = Checkpoint.open(folder_of(tmp_path, {"w": bad}))
    assert torch.equal(checkpoint.read("w").isnan(), bad.isnan())
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'w' in .*model.safetensors has 1 NaN and 1 infinite values, the first at"
        r" \[2, 3\]",
    ):
        checkpoint.read("w", check_finite=True)
    with pytest.raises(CheckpointError, match=r"0 NaN and 1 infinite .* first at \[3, 0\]; repair"):
        checkpoint.read_rows("w", 3, 4, check_finite=True)
    checkpoint.read_rows("w", 0, 2, check_finite=True)


def test_hash_depends_on_every_byte(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", {"t": A})
    folder_of(tmp_path / "b", {"t": A})
    first = Checkpoint.open(tmp_path / "a").sha256()
    assert first == Checkpoint.open(tmp_path / "b").sha256()
    folder_of(tmp_path / "b", {"t": A + 1})
    assert first != Checkpoint.open(tmp_path / "b").sha256()
    folder_of(tmp_path / "b", {"t": A})
    (tmp_path / "b" / "config.json").write_text('{"model_type":  "llama"}')
    assert first != Checkpoint.open(tmp_path / "b").sha256()


def test_side_files_and_what_is_skipped(tmp_path: Path) -> None:
    sharded(tmp_path, TWO)
    kept = ["LICENSE", "chat_template.jinja", "merges.txt", "tokenizer.json", "tokenizer.model"]
    left = [
        ".gitattributes",
        "consolidated.pth",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        *("a.npy", "b.pkl", "c.PICKLE", "d.joblib", "e.pt"),
        *("model.onnx", "model.onnx.data", "model.onnx.data.2", "model.onnx.json"),
    ]
    for name in (*kept, *left, "README.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / "original").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    checkpoint = Checkpoint.open(tmp_path)
    assert [p.name for p in checkpoint.side_files()] == kept
    assert checkpoint.skipped_files == sorted(
        [*left, "original/", "dangling (a link that leads nowhere)"]
    )


def test_links_are_carried_only_from_the_folder_and_its_hub_blobs(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    plain = sharded(tmp_path / "plain", TWO)
    (plain / "vocab.json").write_text("{}")
    (plain / "merges.txt").symlink_to("vocab.json")
    (plain / "tokenizer.json").symlink_to(secret)
    repo = tmp_path / "models--org--name"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "blobs").mkdir()
    snapshot = sharded(repo / "snapshots" / "abc", TWO)
    (repo / "blobs" / "123").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    (snapshot / "LICENSE").symlink_to("../../../secret")
    outside = "a link that leads outside the folder"
    assert [p.name for p in Checkpoint.open(plain).side_files()] == ["merges.txt", "vocab.json"]
    assert Checkpoint.open(plain).skipped_files == [f"tokenizer.json ({outside})"]
    assert [p.name for p in Checkpoint.open(snapshot).side_files()] == ["tokenizer.json"]
    assert Checkpoint.open(snapshot).skipped_files == [f"LICENSE ({outside})"]


def test_names_that_a_run_makes_itself_are_left_behind(tmp_path: Path) -> None:
    from compress.checkpoint.sidefiles import RUNS_OWN
    from compress.runs.output import WORKING

    folder = sharded(tmp_path, TWO)
    names = sorted({*WORKING, *RUNS_OWN, "x.partial"} - {"calibration.safetensors"})
    for name in names:
        (folder / name).write_text("x")
    assert Checkpoint.open(folder).side_files() == []
    assert Checkpoint.open(folder).skipped_files == [
        f"{name} (a run makes a file of this name)" for name in names
    ]


def test_folder_and_config_refusals(tmp_path: Path) -> None:
    assert "does not exist; give the folder" in refusal(tmp_path / "no")
    folder = folder_of(tmp_path / "m", {"t": A})
    assert "is a file; give the folder" in refusal(folder / "model.safetensors")
    config = folder / "config.json"
    config.write_text('{"a": 1,\n "b": }')
    assert f"{config}:2:7 is not valid JSON: Expecting value" in refusal(folder)
    config.write_text("[1]")
    assert "holds a list, not an object" in refusal(folder)
    config.write_bytes(b"\xff{}")
    assert "is not valid JSON: 'utf-8' codec" in refusal(folder)
    config.write_text("[" * 100_000)
    assert "is not valid JSON" in refusal(folder)
    config.unlink()
    assert "has no config.json; give the folder" in refusal(folder)


def test_pickles_are_refused_with_a_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "has no weights: model.safetensors or" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    message = refusal(tmp_path)
    assert "only as a pickle (pytorch_model.bin), which can run code" in message
    assert message.count("save_pretrained(") == 2
    command = message.split("-c ", 1)[1].strip('"')
    compile(command, "command", "exec")


def test_which_files_is_ambiguous(tmp_path: Path) -> None:
    folder = sharded(tmp_path, TWO)
    save_file({"c": A}, folder / "model.safetensors")
    assert "has both model.safetensors and model.safetensors.index.json" in refusal(folder)
    (folder / INDEX).unlink()
    assert Checkpoint.open(folder).skipped_files == ["one.safetensors", "two.safetensors"]
    (folder / "model.safetensors").unlink()
    assert "has 2 safetensors files (one.safetensors, two.safetensors) but no" in refusal(folder)
    (folder / "one.safetensors").unlink()
    assert "has two.safetensors but no model.safetensors; rename" in refusal(folder)
    (folder / "two.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert f"has 1 safetensors files (model-00001-of-00002.safetensors) but no {INDEX}" in refusal(
        folder
    )


def test_weights_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").mkdir()
    assert "model.safetensors is not a file" in refusal(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder = sharded(tmp_path, TWO)
    true = {"a": "one.safetensors", "b": "two.safetensors"}
    assert list(Checkpoint.open(folder).tensors) == ["a", "b"]
    write_index(folder, {**true, "c": "two.safetensors"})
    assert "two.safetensors lacks tensor 'c' though" in refusal(folder)
    write_index(folder, {"a": "two.safetensors", "b": "one.safetensors"})
    assert "says that tensor 'a' is in two.safetensors, but it is in one" in refusal(folder)
    write_index(folder, {"a": "one.safetensors"})
    assert Checkpoint.open(folder).skipped_files == ["two.safetensors"]
    save_file({"a": A, "d": A.clone()}, folder / "one.safetensors")
    assert "one.safetensors has tensor 'd', unknown to" in refusal(folder)
    save_file({"a": A, "b": B}, folder / "one.safetensors")
    write_index(folder, true)
    assert "tensor 'b' is in both one.safetensors and two.safetensors" in refusal(folder)
    write_index(folder, {**true, "x": "three.safetensors"})
    assert "three.safetensors is missing though model.safetensors.index.json names" in refusal(
        folder
    )


@pytest.mark.parametrize(
    "file",
    [
        *("../out.safetensors", "sub/../../out.safetensors", "/etc/passwd", "/tmp/x.safetensors"),
        *("C:\\x.safetensors", "..\\x.safetensors", "", ".", "config.json", "a\0.safetensors"),
        "link/out.safetensors",
    ],
)
def test_index_may_not_lead_outside(tmp_path: Path, file: str) -> None:
    save_file({"a": A}, tmp_path / "out.safetensors")
    folder = sharded(tmp_path / "model", TWO)
    (folder / "link").symlink_to(tmp_path)
    write_index(folder, {"a": file})
    assert f"names {file!r}, which is not a .safetensors file inside the folder" in refusal(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"a": 3}, "maps tensor 'a' to 3, not a file name"),
    ],
)
def test_index_of_wrong_type(tmp_path: Path, index: object, message: str) -> None:
    folder = sharded(tmp_path, TWO)
    write_index(folder, index)
    assert message in refusal(folder)


def test_shards_in_a_subfolder_and_linked_blobs(tmp_path: Path) -> None:
    folder = sharded(
        tmp_path / "m", {"parts/one.safetensors": {"a": A}, "two.safetensors": {"b": B}}
    )
    blob = tmp_path / "blob"
    (folder / "two.safetensors").rename(blob)
    (folder / "two.safetensors").symlink_to("../blob")
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.read("a"), A)
    assert torch.equal(checkpoint.read("b"), B)
    assert checkpoint.skipped_files == []
