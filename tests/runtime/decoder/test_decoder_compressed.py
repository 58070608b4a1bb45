"""Compressed checkpoints in the engine's decoder: the logits that evaluation streams of them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.blocks.skeleton import Skeleton
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.formats.kv_cache import FP8_CACHE, INT8_CACHE
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import Runs, load

G4 = QuantScheme(bits=4, group_size=32)
LATENT = "deepseek_v3"
SCHEMES = {
    "int4": G4,
    "int4 asymmetric": QuantScheme(bits=4, group_size=32, symmetric=False),
    "int3 in channels": QuantScheme(bits=3, granularity="channel", group_size=0),
    "W8A8": PRESETS["W8A8"],
    "FP8_DYNAMIC": PRESETS["FP8_DYNAMIC"],
    "NVFP4A16": PRESETS["NVFP4A16"],
}


def streamed(folder: Path, ids: Tensor) -> Tensor:
    """Logits [tokens, vocab], block by block through transformers' modules."""
    weights = open_weights(Checkpoint.open(folder))
    skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
    context, hidden = skeleton.context(ids[None]), skeleton.embed(weights, ids[None])
    for index in range(len(weights.spec.blocks)):
        block = skeleton.load_block(weights, index)
        stored = skeleton.stored_cache(weights, index)
        hidden = skeleton.run_block(block, index, hidden, context, stored)
    return skeleton.logits(weights, skeleton.final_hidden(weights, hidden)[0])


def check(folder: Path, rounded: bool = False) -> None:
    """rounded: inputs are; a number that is a hair off then goes to the next of 256 codes."""
    ids = torch.randint(1, 256, (20,), generator=torch.Generator().manual_seed(0))
    runs = Runs(load(folder), texts=1, most=32)
    whole = runs.whole(ids.tolist())
    assert (whole - streamed(folder, ids)).norm() < (1e-2 if rounded else 1e-5) * whole.norm()
    parts = [runs.step([(0, ids[at : at + 3].tolist(), at, 20)])[0] for at in range(0, 20, 3)]
    assert torch.equal(torch.cat(parts), whole)


FAMILIES = ("llama", "phi3", "gpt2", "qwen3_moe", "gemma2", "opt")
# Each scheme with three families, each family with three schemes; all others in the long set.
PAIRS = [
    pytest.param(name, family, id=f"{name}-{family}",
                 marks=() if (row + column) % 2 == 0 else pytest.mark.long)
    for row, name in enumerate(SCHEMES)
    for column, family in enumerate(FAMILIES)
] + [
    pytest.param(name, LATENT, id=f"{name}-{LATENT}",
                 marks=() if name == "W8A8" else pytest.mark.long)
    for name in SCHEMES
]  # fmt: skip


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_families_and_schemes(name: str, family: str, tmp_path: Path) -> None:
    source = tiny_models.make(family, tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", SCHEMES[name])
    check(tmp_path / "out", rounded=SCHEMES[name].activation is not None)


@pytest.mark.parametrize("cache", [FP8_CACHE, INT8_CACHE], ids=["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_keys_and_values_are_rounded_by_scales(
    family: str, cache: ActivationScheme, tmp_path: Path
) -> None:
    """As evaluation rounds them, which it would not be without the scales."""
    source = tiny_models.make(family, tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", lambda linear: None, kv_cache=cache)
    check(tmp_path / "out", rounded=True)
    ids = list(range(3, 23))
    found, plain = (Runs(load(x), texts=1, most=32).whole(ids) for x in (tmp_path / "out", source))
    wanted = streamed(tmp_path / "out", torch.tensor(ids))
    assert (found - wanted).norm() < 0.05 * (found - plain).norm()


def test_some_layers_and_a_head(tmp_path: Path) -> None:
    def choose(linear: LinearSpec) -> QuantScheme | None:
        return None if linear.role in ("k", "gate") else G4

    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32", bias=True)
    compressed_models.write(source, tmp_path / "out", choose, head=SCHEMES["int4 asymmetric"])
    check(tmp_path / "out")


def test_codes_stay_codes(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    compressed_models.write(source, tmp_path / "out", G4)
    for layer in load(tmp_path / "out").layers:
        assert not isinstance(layer.attention.out.weight, Tensor)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from compress.errors import CheckpointError

    folder = tiny_models.make("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' in .* has 1"):
        load(folder)
