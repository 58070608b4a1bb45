"""Signs of scales: settled by the recipe's exports, and followed by all that rounds or judges."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file

from compress.recipe import ExportConfig, Recipe, dump, load
from compress.recipe.reading.parse import parse
from compress.verbs import run
from helpers.exporters.tensorrt_graphs import WIDE
from helpers.short_runs import recipe, text_source

ONE: Mapping[str, Any] = {**WIDE, "num_hidden_layers": 1}
W4 = {"scheme": "W4A16", "group_size": 64}
TENSORRT = {"to": "tensorrt", "verify": False}
# Stages that round to 4 bits in every way there is.
CHAINS: Mapping[str, list[dict[str, Any]]] = {
    "rtn": [{"method": "rtn", **W4}],
    "rtn, output": [{"method": "rtn", "scale_search": "output", **W4}],
    "gptq": [{"method": "gptq", **W4}],
    "gptq, in order": [{"method": "gptq", "act_order": "none", **W4}],
    "awq alone": [{"method": "awq", "grid": 3, **W4}],
    "smoothquant alone": [{"method": "smoothquant", **W4}],
    "awq, then gptq": [{"method": "awq", "grid": 3}, {"method": "gptq", **W4}],
    "overrides": [
        {"method": "rtn", **W4, "overrides": [{"targets": ["down_proj"], "scale_search": "minmax"}]}
    ],
}


def asked(chain: str, folder: Path, **rest: Any) -> Recipe:
    data = {} if chain in ("rtn", "overrides") else {"calibration": text_source(folder)}
    return recipe(*CHAINS[chain], **data, **rest)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def lowest(folder: Path) -> float:
    scales = [x for name, x in weights(folder).items() if name.endswith("weight_scale")]
    assert len(scales) == 7
    return min(float(x.float().min()) for x in scales)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_recipe_with_tensorrt_keeps_four_bits(tiny, chain: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(asked(chain, tmp_path, export=[TENSORRT]), tiny("llama", **ONE), out)
    assert lowest(out) > 0
    (export,) = report.exports
    assert not any("8-bit integers" in note for note in export.notes)
    graph = onnx.load(out / "tensorrt" / "model.onnx", load_external_data=False).graph
    types = {x.name: x.data_type for x in graph.initializer}
    codes = [types[x.input[0]] for x in graph.node if x.op_type == "DequantizeLinear"]
    assert codes == [onnx.TensorProto.INT4] * 7
    (line,) = {line.strip() for line in signs_in(out / "recipe.yaml")}
    assert line == "signs: positive"


def signs_in(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if "signs:" in line]


@pytest.mark.parametrize("chain", ["rtn", "gptq", "awq, then gptq"])
def test_other_exports_leave_both_signs(tiny, chain: str, tmp_path: Path) -> None:
    source = tiny("llama", **ONE)
    auto = asked(chain, tmp_path, export=[{"to": "onnx", "verify": False}])
    run(auto, source, tmp_path / "auto")
    said = [replace(x, config=replace(x.config, signs="both")) for x in auto.stages]
    run(replace(auto, stages=tuple(said), export=()), source, tmp_path / "both")
    one, other = (weights(tmp_path / name) for name in ("auto", "both"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert lowest(tmp_path / "auto") < 0


def test_what_a_recipe_says_itself_stays() -> None:
    both = recipe({"method": "rtn", **W4, "signs": "both"}, export=["tensorrt"])
    assert both.stages[0].config.signs == "both"
    positive = recipe({"method": "rtn", **W4, "signs": "positive"})
    assert positive.stages[0].config.signs == "positive"
    for settled in (both, positive):
        assert parse(dump(settled)) == settled


def test_a_recipe_built_in_python_is_settled_too() -> None:
    plain = recipe({"method": "rtn", **W4})
    stage = plain.stages[0]
    auto = replace(plain, stages=(replace(stage, config=replace(stage.config, signs="auto")),))
    assert load(auto) == plain
    exported = load(replace(auto, export=(ExportConfig("tensorrt"),)))
    assert exported.stages[0].config.signs == "positive"


def test_awq_judges_by_the_signs_of_the_stage_that_rounds(tiny, tmp_path: Path) -> None:
    """Its own setting is for layers that no later stage rounds."""
    source, data = tiny("llama", **ONE), text_source(tmp_path)

    def written(own: str, later: str) -> dict[str, torch.Tensor]:
        scales = {"method": "awq", "grid": 40, "signs": own}
        rounds = {"method": "rtn", **W4, "signs": later}
        run(recipe(scales, rounds, calibration=data), source, tmp_path / f"{own}, {later}")
        return weights(tmp_path / f"{own}, {later}")

    one, same = written("positive", "positive"), written("both", "positive")
    assert all(torch.equal(one[name], same[name]) for name in one)
    other = written("both", "both")
    norms = [name for name in one if "norm" in name]
    assert not all(torch.equal(one[name], other[name]) for name in norms)
