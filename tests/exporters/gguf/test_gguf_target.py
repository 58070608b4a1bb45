"""The target gguf: what is written reads back, what is rounded is told, what is wrong is found."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize

from compress.cli.main import main
from compress.errors import CheckpointError, DependencyError, OutputError, RecipeError
from compress.formats import CodedWeights
from compress.formats.gguf.arches import ARCHES
from compress.quant.scheme import PRESETS, QuantScheme
from compress_exporters import exporter
from compress_exporters.decoded import decoded
from compress_exporters.exporter import Options
from compress_exporters.gguf import data, loaded, target
from compress_exporters.gguf.readback import read_back
from compress_exporters.gguf.target import GGUF
from compress_exporters.gguf.write import FILE
from helpers import compressed_models, tiny_models
from helpers.exporters.exports import ASYM, SYM
from helpers.exporters.gguf_files import coded, planned, source, tiny, written
from helpers.exporters.tensorrt_graphs import with_outliers

EXACT = Options("fp32")
HOW: dict[str, dict[str, Any]] = {"smollm3": {"no_rope_layers": [1, 1]}, "gemma2": {"tied": True}}


def read(path: Path) -> dict[str, Any]:
    return {x.name: x for x in GGUFReader(path).tensors}


def numbers(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize("family", ARCHES)
def test_every_family_reads_back(family: str, tmp_path: Path) -> None:
    plan, path = written(tiny(tmp_path / "model", family, **HOW.get(family, {})), tmp_path)
    (line,) = read_back(plan, path)
    count = len(plan.pieces)
    assert line == f"gguf reads {count} tensors back as they are in the checkpoint, bit for bit"
    assert set(plan.kinds) == {"F32"}


@pytest.mark.parametrize("part", [64, 1 << 23])
def test_a_file_is_the_same_in_any_parts(
    part: int, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "PART", part)
    _, path = written(plain, tmp_path)
    embedding = read(path)["token_embd.weight"]
    assert torch.equal(numbers(embedding), decoded(plain, plain.spec.embedding))


def test_rows_of_queries_lie_as_llamacpp_has_them(plain: Any, tmp_path: Path) -> None:
    """transformers' own reader undoes it; here it is done by hand."""
    _, path = written(plain, tmp_path)
    weight = decoded(plain, "model.layers.0.self_attn.q_proj.weight")
    got = numbers(read(path)["blk.0.attn_q.weight"]).view(4, 8, 2, -1)
    assert torch.equal(got[:, :, 0], weight.view(4, 16, -1)[:, :8])
    assert torch.equal(got[:, :, 1], weight.view(4, 16, -1)[:, 8:])


def test_gemmas_norms_have_their_one(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path / "model", "gemma2", tied=True)
    _, path = written(checkpoint, tmp_path)
    want = decoded(checkpoint, "model.norm.weight") + 1
    assert torch.equal(numbers(read(path)["output_norm.weight"]), want)


def test_experts_lie_in_one_tensor(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path / "model", "mixtral")
    _, path = written(checkpoint, tmp_path)
    down = read(path)["blk.1.ffn_down_exps.weight"]
    assert [int(x) for x in down.shape] == [96, 64, 4]
    want = decoded(checkpoint, "model.layers.1.block_sparse_moe.experts.2.w2.weight")
    assert torch.equal(numbers(down)[2], want)


KINDS = {
    "int4": (SYM, "Q4_0", 2),
    "int3": (QuantScheme(bits=3, group_size=32), "Q4_0", 2),
    "int8 in groups": (QuantScheme(bits=8, group_size=64), "Q8_0", 7),
    "int8 a row": (PRESETS["W8A16"], "Q8_0", 7),
    "int5": (QuantScheme(bits=5, group_size=32, symmetric=False), "Q8_0", 7),
}


