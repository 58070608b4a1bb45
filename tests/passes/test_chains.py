"""Stages that scale channels, alone and before others: what is written still is the model."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.blocks.skeleton import Skeleton
from compress.blocks.walk import BlockInput, LoadedBlock
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, RecipeError
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.passes.quantize import observe
from compress.verbs import RunOptions, make_plan, run
from helpers.short_runs import recipe, text_source
from helpers.tiny_models import TABLED

FAMILIES = tuple(family for family in TABLED if family != "olmo2")  # which has no norm to scale
FINE = {"bits": 8, "granularity": "group", "group_size": 4}
W4 = {"bits": 4, "granularity": "group", "group_size": 16}
AWQ = {"method": "awq", "grid": 5}
SMOOTH = {"method": "smoothquant", "pairs": "all"}
GPTQ = {"method": "gptq", "scheme": W4}


def logits(weights: Weights) -> torch.Tensor:
    skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
    ids = torch.arange(32).reshape(2, 16) % weights.spec.vocab
    context, hidden = skeleton.context(ids), skeleton.embed(weights, ids)
    for block in weights.spec.blocks:
        module = skeleton.load_block(weights, block.index)
        hidden = skeleton.run_block(module, block.index, hidden, context)
    final = skeleton.final_hidden(weights, hidden).flatten(0, 1)
    return skeleton.logits(weights, final)


def change(result: Path, source: Path) -> float:
    """Relative difference of all logits between two checkpoints."""
    got, want = (logits(open_weights(Checkpoint.open(folder))) for folder in (result, source))
    return float((got - want).norm() / want.norm())


# Each family by one of both, in turns; by the other in the long set.
PAIRS = [
    pytest.param(family, method, id=f"{family}-{method['method']}",
                 marks=() if (place + 2 * turn) % 4 == 0 else pytest.mark.long)
    for place, family in enumerate(FAMILIES)
    for turn, method in enumerate((AWQ, SMOOTH))
]  # fmt: skip


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_scaling_every_pair_leaves_the_model_as_it_is(
    tiny, tmp_path: Path, family: str, method: dict[str, object]
) -> None:
    # Rounding leaves 1 %, and 5 % where it sends a token to another expert; a norm that is not
    # written with its fold leaves 20 % and more.
    source = tiny(family, dtype="fp32")
    stage = {**method, "scheme": FINE}
    calibration = text_source(tmp_path)
    report = run(
        recipe(stage, calibration=calibration),
        source,
        tmp_path / "out",
        options=RunOptions(dtype="fp32"),
    )
    assert change(tmp_path / "out", source) < (0.1 if family in ("mixtral", "qwen3_moe") else 0.02)
    folds = [note for layer in report.layers for note in layer.folds]
    assert any("alpha" in note or "ratio" in note for note in folds)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    norms = [name for name in after if name in before and "norm" in name.replace("ln_", "norm")]
    assert any(not torch.equal(before[name], after[name]) for name in norms)


def test_chained_stages_share_the_pass(tiny, tmp_path: Path, monkeypatch) -> None:
    seen: list[int] = []
    inputs = LoadedBlock.inputs

    def counted(self: LoadedBlock) -> Iterator[BlockInput]:
        seen.append(self.spec.index)
        return inputs(self)

    monkeypatch.setattr(LoadedBlock, "inputs", counted)
    chain = recipe(AWQ, GPTQ, calibration=text_source(tmp_path))
    report = run(chain, tiny("llama"), tmp_path / "out")
    blocks = len({layer.block for layer in report.layers if layer.block is not None})
    assert seen == [i for i in range(blocks) for _ in ("observe", "run on")][:-1]
    assert report.calibration is not None
    assert report.calibration["passes_per_block"] == 2
    passes = {layer.block: layer.passes for layer in report.layers if layer.passes}
    assert passes == {i: 1 if i == blocks - 1 else 2 for i in range(blocks)}
    assert {layer.method for layer in report.layers if layer.error is not None} <= {"gptq", "rtn"}


def test_rounds_of_a_narrow_budget_see_the_scaled_block(tiny, tmp_path: Path, monkeypatch) -> None:
    chain = recipe(AWQ, {**GPTQ, "scheme": FINE}, calibration=text_source(tmp_path))
    source = tiny("llama", dtype="fp32")
    run(chain, source, tmp_path / "one", options=RunOptions(dtype="fp32"))
    monkeypatch.setattr(observe, "HESSIAN_BYTES", 1)
    report = run(chain, source, tmp_path / "many", options=RunOptions(dtype="fp32"))
    assert max(layer.passes or 0 for layer in report.layers) > 4
    assert change(tmp_path / "many", source) < 0.02
    assert change(tmp_path / "many", tmp_path / "one") < 0.02


@pytest.mark.parametrize(
    "method",
    [pytest.param(AWQ, id="awq"), pytest.param(SMOOTH, id="smoothquant", marks=pytest.mark.long)],
)
def test_experts_seen_in_rounds_of_their_own_are_scaled_together(
    tiny, tmp_path: Path, monkeypatch, method: dict[str, object]
) -> None:
    chain = recipe({**method, "scheme": FINE}, calibration=text_source(tmp_path))
    source = tiny("mixtral", dtype="fp32")
    whole = run(chain, source, tmp_path / "one", options=RunOptions(dtype="fp32"))
    monkeypatch.setattr(observe, "HESSIAN_BYTES", 1)
    report = run(chain, source, tmp_path / "many", options=RunOptions(dtype="fp32"))
    assert max(layer.passes or 0 for layer in report.layers) > 4
    notes = {layer.name: layer.folds for layer in report.layers if layer.block is not None}
    assert notes == {x.name: x.folds for x in whole.layers if x.block is not None}
    experts = [layer for layer in report.layers if layer.expert is not None]
    assert experts
    assert all("alpha" in " ".join(x.folds) or "ratio" in " ".join(x.folds) for x in experts)
    gates = [layer for layer in experts if layer.role == "gate"]
    assert all("post_attention_layernorm" in " ".join(x.folds) for x in gates)
    assert change(tmp_path / "many", source) < 0.1
    assert change(tmp_path / "many", tmp_path / "one") < 0.1


def test_sequential_gptq_behind_awq(tiny, tmp_path: Path) -> None:
    stage = {"method": "gptq", "scheme": FINE, "true_sequential": True}
    source = tiny("llama", dtype="fp32")
    run(
        recipe(AWQ, stage, calibration=text_source(tmp_path)),
        source,
        tmp_path / "o",
        options=RunOptions(dtype="fp32"),
    )
    assert change(tmp_path / "o", source) < 0.02


def huge(source: Path, folder: Path, ending: str) -> Path:
    """A copy of a checkpoint in fp16 whose tensors of one name are near the end of the range, and
    GPT-2's c_attn so large that channels are scaled down."""
    copy = Path(shutil.copytree(source, folder / "huge"))
    tensors = load_file(copy / "model.safetensors")
    for name in (name for name in tensors if name.endswith(ending)):
        tensors[name] = torch.full_like(tensors[name], 60000)
    for name in (name for name in tensors if name.endswith("c_attn.weight")):
        tensors[name] = tensors[name] * 1000
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_bias_that_fp16_cannot_hold_keeps_its_channel(tiny, tmp_path: Path) -> None:
    source = huge(tiny("gpt2", dtype="fp16"), tmp_path, "ln_1.bias")
    stage = {**SMOOTH, "alpha": 0.0, "scheme": FINE}
    calibration = text_source(tmp_path)
    run(
        recipe(stage, calibration=calibration),
        source,
        tmp_path / "out",
        options=RunOptions(dtype="fp32"),
    )
    after = load_file(tmp_path / "out" / "model.safetensors")
    biases = [tensor for name, tensor in after.items() if name.endswith("ln_1.bias")]
    assert biases
    assert all(bool((bias == 60000).all()) for bias in biases)


