"""Tensor parallel: what divides over devices by the rules of vLLM, and what stands against it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.plan import checks
from compress.plan.layers import ModulePlan
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.verbs import make_plan
from helpers.short_runs import RTN, recipe
from helpers.tiny_models import resized

GROUP = QuantScheme(bits=4, group_size=32)
CHANNEL = QuantScheme(bits=4, granularity="channel", group_size=0)


def module(role: str, shape: tuple[int, int], scheme: QuantScheme) -> ModulePlan:
    name = f"model.layers.0.{role}"
    linear = LinearSpec(name, f"{name}.weight", shape, role, "in", role)
    return ModulePlan(linear, 0, 0, "rtn", scheme, False, 1, 1)


def why_not_parallel(n: int, spec: DecoderSpec, modules: list[ModulePlan]) -> tuple[str, ...]:
    return checks.why_not_parallel(n, spec, modules, "compressed-tensors")


@pytest.fixture
def spec(tiny: Callable[..., Any]) -> DecoderSpec:
    """8 heads of 64, 4 of keys and values."""
    found = make_plan(recipe(RTN), tiny("llama")).spec
    return resized(found, heads=8, kv_heads=4, key_width=64, value_width=64)


@pytest.mark.parametrize(
    ("kv_heads", "n", "fits"),
    [(4, 2, True), (4, 4, True), (4, 8, True), (1, 8, True), (3, 2, False), (6, 4, False)],
)
def test_key_and_value_heads_are_split_or_repeated(
    spec: DecoderSpec, kv_heads: int, n: int, fits: bool
) -> None:
    reasons = why_not_parallel(n, resized(spec, kv_heads=kv_heads), [])
    wanted = f"{kv_heads} key/value heads can neither be split nor repeated {n} ways"
    assert reasons == (() if fits else (wanted,))


def test_repeated_heads_are_not_split_further(spec: DecoderSpec) -> None:
    one = resized(spec, kv_heads=1, key_width=4, value_width=4)
    asymmetric = replace(CHANNEL, symmetric=False)
    assert why_not_parallel(8, one, [module("k", (4, 64), CHANNEL)]) == ()
    assert why_not_parallel(8, one, [module("k", (4, 64), asymmetric)]) == (
        "k: 4 rows a shard fill no whole words of packed zero points",
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_zero_points_are_split_in_words(spec: DecoderSpec, bits: int) -> None:
    rows = 2 * 32 // bits
    whole = module("gate", (rows, 64), QuantScheme(bits, False, "group", 32))
    assert why_not_parallel(2, spec, [whole]) == ()
    assert why_not_parallel(4, spec, [whole]) == (
        f"gate: {rows // 4} rows a shard fill no whole words of packed zero points",
    )
    symmetric = module("gate", (rows, 64), QuantScheme(bits, True, "group", 32))
    assert why_not_parallel(4, spec, [symmetric]) == ()
    down = module("down", (rows, 512), QuantScheme(bits, False, "group", 32))
    assert why_not_parallel(4, spec, [down]) == ()


def test_a_shard_fits_its_format(spec: DecoderSpec) -> None:
    """GPTQ and AWQ have packed zero points of symmetric weights, too; AWQ packs rows."""
    gate, down = module("gate", (16, 64), GROUP), module("down", (16, 64), CHANNEL)
    assert checks.why_not_parallel(4, spec, [gate], "compressed-tensors") == ()
    assert checks.why_not_parallel(2, spec, [gate], "gptq") == ()
    assert checks.why_not_parallel(4, spec, [gate], "gptq_v2") == (
        "gate: 4 rows a shard: 4-bit weights are packed by 8, which does not divide [4, 64]",
    )
    assert checks.why_not_parallel(4, spec, [gate], "awq") == (
        "gate: 4 rows a shard: rows of a weight are packed by 8, which does not divide 4",
    )
    assert checks.why_not_parallel(8, spec, [down], "awq") == ()
    assert checks.why_not_parallel(8, spec, [down], "gptq") == ()


def test_merged_matrices_are_split_each_by_itself(spec: DecoderSpec) -> None:
    assert why_not_parallel(8, spec, [module("qkv", (8 * 64 + 2 * 4 * 64, 512), GROUP)]) == ()
    assert why_not_parallel(4, spec, [module("gate_up", (2 * 90, 512), GROUP)]) == (
        "gate_up: 90 rows do not divide by 4",
    )


def test_columns_are_split_in_groups_and_words(spec: DecoderSpec) -> None:
    assert why_not_parallel(4, spec, [module("down", (64, 96), GROUP)]) == (
        "down: 24 columns a shard are no multiple of 32",
    )
    assert why_not_parallel(2, spec, [module("o", (64, 40), CHANNEL)]) == (
        "o: 20 columns a shard fill no whole words of packed codes",
    )
    integer = QuantScheme(8, True, "channel", 0, ActivationScheme())
    assert why_not_parallel(2, spec, [module("o", (64, 42), integer)]) == ()
    assert why_not_parallel(8, spec, [module("o", (64, 42), CHANNEL)]) == (
        "o: 42 columns do not divide by 8",
    )


def test_blocks_are_cut_in_neither_direction(spec: DecoderSpec) -> None:
    block = QuantScheme(8, True, "block", 64, type="float")
    whole = [
        module("q", (8 * 64, 512), block),
        module("down", (96, 256), block),  # its rows are not split
        module("gate", (256, 96), block),  # nor are its columns
    ]
    assert why_not_parallel(4, spec, whole) == ()
    assert why_not_parallel(4, spec, [module("down", (64, 384), block)]) == (
        "down: 96 columns a shard are no multiple of 64",
    )
    for role, rows in (("gate", 384), ("gate_up", 2 * 384)):
        assert why_not_parallel(4, spec, [module(role, (rows, 512), block)]) == (
            f"{role}: 96 rows a shard are no multiple of 64",
        )
    narrow = resized(spec, key_width=32, value_width=32)
    assert why_not_parallel(4, narrow, [module("qkv", (8 * 32 + 2 * 4 * 32, 512), block)]) == (
        "qkv: 32 rows a shard are no multiple of 64",
    )
    assert checks.why_not_parallel(4, spec, [module("down", (64, 384), block)], "dense") == ()


def test_dense_results_have_no_groups_and_no_words(spec: DecoderSpec) -> None:
    asymmetric = replace(GROUP, symmetric=False)
    modules = [
        module("down", (64, 96), asymmetric),  # groups of 32 cut at 24
        module("o", (64, 40), CHANNEL),  # codes in words
        module("gate", (20, 512), asymmetric),  # zero points in words
    ]
    assert len(why_not_parallel(4, spec, modules)) == 3
    assert checks.why_not_parallel(4, spec, modules, "dense") == ()
    assert checks.why_not_parallel(8, spec, [module("o", (64, 42), CHANNEL)], "dense") == (
        "o: 42 columns do not divide by 8",
    )


def test_the_plan_of_a_dense_result(tiny: Callable[..., Any]) -> None:
    found = {
        fmt: make_plan(recipe(RTN, output={"format": fmt}), tiny("llama")).tensor_parallel[2]
        for fmt in ("auto", "dense")
    }
    assert found["auto"] == ("down: 48 columns a shard are no multiple of 32",)
    assert found["dense"] == ()
