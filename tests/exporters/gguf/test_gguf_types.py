"""Types of a file's tensors: what is taken without a word, what the user asks for, what is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize

from compress.cli.main import main
from compress.errors import CheckpointError, RecipeError
from compress.quant.scheme import QuantScheme
from compress.recipe import builtin_names
from compress.verbs import ArtifactTarget, dry_artifact
from compress_exporters.decoded import decoded
from compress_exporters.exporter import Options
from compress_exporters.gguf import target
from compress_exporters.gguf.in_file import InFile
from compress_exporters.gguf.readback import read_back
from compress_exporters.gguf.target import GGUF
from compress_exporters.gguf.types.told import WITH_RECIPE
from helpers import tiny_models
from helpers.exporters.exports import SYM
from helpers.exporters.gguf_files import coded, planned, tiny, written


def types(plan: Any) -> dict[str, str]:
    return dict(zip((x.name for x in plan.pieces), plan.kinds, strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(tmp_path_factory.mktemp("types") / "model", dtype="bf16")


def test_without_a_word_a_file_has_16_bits_and_an_embedding_of_8(plain: Any) -> None:
    plan = planned(plain, dtype=None)
    found = types(plan)
    assert found["token_embd.weight"] == found["output.weight"] == "Q8_0"
    assert found["blk.0.attn_q.weight"] == found["blk.1.ffn_down.weight"] == "F16"
    assert found["blk.0.attn_norm.weight"] == "F32"
    (note,) = plan.notes
    assert note == (
        "embedding and head are rounded to Q8_0: 34.8 kB in place of 65.5 kB in 16 bits"
        " (--embedding f16 keeps them)"
    )


def test_a_dtype_that_is_asked_for_is_that_of_the_embedding_too(plain: Any) -> None:
    for dtype, kind in (("fp32", "F32"), ("fp16", "F16"), ("bf16", "BF16")):
        plan = planned(plain, dtype=dtype)
        assert {x for name, x in types(plan).items() if "norm" not in name} == {kind}
        assert not plan.notes
    mixed = types(planned(plain, dtype="fp32", embedding="q8_0"))
    assert (mixed["token_embd.weight"], mixed["blk.0.ffn_up.weight"]) == ("Q8_0", "F32")


def test_bf16_goes_over_bit_for_bit(plain: Any, tmp_path: Path) -> None:
    plan, path = written(plain, tmp_path, dtype="bf16")
    assert plan.exact
    assert read_back(plan, path)[0].endswith("bit for bit")


def test_a_rounded_embedding_is_ggufs_own(plain: Any, tmp_path: Path) -> None:
    _, path = written(plain, tmp_path, dtype=None)
    (stored,) = (x for x in GGUFReader(path).tensors if x.name == "token_embd.weight")
    values = decoded(plain, plain.spec.embedding).float().numpy()
    want = dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    got = dequantize(stored.data, stored.tensor_type)
    assert np.square(got - values).sum() <= 1.001 * np.square(want - values).sum()


def test_widths_that_no_block_divides_are_told(tmp_path: Path) -> None:
    narrow = tiny(tmp_path / "model", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    plan = planned(narrow, dtype=None)
    assert types(plan)["token_embd.weight"] == "F16"
    (note,) = plan.notes
    assert note == (
        "2 tensors take F16 in place of Q8_0, as rows of 48 numbers are no whole blocks of 32:"
        " token_embd.weight, output.weight"
    )


def test_super_blocks_that_do_not_fit_fall_back_as_llamacpp_does(plain: Any) -> None:
    plan = planned(plain, embedding="q6_k")
    assert types(plan)["token_embd.weight"] == "Q8_0"
    assert "2 tensors take Q8_0 in place of Q6_K, as rows of 64 numbers" in plan.notes[1]


def test_a_proof_is_held_to_what_the_file_says(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding that is not the file's would be 100 times too far away."""
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    export = GGUF.plan(plain, Options("bf16", embedding="q8_0"))
    result = export.write(tmp_path, lambda *_: None)
    assert any(x.startswith("rounding to Q8_0 lost 0.") for x in result.notes)
    proof = export.verify(tmp_path)
    assert proof.level == "tokens"
    assert proof.max_logit_error is not None
    assert proof.max_logit_error < 1e-4
    assert proof.detail[1] == (
        "gguf reads 2 tensors back, rounded here; logits are held to those numbers"
    )
    assert proof.detail[2].startswith(
        "rounding into blocks moves log-probabilities of 48 random tokens by 0."
    )
    monkeypatch.setattr(InFile, "read", lambda self, name, check_finite=False: decoded(plain, name))
    with pytest.raises(CheckpointError, match="logits in transformers are not those of the weight"):
        export.verify(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_weights_in_the_file_lie_as_in_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Rows that change places, turned weights, stacked experts."""
    checkpoint = tiny(tmp_path / "model", family)
    plan, path = written(checkpoint, tmp_path, dtype=None, type="Q8_0")
    held = InFile.of(plan, path)
    assert set(held.rounded) >= {x.tensor for x in checkpoint.spec.linears() if x.role != "router"}
    for linear in checkpoint.spec.linears():
        was, becomes = decoded(checkpoint, linear.tensor).float(), held.read(linear.tensor)
        assert becomes.shape == was.shape
        assert (becomes - was).norm() < 0.01 * was.norm()


def test_codes_in_more_bits_than_they_need_are_told(tmp_path: Path) -> None:
    plan = planned(coded(tmp_path, QuantScheme(bits=3, group_size=32)))
    (note,) = plan.notes
    assert note == (
        "14 weights in int3 sym g32 take Q4_0, no code changes: 34.6 kB, and 27.1 kB in the"
        " checkpoint; smaller is the recipe gguf-q3_k_s, or --type Q3_K_S, of the dense checkpoint"
    )


def test_recipes_that_are_named_are_built_in() -> None:
    files = [name for name in builtin_names() if name.startswith("gguf-")]
    assert sorted(files) == sorted(f"gguf-{name.lower()}" for name in WITH_RECIPE)


def test_codes_that_become_dense_have_their_cost_told(tmp_path: Path) -> None:
    first, second = planned(coded(tmp_path, SYM, act_order=True), dtype=None).notes[1:]
    assert first.startswith("14 quantized weights become F16, as neighbouring columns are in")
    assert second.startswith("what became dense takes 123 kB, and 38.6 kB in the ")
    assert second.endswith(
        "checkpoint; smaller is a stage {method: k_quants, type: IQ4_XS}, or --type IQ4_XS, of the"
        " dense checkpoint"
    )


def test_options_of_files_are_for_files(tmp_path: Path, capsys: Any) -> None:
    folder = tiny_models.make("llama", tmp_path / "model")
    for more, said in (
        (["--embedding", "f16"], "--embedding is for gguf, and --to is onnx; leave it out"),
        (["--type", "Q4_K_M"], "--type is for gguf, and --to is onnx; leave it out"),
        (["--dtype", "bf16"], "--dtype is bf16, and --to onnx has fp32 and fp16"),
    ):
        assert main(["export", str(folder), "--to", "onnx", "--dry-run", *more]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(RecipeError, match="--embedding is for gguf, and --to is onnx"):
        dry_artifact(folder, ArtifactTarget("onnx", Options(embedding="f16")))
