"""Recipes: sound ones, and what can be wrong with the text of one."""

from random import Random
from typing import Any

import yaml

from attacks.stock import TEXT
from attacks.values import ODD, PATTERNS, deep, garble, mutate

W4 = {"scheme": "W4A16", "group_size": 32}
DATA = {"sources": [{"text": TEXT}], "samples": 3, "length": 16}
MEASURE = {"texts": [{"text": TEXT, "max_tokens": 16}], "window": 16}
RECIPES: tuple[dict[str, Any], ...] = (
    {"stages": [{"method": "rtn", **W4}]},
    {"stages": [{"method": "rtn", **W4}], "evaluation": MEASURE},
    {"stages": [{"method": "gptq", **W4}], "calibration": DATA},
    {"stages": [{"method": "awq", **W4}], "calibration": DATA},
    {"stages": [{"method": "awq"}, {"method": "gptq", **W4}], "calibration": DATA},
    {
        "stages": [{"method": "smoothquant"}, {"method": "rtn", "scheme": "W8A8"}],
        "calibration": DATA,
    },
    {"stages": [{"method": "fp8", "scheme": "FP8_DYNAMIC"}], "seed": 3},
    {"stages": [{"method": "llm_int8", "scheme": "LLM_INT8"}]},
    {"stages": [{"method": "rtn", **W4}], "output": {"format": "gptq", "shard_size": "50kB"}},
    {
        "stages": [
            {"method": "rtn", **W4, "overrides": [{"targets": ["down_proj"], "skip": True}]}
        ],
        "evaluation": {"tasks": [{"path": "choice.jsonl"}]},
    },
    {
        "stages": [
            {
                "method": "rtn",
                "candidates": [{"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 32}],
                "target": {"bits_per_weight": 6.5},
            }
        ],
        "calibration": DATA,
    },
    {"stages": [{"method": "rtn", "scheme": "W8A16"}], "calibration": DATA, "kv_cache": "fp8"},
    {"stages": [{"method": "rtn", **W4}], "export": [{"to": "onnx", "verify": False}]},
)
# Keys that --set may name, with values that a schema may not expect beside those of ODD.
KEYS = (
    *("name", "seed", "stages", "stages[0]", "stages[0].method", "stages[0].scheme", "output"),
    *("stages[0].group_size", "stages[0].targets", "stages[0].ignore", "stages[0].granularity"),
    *("stages[0].target", "stages[0].target.bytes", "stages[0].target.bits_per_weight", "export"),
    *("stages[0].candidates", "stages[0].damping", "stages[0].overrides", "stages[1].method"),
    *("calibration", "calibration.sources", "calibration.samples", "calibration.length"),
    *("calibration.seed", "calibration.packing", "calibration.spill_bytes", "evaluation.window"),
    *("evaluation", "evaluation.texts", "evaluation.tasks", "evaluation.stride", "kv_cache"),
    *("evaluation.samples", "output.format", "output.shard_size", "stages[0].sensitivity"),
    *("stages[99].method", "stages[-1].method", "stages[x]", "stages[", "a.b.c", "", ".", "[0]"),
    *("stages[0].scale_search", "stages[0].symmetric", "stages[99999999999999999999].method"),
)
SETTINGS = (
    *("null", "~", "", "[]", "{}", "[null]", "{text: words.txt}", "[{text: words.txt}]", "self"),
    *("0", "-1", "1e400", ".nan", ".inf", "100000000000000000000", "9223372036854775808", "nan"),
    *("8GB", "0kB", "-1GB", "1e30GB", "9" * 400 + "GB", "GB", "1.5GB", "0.0000001kB", "{x: 1}"),
    *("true", "yes", "W4A16", "W99A1", "gptq", "rtn", "onnx", "[onnx, onnx]", "[gguf]", "fp8"),
    *("[{text: /dev/zero}]", "[{text: /}]", "[{jsonl: words.txt}]", "[{hub: a/b}]", "{", "[1,"),
    *("[{parquet: words.txt}]", "[{dataset: model}]", "[{self: false}]", "*x", "&a 1", "!!int x"),
    *("{prompts: [a], tokens: 100000000}", "{prompts: [], tokens: 1}", "a\nb", "x" * 5000, "'"),
)


def text_of(recipe: dict[str, Any]) -> str:
    return yaml.safe_dump({"name": "attack", **recipe}, sort_keys=False)


def pick(rng: Random, light: bool = False) -> dict[str, Any]:
    """One of them; `light`: without what takes a second or more."""
    return rng.choice(RECIPES[:3] if light else RECIPES)


def spoil(rng: Random, recipe: dict[str, Any]) -> bytes:
    """The text of a recipe with something wrong."""
    kind = rng.choice(["tree", "tree", "tree", "text", "text", "bytes"])
    if kind == "tree":
        return _dumped(mutate(rng, {"name": "attack", **recipe}))
    raw = text_of(recipe).encode()
    if kind == "bytes":
        return garble(rng, raw)
    return rng.choice(_TEXTS)(rng, raw.decode()).encode("utf-8", "surrogateescape")


def _dumped(tree: Any) -> bytes:
    """YAML; a lone surrogate, which YAML cannot say, as an escape."""
    return str(yaml.safe_dump(tree, sort_keys=False)).encode("utf-8", "surrogateescape")


def _bomb(rng: Random, text: str) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    return "\n".join([*lines, text])


_TEXTS = (
    _bomb,
    lambda rng, text: text.replace("  ", "\t"),
    lambda rng, text: text + "stages: []\n",
    lambda rng, text: text + f"deep: {deep()}\n",
    lambda rng, text: text + f"deep: {deep('{a: ', '}', 400)}\n",
    lambda rng, text: deep("- ", "", 3000),
    lambda rng, text: deep("? ", "", 2000),
    lambda rng, text: text + "x: !!python/object/apply:os.system ['touch stray']\n",
    lambda rng, text: text + "<<: {seed: 1}\n",
    lambda rng, text: text + "---\n" + text,
    lambda rng, text: "%YAML 9.9\n---\n" + text,
    lambda rng, text: text + "#" * (4 << 20),
    lambda rng, text: text + "x" * (1 << 20) + ": 1\n",
    lambda rng, text: text + "description: " + "y" * (4 << 20) + "\n",
    lambda rng, text: text.replace("name: attack", "name: &n attack\ndescription: *n"),
    lambda rng, text: text.replace("attack", "at\x00tack"),
    lambda rng, text: text.replace("attack", '"\\ud800"'),
    lambda rng, text: text.replace("attack", '"a\\nb"'),
    lambda rng, text: (
        text + f"seed: {rng.choice(['1_000', '0x10', '1e400', '1:30', '9' * 5000])}\n"
    ),
    lambda rng, text: text + f"stages: {rng.choice(ODD)!r}\n",
    lambda rng, text: text + "? [a, b]\n: 1\n",
    lambda rng, text: text + "2020-01-01: 1\n",
    lambda rng, text: text + "1: 2\n",
    lambda rng, text: text + "null: 2\n",
    lambda rng, text: "",
    lambda rng, text: "# nothing\n",
    lambda rng, text: "null\n",
    lambda rng, text: "[]\n",
    lambda rng, text: "just words\n",
    lambda rng, text: "\ufeff" + text,
    lambda rng, text: text.replace("\n", "\r"),
    lambda rng, text: text.replace("\n", "\u2028"),
    lambda rng, text: text[: rng.randrange(len(text))],
)


def with_pattern(rng: Random, recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with an odd pattern in a stage or an override."""
    stage, *more = recipe["stages"]
    pattern = rng.choice(PATTERNS)
    where = rng.choice(["targets", "ignore", "overrides"])
    value: Any = [pattern] if rng.random() < 0.5 else [pattern, "*"]
    if where == "overrides":
        value = [{"targets": [pattern], "bits": 8}]
    return {**recipe, "stages": [{**stage, where: value}, *more]}