@pytest.mark.parametrize("case", KINDS)
def test_codes_go_over_as_they_are(case: str, tmp_path: Path) -> None:
    scheme, kind, file_type = KINDS[case]
    checkpoint = coded(tmp_path, scheme)
    plan, path = written(checkpoint, tmp_path / "out")
    assert plan.kinds.count(kind) == 14
    assert plan.rounded.changed == 0
    read_back(plan, path)
    got = numbers(read(path)["blk.1.ffn_down.weight"])
    assert torch.equal(got, decoded(checkpoint, "model.layers.1.mlp.down_proj.weight"))
    assert dict(plan.fields)["general.file_type"] == file_type
    assert dict(plan.fields)["general.quantization_version"] == 2


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "qwen3_moe"])
def test_codes_of_fused_turned_and_stacked_weights(family: str, tmp_path: Path) -> None:
    plan, path = written(coded(tmp_path, SYM, family), tmp_path / "out")
    assert plan.kinds.count("Q4_0") >= 8
    read_back(plan, path)


def test_offsets_are_rounded_when_allowed(tmp_path: Path) -> None:
    checkpoint = coded(tmp_path, ASYM)
    with pytest.raises(RecipeError) as problem:
        planned(checkpoint)
    said = r"\d+ of 3840 scales and offsets are not exact in fp16, in which GGUF's blocks have them"
    assert re.fullmatch(
        rf"{said} \(the largest changes by 0\.000\d+ of its value\); let them be rounded with"
        r" --round-scales \(round_scales: true in a recipe's export\)",
        str(problem.value),
    )
    plan, path = written(checkpoint, tmp_path / "out", round_scales=True)
    assert plan.kinds.count("Q4_1") == 14
    (told,) = plan.notes
    assert told.startswith(f"{plan.rounded.changed} of 3840 scales and offsets are rounded to fp16")
    assert read_back(plan, path)[0].endswith("up to the rounding to fp16")


@pytest.mark.parametrize("factor", [1e-12, 1e8])
def test_scales_that_fp16_loses(factor: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = coded(tmp_path, SYM, dtype="fp32").checkpoint.path
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name][0] = factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError) as problem:
        planned(source(folder), round_scales=True)
    assert str(problem.value) == (
        "2 of 1920 scales and offsets are too large or too small for fp16, in which GGUF's blocks"
        " have them; take onnx, which keeps them"
    )


DENSE = {
    "act-order": (SYM, {"act_order": True}, "neighbouring columns are in different groups"),
    "floats": (PRESETS["FP8_DYNAMIC"], {}, "their codes are floats"),
    "small groups": (QuantScheme(group_size=16), {}, "groups of 16 are no whole blocks of 32"),
}


@pytest.mark.parametrize("case", DENSE)
def test_what_no_block_holds_becomes_dense(case: str, tmp_path: Path) -> None:
    scheme, how, reason = DENSE[case]
    plan, path = written(coded(tmp_path, scheme, **how), tmp_path / "out", dtype="fp16")
    assert plan.kinds.count("F16") == 16
    assert plan.notes[0].startswith(f"14 quantized weights become F16, as {reason}")
    read_back(plan, path)


def test_experts_that_are_stored_in_different_ways(tmp_path: Path) -> None:
    original = tiny_models.make("mixtral", tmp_path / "original", dtype="fp16")
    folder = compressed_models.write(
        original, tmp_path / "coded", lambda x: SYM if x.expert != 1 else None
    ).folder
    plan, path = written(source(folder), tmp_path / "out")
    (note,) = (x for x in plan.notes if "experts" in x)
    assert note.startswith(
        "6 quantized weights become F32, as experts are stored in different ways: blk.0.ffn_"
    )
    read_back(plan, path)


def test_quantized_inputs_are_told(tmp_path: Path) -> None:
    plan = planned(coded(tmp_path, PRESETS["W8A8"]))
    assert plan.notes == (
        "14 linears have quantized inputs in the checkpoint; llama.cpp rounds inputs its own way",
    )