def test_a_router_that_fp16_cannot_hold_is_refused(tiny, tmp_path: Path) -> None:
    source = huge(tiny("mixtral", dtype="fp16"), tmp_path, "block_sparse_moe.gate.weight")
    chain = recipe({**SMOOTH, "scheme": FINE}, calibration=text_source(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        run(chain, source, tmp_path / "out", options=RunOptions(dtype="fp32"))
    assert "block_sparse_moe.gate.weight is beyond the range of torch.float16" in str(caught.value)


def refusal(*stages: dict[str, object], folder: Path, model: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(*stages, calibration=text_source(folder)), model)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_chains_that_make_no_sense_are_refused(tiny, tmp_path: Path) -> None:
    model = tiny("llama")

    def refused(*stages: dict[str, object]) -> str:
        return refusal(*stages, folder=tmp_path, model=model)

    assert "put it first" in refused(GPTQ, AWQ)
    assert "no later stage rounds" in refused(AWQ)
    assert "is another one than that of stages[1]" in refused({**AWQ, "scheme": FINE}, GPTQ)
    only = {**AWQ, "scheme": {**W4}, "targets": ["q_proj", "k_proj"]}
    assert "v_proj, which reads it too" in refused(only, {**GPTQ, "targets": ["v_proj"]})


def test_a_family_without_a_norm_to_scale(tiny, tmp_path: Path) -> None:
    norms = {"method": "smoothquant", "scheme": FINE}
    message = refusal(norms, folder=tmp_path, model=tiny("olmo2"))
    assert "no norm or linear to scale between; first reason: pairs is norms" in message
    source, calibration = tiny("olmo2", dtype="fp32"), text_source(tmp_path)
    stage = {**AWQ, "scheme": FINE}
    report = run(
        recipe(stage, calibration=calibration),
        source,
        tmp_path / "out",
        options=RunOptions(dtype="fp32"),
    )
    assert change(tmp_path / "out", source) < 0.02
    scaled = {note.split(": ")[0] for layer in report.layers for note in layer.folds}
    assert len(scaled) == 4  # v and up of two blocks


def test_a_decoder_in_no_table_has_nothing_to_scale(tiny, tmp_path: Path) -> None:
    message = refusal({**AWQ, "scheme": W4}, folder=tmp_path, model=tiny("granite"))
    assert "is in no architecture table" in message
