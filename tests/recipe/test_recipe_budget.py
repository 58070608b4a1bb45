"""Stages that choose among candidates by a target: what they say, and every refusal."""

import pytest

from compress.errors import RecipeError
from compress.quant.scheme import PRESETS, QuantScheme
from compress.recipe import dump
from compress.recipe.reading.parse import parse
from compress.recipe.schema import Target

TWO = "candidates: [W3A16, W4A16]"
FRONT = "r.yaml:2: stages[0]"


def text(stage: str, method: str = "gptq") -> str:
    return f"name: x\nstages: [{{method: {method}, {stage}}}]\ncalibration: {{sources: self}}\n"


def test_presets_and_mappings_and_both_targets() -> None:
    recipe = parse(text("candidates: [W3A16, {bits: 5, group_size: 64}], target: {bytes: 4GB}"))
    (stage,) = recipe.stages
    assert stage.scheme is None
    assert stage.candidates == (PRESETS["W3A16"], QuantScheme(bits=5, group_size=64))
    assert stage.target == Target(bytes=4_000_000_000)
    assert stage.target.describe() == "4000000000 bytes"
    assert parse(dump(recipe)) == recipe
    (stage,) = parse(text(f"{TWO}, target: {{bits_per_weight: 3.5}}, sensitivity: kl")).stages
    assert stage.target is not None
    assert stage.target.describe() == "3.5 bits a weight"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            f"{TWO}, scheme: W4A16, target: {{bytes: 4}}",
            ".scheme: candidates stand in its place; give one of the two",
        ),
        (
            f"{TWO}, group_size: 64, target: {{bytes: 4}}",
            ".group_size: candidates stand in its place; give one of the two",
        ),
        (
            "candidates: [W3A16], target: {bytes: 4}",
            ".candidates: 1 schemes of which 1 differ; give two or more, each once",
        ),
        (
            "candidates: [W3A16, W3A16, W4A16], target: {bytes: 4}",
            ".candidates: 3 schemes of which 2 differ; give two or more, each once",
        ),
        (
            "candidates: W4A16, target: {bytes: 4}",
            ".candidates: is 'W4A16'; it takes a list of schemes",
        ),
        (
            f"{TWO}, target: {{}}",
            ".target: gives neither of bits_per_weight and bytes; it takes one of them",
        ),
        (
            f"{TWO}, target: {{bytes: 4, bits_per_weight: 3}}",
            ".target: gives both of bits_per_weight and bytes; it takes one of them",
        ),
        (
            f"{TWO}, target: {{bits_per_weight: -1}}",
            ".target.bits_per_weight: bits_per_weight is -1.0; it is a number above 0",
        ),
        (
            f"{TWO}, target: {{bytes: much}}",
            ".target.bytes: is 'much'; it takes a size such as 5GB, 500MB or 2GiB",
        ),
        (
            TWO,
            ".target: is missing; give {bits_per_weight: 4.25} or {bytes: 4GB}, or put a prune in",
        ),
        (
            "target: {bytes: 3}",
            ": required key 'candidates' is missing; it takes a list of two schemes or more",
        ),
        (
            "scheme: W4A16, sensitivity: kl",
            ".sensitivity: goes with candidates and target; take it out",
        ),
        (
            f"{TWO}, target: {{bytes: 4}}, sensitivity: guess",
            ".sensitivity: is 'guess'; allowed: output_error, kl",
        ),
        (
            "candidates: [W3A16, FP8], target: {bytes: 4}",
            ".candidates[1]: is fp8 tensor a-fp8 static, but gptq rounds to integers; use method",
        ),
        (
            "candidates: [W8A16, W8A8], target: {bytes: 4}",
            (
                ".candidates[1]: is int8 sym channel a8, which treats inputs otherwise than int8"
                " sym channel; what that loses is not measured"
            ),
        ),
    ],
)
def test_refusals(stage: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text(stage), label="r.yaml")
    assert str(caught.value).startswith(FRONT + message)
    assert "\n" not in str(caught.value)


def test_scaling_stages_do_not_choose() -> None:
    with pytest.raises(RecipeError, match="give the candidates to a stage behind it that rounds"):
        parse(text(f"{TWO}, target: {{bytes: 4}}", method="awq"))


def test_a_target_needs_data_even_for_methods_that_need_none() -> None:
    stage = text(f"{TWO}, target: {{bytes: 4}}", method="rtn")
    assert parse(stage).calibration is not None
    with pytest.raises(RecipeError, match="needs calibration data; add 'calibration: "):
        parse(stage.partition("calibration")[0])