@pytest.mark.parametrize("case", ["floats", "columns in 16 bits"])
def test_quantized_inputs_of_what_becomes_dense_are_told(case: str, tmp_path: Path) -> None:
    if case == "floats":
        checkpoint = coded(tmp_path, PRESETS["FP8_DYNAMIC"])
    else:
        original = tiny_models.make("llama", tmp_path / "original")
        checkpoint = source(with_outliers(original, tmp_path / "coded"))
    first, _, last = planned(checkpoint).notes
    assert first.startswith("14 quantized weights become F32, as ")
    assert last == (
        "14 linears that become F32 have quantized inputs in the checkpoint; in the file theirs are"
        " not quantized"
    )


def test_codes_are_read_where_they_count_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is made four times an export."""
    whole = CodedWeights.quantized
    seen: list[str] = []
    monkeypatch.setattr(
        CodedWeights, "quantized", lambda self, name: seen.append(name) or whole(self, name)
    )
    planned(coded(tmp_path / "4", ASYM), round_scales=True)
    assert not seen
    planned(coded(tmp_path / "8", replace(ASYM, bits=8)), round_scales=True)
    assert len(seen) == 14


def test_numbers_too_large_for_fp16(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, :2] = 1e6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as problem:
        written(source(folder), tmp_path / "out", dtype="fp16")
    assert str(problem.value) == (
        "2 numbers of model.layers.0.mlp.up_proj.weight are too large for fp16; write fp32"
    )


def test_what_is_written_is_told(plain: Any, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    options = Options(dtype="fp16")
    result = GGUF.plan(plain, options).write(tmp_path, lambda *step: told.append(step))
    assert result.files == (FILE,)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, *result.beside}
    assert "config.json" in result.beside
    assert [done for _, done, _ in told] == [*range(1, told[0][2] + 1)]
    assert result.notes[0].endswith(" dense numbers are rounded to fp16")
    written_bytes = (tmp_path / FILE).stat().st_size
    assert written_bytes <= GGUF.plan(plain, options).size < written_bytes + 30_000


def test_two_exports_are_equal(plain: Any, tmp_path: Path) -> None:
    _, first = written(plain, tmp_path / "a")
    _, second = written(plain, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def spoil_number(path: Path, value: float = 3.0) -> str:
    end = GGUFReader(path).tensors[0].data_offset
    with path.open("r+b") as stream:
        stream.seek(int(end))
        stream.write(np.float32(value).tobytes())
    return "1 numbers of token_embd.weight are not the checkpoint's"


def spoil_with_nan(path: Path) -> str:
    return spoil_number(path, np.nan)


def spoil_key(path: Path) -> str:
    stored = path.read_bytes()
    path.write_bytes(
        stored.replace(b"llama.block_count\x04\0\0\0\x02", b"llama.block_count\x04\0\0\0\x03")
    )
    return "llama.block_count is '3'"


@pytest.mark.parametrize("spoil", [spoil_number, spoil_with_nan, spoil_key])
def test_a_spoiled_file_is_found(spoil: Any, plain: Any, tmp_path: Path) -> None:
    plan, path = written(plain, tmp_path)
    read_back(plan, path)
    words = spoil(path)
    with pytest.raises(CheckpointError) as problem:
        read_back(plan, path)
    assert str(problem.value) == f"the file does not read back: {words}; please report this"


def test_without_the_package(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "installed", lambda name: False)
    with pytest.raises(DependencyError) as problem:
        GGUF.plan(plain, EXACT)
    assert str(problem.value) == (
        'gguf needs gguf; install it with `pip install "compress-model[gguf]"`'
    )


def test_a_proof_says_what_was_not_asked(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    GGUF.plan(plain, EXACT).write(tmp_path, lambda *_: None)
    monkeypatch.setattr(target, "fits", lambda needed: False)
    proof = GGUF.plan(plain, EXACT).verify(tmp_path)
    assert (proof.level, proof.max_logit_error) == ("form", None)
    assert proof.detail[-1] == "too little memory is free to compare logits"


def test_a_file_that_only_gguf_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    checkpoint = tiny(tmp_path / "model", "mixtral")
    GGUF.plan(checkpoint, EXACT).write(tmp_path, lambda *_: None)
    proof = GGUF.plan(checkpoint, EXACT).verify(tmp_path)
    assert proof.level == "form"
    assert proof.detail[1:] == (
        "transformers reads no GGUF files of mixtral",
        "llama.cpp was not asked; it is where xllamacpp is installed",
    )


def test_a_class_that_takes_fewer_shapes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads a mistral as a llama, whose heads must divide hidden."""
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    checkpoint = tiny(tmp_path / "model", "mistral", **heads)
    GGUF.plan(checkpoint, EXACT).write(tmp_path, lambda *_: None)
    proof = GGUF.plan(checkpoint, EXACT).verify(tmp_path)
    said = [x for x in proof.detail if x.startswith("transformers reads the file as llama: ")]
    assert len(said) == 1
    assert "not a multiple" in said[0]


