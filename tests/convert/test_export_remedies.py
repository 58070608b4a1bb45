"""A refused export names the formats that take the whole checkpoint: all of them, and no other."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from compress.errors import RecipeError
from compress.formats import CODECS, FP8_CACHE
from compress.quant.scheme import PRESETS, QuantScheme
from compress.verbs import Conversion, dry_export, run
from helpers.exporters.exports import ASYM, CT, SYM
from helpers.short_runs import RTN, recipe

ROUND = " (with --round-scales)"
WRITTEN: Mapping[str, dict[str, Any]] = {
    "groups of 4": {"scheme": QuantScheme(group_size=4)},
    "5 bits": {"scheme": QuantScheme(bits=5, group_size=32)},
    "zero points": {"scheme": ASYM},
    "fp32 scales": {"scheme": SYM, "dtype": "fp32"},
    "an order of columns": {"scheme": SYM, "act_order": True},
    "a cache": {"scheme": SYM, "kv_cache": FP8_CACHE},
    "nvfp4": {"scheme": PRESETS["NVFP4A16"]},
    "w8a8": {"scheme": PRESETS["W8A8"]},
    "fp8": {"scheme": PRESETS["FP8_DYNAMIC"]},
    "Conv1D": {"family": "gpt2", "scheme": SYM},
}
OUTSIDE = {"targets": ["lm_head", "embedding"], "ignore": []}
RUNS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "a quantized embedding": (dict(RTN), {**RTN, **OUTSIDE}),
    "an embedding in groups of 4": (dict(RTN), {**RTN, **OUTSIDE, "group_size": 4}),
    "an fp8 embedding": (
        dict(RTN),
        {"method": "fp8", "scheme": {"type": "float", "bits": 8, "granularity": "channel"}}
        | OUTSIDE,
    ),
    "a wider head": (dict(RTN), {"method": "rtn", "scheme": "W8A16", "targets": ["lm_head"]}),
    "LLM.int8()": ({"method": "llm_int8", "scheme": "LLM_INT8"},),
}
# Words of recipes, which nobody who exports has written.
RECIPE_WORDS = re.compile(
    r"stages|targets|ignore|output\.format|kv_cache:|act_order|scheme [A-Z]|granularity"
    r"|leave (it|the layer) out"
)


def outcomes(source: Path, own: str) -> dict[str, str]:
    """By format what an export into it says: nothing, the flag that it needs, or the refusal."""
    found = {}
    for to in CODECS.keys() - {own}:
        try:
            dry_export(source, to)
            found[to] = ""
        except RecipeError as error:
            found[to] = str(error)
            if "--round-scales to" in found[to]:
                dry_export(source, to, options=Conversion(round_scales=True))
    return found


def check(source: Path, own: str = CT) -> dict[str, str]:
    found = outcomes(source, own)
    takers = {
        to: f"{to}{ROUND}" if "--round-scales to" in said else to
        for to, said in found.items()
        if not said or "--round-scales to" in said
    }
    for to, said in found.items():
        if not said:
            continue
        reason, _, listed = said.rpartition("formats that take all of this checkpoint: ")
        assert set(listed.split(", ")) == {name for x, name in takers.items() if x != to}, said
        assert "\n" not in said
        assert not RECIPE_WORDS.search(reason), said
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_of_what_a_loader_could_read(compressed: Callable[..., Path], name: str) -> None:
    assert any(check(compressed(**WRITTEN[name])).values())


@pytest.mark.parametrize("name", RUNS)
def test_of_what_a_run_writes(tiny: Callable[..., Path], tmp_path: Path, name: str) -> None:
    source = tiny("llama", tied=False)
    report = run(recipe(*RUNS[name]), source, tmp_path / "out")
    found = check(tmp_path / "out", report.result.format)
    assert found["dense"] == ""
    assert any(found.values())


def test_of_an_embedding(tiny: Callable[..., Path], tmp_path: Path) -> None:
    stages = RUNS["a quantized embedding"]
    run(recipe(*stages), tiny("llama", tied=False), tmp_path / "out")
    with pytest.raises(RecipeError) as caught:
        dry_export(tmp_path / "out", "gptq")
    assert str(caught.value) == (
        "model.embed_tokens.weight: gptq has no place for a quantized embedding; formats that take"
        " all of this checkpoint: dense"
    )
