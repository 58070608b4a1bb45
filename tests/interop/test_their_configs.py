"""Random changes of a quantization_config: where both read it, compressed-tensors and we find the
same scheme for every module."""

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compress.errors import CompressError
from compress.formats.compressed_tensors import config_read as ct_config_read
from compress.quant.scheme import QuantScheme
from helpers.fuzzing import Sound, config_of
from helpers.mutations import mutate_json

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("compressed_tensors")]

KINDS = ("ct-sym", "ct-asym", "ct-tensor", "ct-w8a8", "ct-block", "ct-mixed")
MODULES = (
    *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"),
    *(f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")),
)


def theirs(block: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of the weights of every module that they quantize; None where they refuse."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.apply import _scheme_from_targets
    from compressed_tensors.utils.match import match_named_modules, match_targets

    known = {k: v for k, v in block.items() if k in QuantizationConfig.model_fields}
    model = torch.nn.Module()
    for name in MODULES:
        _put(model, name.split("."), torch.nn.Linear(2, 2, device="meta"))
    try:
        config = QuantizationConfig.model_validate(known)
        targets = {t: g for g in config.config_groups.values() for t in g.targets}
        return {
            name: _scheme_from_targets(targets, match_targets(name, module, targets), name).weights
            for name, module in match_named_modules(model, targets, config.ignore)
            if isinstance(module, torch.nn.Linear)
        }
    except Exception:  # whatever pydantic and their own checks raise
        return None


def _put(model: torch.nn.Module, path: list[str], module: torch.nn.Module) -> None:
    *above, last = path
    for name in above:
        if not hasattr(model, name):
            model.add_module(name, torch.nn.Module())
        model = getattr(model, name)
    model.add_module(last, module)


def _word(said: Any) -> str:
    """Of an enum: what stands in a file is a string there, what is left out a member."""
    return str(getattr(said, "value", said))


def same(ours: QuantScheme, said: Any) -> bool:
    strategy = "tensor_group" if ours.is_fp4 else ours.granularity
    plain = (said.num_bits, _word(said.type), said.symmetric, _word(said.strategy))
    if plain != (ours.bits, ours.type, ours.symmetric, strategy):
        return False
    if ours.granularity == "block":
        return said.block_structure == [ours.group_size, ours.group_size]
    return ours.granularity != "group" or said.group_size == ours.group_size


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_scheme_for_every_module(kind: str, tmp_path: Path) -> None:
    sound = Sound.make(kind, tmp_path / "model")
    block = config_of(sound.folder)["quantization_config"]
    found: Counter[str] = Counter()

    @settings(
        max_examples=120,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        changed = {"quantization_config": copy.deepcopy(block)}
        for _ in range(data.draw(st.integers(1, 2))):
            mutate_json(data, changed)
        said = changed.get("quantization_config")
        if not isinstance(said, dict) or said.get("quant_method") != "compressed-tensors":
            return
        try:
            ours = ct_config_read.parse(changed)
        except CompressError:
            found["refused"] += 1
            return
        known = theirs(said)
        if known is None:
            found["theirs refuses"] += 1
            return
        for name in MODULES:
            scheme, weights = ours.scheme(name), known.get(name)
            both = scheme is not None and weights is not None
            assert (scheme is None) == (weights is None), f"{name}: {scheme}, {weights}"
            assert not both or same(scheme, weights), f"{name}: {scheme}, {weights}"
        found["same"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()
    print(found)
    assert found["same"] > 10


@pytest.mark.parametrize("target", ["Linear", MODULES[0], "re:.*q_proj"])
def test_a_target_of_two_groups(target: str) -> None:
    groups = {f"g{n}": _group(n, target) for n in (4, 8)}
    block = {"format": "pack-quantized", "config_groups": groups}
    ours = ct_config_read.parse({"quantization_config": block}).scheme(MODULES[0])
    known = theirs(block)
    assert known is not None
    assert ours is not None
    assert ours.bits == known[MODULES[0]].num_bits == 8


@pytest.mark.parametrize("first", [True, False])
def test_a_name_goes_before_a_pattern_and_that_before_a_class(first: bool) -> None:
    names = [(2, "Linear"), (3, "re:.*[qk]_proj"), (4, MODULES[0])]
    groups = {f"g{n}": _group(n, t) for n, t in (names if first else reversed(names))}
    block = {"format": "pack-quantized", "config_groups": groups}
    ours, known = ct_config_read.parse({"quantization_config": block}), theirs(block)
    assert known is not None
    for name, bits in zip(MODULES, (4, 3, 2, 2), strict=False):
        scheme = ours.scheme(name)
        assert scheme is not None
        assert scheme.bits == known[name].num_bits == bits


def _group(bits: int, target: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": True}
    return {"targets": [target], "weights": weights}