def test_transformers_needs_accelerate(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    monkeypatch.setattr(target, "has_accelerate", lambda: False)
    GGUF.plan(plain, EXACT).write(tmp_path, lambda *_: None)
    proof = GGUF.plan(plain, EXACT).verify(tmp_path)
    assert proof.level == "form"
    assert "transformers was not asked; it reads GGUF files where accelerate is installed" in (
        proof.detail
    )


def test_a_process_that_fails_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2; echo no such model >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(CheckpointError) as problem:
        loaded.ask_llamacpp(tmp_path / "x", [[1]], 4, python=str(python))
    assert str(problem.value) == "llama.cpp does not open the file: no such model"


def test_a_process_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    with pytest.raises(CheckpointError) as problem:
        loaded.ask_llamacpp(tmp_path / "x", [[1]], 4, python=str(python), seconds=0.2)
    assert str(problem.value) == (
        "llama.cpp did not answer within 0.2 seconds; --no-verify leaves it out"
    )


def test_a_disk_that_refuses_is_one_line(plain: Any, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as problem:
        GGUF.plan(plain, EXACT).write(tmp_path / "gone", lambda *_: None)
    assert str(problem.value) == (
        f"cannot write {tmp_path / 'gone' / FILE}: No such file or directory; look after the disk,"
        " then export again"
    )


def test_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    folder = coded(tmp_path, ASYM).checkpoint.path
    asked = ["export", str(folder), "--to", "gguf"]
    assert main([*asked, "--dry-run"]) == 2
    assert "let them be rounded with --round-scales" in capsys.readouterr().err
    out = tmp_path / "out"
    assert main([*asked, "--round-scales", "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert "compressed-tensors -> gguf" in told.out
    assert "scales and offsets are rounded to fp16" in told.out
    assert "  proved   logits" in told.out
    assert "transformers: logits within" in told.out
    beside = {path.name for path in folder.iterdir()} - {"model.safetensors", "README.md"}
    assert {path.name for path in out.iterdir()} == {FILE, "README.md", "report", *beside}
    result = json.loads((out / "report" / "report.json").read_bytes())["result"]
    assert set(result["files"]) == {FILE, *beside}
    assert result["bytes"] == (out / FILE).stat().st_size
    assert main([*asked, "--round-scales", "-o", str(out), "--overwrite", "--no-verify"]) == 0
    # What the codes mean, in our own reader: config.json says no more how they were stored.
    opened, given = source(out), source(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.allclose(opened.read(name), decoded(given, name), atol=1e-3)
    assert f"\nStart it\n  llama-completion -m {out}/{FILE} -p 'Once upon a time'" in told.out
    assert f"\n\n  llama-cli -m {out}/{FILE}\n\n  llama-server -m {out}/{FILE}\n\n" in told.out
    card = (out / "README.md").read_text()
    assert f"\n```\nllama-server -m FOLDER/{FILE}\n```\n" in card
    assert "Converting" not in told.err
