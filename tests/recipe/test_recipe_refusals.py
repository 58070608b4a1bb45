"""Every mistake in a recipe is one line: file:line, key path, value, what is allowed."""

from pathlib import Path

import pytest

from compress.edits import EDITS, NOT_CARRIED
from compress.errors import RecipeError
from compress.methods import METHODS
from compress.quant.scheme import PRESETS as SCHEMES
from compress.recipe.reading.parse import parse
from compress_exporters.table import EXPORTERS

STAGE = "stages:\n  - method: rtn\n    scheme: W4A16\n"
RTN = "name: x\n" + STAGE
PRESETS = ", ".join(SCHEMES)
STAGE_KEYS = (
    "method, scheme, granularity, group_size, candidates, target, sensitivity, targets, ignore,"
    " overrides, scale_search, signs"
)
KINDS = "text, jsonl, parquet, dataset, hub, self"


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(text, label="r.yaml", overrides=overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def calibrated(lines: str) -> str:
    return "name: x\nstages:\n  - method: gptq\n    scheme: W4A16\ncalibration:\n" + lines


SHAPE = [
    ("", "r.yaml:1: is empty; a recipe has at least a name and stages"),
    ("# only a comment\n", "r.yaml:1: is empty; a recipe has at least a name and stages"),
    ("- a\n- b\n", "r.yaml:1: is a list; it takes a mapping (key: value)"),
    ("hello", "r.yaml:1: is 'hello'; it takes a mapping (key: value)"),
    (
        STAGE,
        (
            "r.yaml:1: required key 'name' is missing; it takes a word for the report, for example"
            " int4-gptq"
        ),
    ),
    ("name: x\n", "r.yaml:1: required key 'stages' is missing; it takes a list of at least one"),
    ("name: x\nstages: []\n", "r.yaml:2: stages: is empty; a recipe has one stage or more"),
    ("name: x\nstages: 3\n", "r.yaml:2: stages: is '3'; it takes a list of stages (- method: ...)"),
    ("name: x\nstages:\n", "r.yaml:2: stages: is empty; it takes a list of stages"),
    ("name: x\nstages: [rtn]\n", "r.yaml:2: stages[0]: is 'rtn'; it takes a mapping (key: value)"),
    (
        "name: 4\n" + STAGE,
        "r.yaml:1: name: is 4; it takes text (put it in quotes if it is meant so)",
    ),
    ("name: ''\n" + STAGE, "r.yaml:1: name: is ''; a name is one line of text"),
    (
        "name: " + 100_000 * "x" + "\n" + STAGE,
        "r.yaml:1: name: has 100,000 characters; a name has 200 at most",
    ),
    ("name:\n" + STAGE, "r.yaml:1: name: is empty; it takes text"),
    (
        RTN + "stage: []\n",
        (
            "r.yaml:5: stage: unknown key 'stage'; allowed: name, description, seed, stages,"
            " calibration, evaluation, output, kv_cache, export; did you mean 'stages'?"
        ),
    ),
    (
        RTN + "export: onxx\n",
        f"r.yaml:5: export[0].to: is 'onxx'; allowed: {', '.join(EXPORTERS)}; did you mean 'onnx'?",
    ),
    (
        RTN + "export: [onnx, {to: onnx, dtype: fp16}]\n",
        "r.yaml:5: export[1].to: is 'onnx' again; each target has one folder",
    ),
    (
        RTN + "export: {to: onnx, max_context: 0}\n",
        "r.yaml:5: export.max_context: max_context is 0; it is 1 position or more",
    ),
    (
        RTN + "export: {dtype: fp16}\n",
        "r.yaml:5: export: required key 'to' is missing; it takes text",
    ),
    (
        RTN + "export: [{to: onnx, dtype: bf16}]\n",
        "r.yaml:5: export[0].dtype: is 'bf16'; onnx has fp32, fp16",
    ),
    (
        RTN + "export: [{to: gguf, dtype: f16}]\n",
        "r.yaml:5: export[0].dtype: is 'f16'; allowed: fp32, fp16, bf16; did you mean 'fp16'?",
    ),
    (
        RTN + "export: [{to: onnx, embedding: f16}]\n",
        "r.yaml:5: export[0].embedding: is 'f16'; it is for gguf, leave it out",
    ),
    (
        RTN + "export: [{to: tensorrt, type: Q8_0}]\n",
        "r.yaml:5: export[0].type: is 'Q8_0'; it is for gguf, leave it out",
    ),
    (RTN + "seed: -1\n", "r.yaml:5: seed: is -1; a seed is 0 to 9223372036854775807"),
    (RTN + "seed: one\n", "r.yaml:5: seed: is 'one'; it takes a whole number"),
    (RTN + "seed: '1'\n", "r.yaml:5: seed: is '1'; it takes a whole number"),
    (RTN + "seed: 1.5\n", "r.yaml:5: seed: is '1.5'; it takes a whole number"),
    (
        RTN + "name: y\n",
        "r.yaml:5: name: duplicate key 'name'; first given on line 1",
    ),
]

YAML = [
    ("name: [x\n", "r.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("name: x\n\tseed: 1\n", "r.yaml:2: not valid YAML: found character '\\t' that cannot start"),
    ("name: x\nseed: \x07\n", "r.yaml:2: not valid YAML: character U+0007 is not allowed"),
    (RTN + "---\nname: y\n", "r.yaml:5: a second YAML document; a recipe is one document"),
    (
        "name: &n x\n" + STAGE,
        "r.yaml:1: name: &n: recipes take no anchors or aliases; write the value out",
    ),
    ("name: x\nseed: *n\n", "r.yaml:2: seed: *n: recipes take no anchors or aliases"),
    ("name: x\n<<: *n\n", "r.yaml:2: <<: *n: recipes take no anchors or aliases"),
    (
        "name: !!python/object/apply:os.system [ls]\n",
        (
            "r.yaml:1: name: tag:yaml.org,2002:python/object/apply:os.system: recipes take no YAML"
            " tags; leave it out"
        ),
    ),
    ("? [a]\n: 1\n", "r.yaml:1: a key is a list or a mapping; keys are words"),
    ("name: " + "[" * 40 + "]" * 40, "r.yaml:1: name" + "[0]" * 16 + ": nested more than 16 deep"),
    ("#" * (1 << 20) + "\n", "r.yaml: 1048577 characters long; a recipe has at most 1048576"),
]

STAGES = [
    (
        "name: x\nstages:\n  - scheme: W4A16\n",
        "r.yaml:3: stages[0]: required key 'method' is missing; it takes one of rtn, gptq",
    ),
    (
        "name: x\nstages:\n  - method: gtpq\n    scheme: W4A16\n",
        (
            "r.yaml:3: stages[0].method: unknown method 'gtpq'; allowed:"
            f" {', '.join((*METHODS, *EDITS))};"
            " did you mean 'gptq'?"
        ),
    ),
    (
        "name: x\nstages:\n  - method: cla\n",
        f"r.yaml:3: stages[0].method: is 'cla': {NOT_CARRIED['cla']}",
    ),
    (
        "name: x\nstages:\n  - method: rtn\n",
        (
            f"r.yaml:3: stages[0]: required key 'scheme' is missing; it takes a preset"
            f" ({PRESETS}) or a mapping"
        ),
    ),
    (
        RTN + "    group_sise: 64\n",
        (
            f"r.yaml:5: stages[0].group_sise: unknown key 'group_sise'; allowed: {STAGE_KEYS};"
            " did you mean 'group_size'?"
        ),
    ),
    (
        RTN.replace("W4A16", "W4A61"),
        (
            f"r.yaml:4: stages[0].scheme: unknown scheme 'W4A61'; allowed: {PRESETS}, or a mapping"
            " {bits: 4, group_size: 64}; did you mean 'W4A16'?"
        ),
    ),
    (
        RTN.replace("W4A16", "{bits: 9}"),
        "r.yaml:4: stages[0].scheme.bits: bits is 9; weights take 2 to 8 bits",
    ),
    (
        RTN.replace("W4A16", "{bit: 4}"),
        (
            "r.yaml:4: stages[0].scheme.bit: unknown key 'bit'; allowed: bits, symmetric, "
            "granularity, group_size, activation, type; did you mean 'bits'?"
        ),
    ),
    (
        RTN.replace("W4A16", "{bits: 4, symmetric: yes}"),
        "r.yaml:4: stages[0].scheme.symmetric: is 'yes'; it takes true or false",
    ),
    (
        RTN.replace("W4A16", "{granularity: row}"),
        "r.yaml:4: stages[0].scheme.granularity: is 'row'; allowed: tensor, channel, group",
    ),
    (
        RTN.replace("W4A16", "{group_size: 8}") + "    group_size: 4\n",
        "r.yaml:5: stages[0].group_size: 'group_size' is also given inside scheme; give it once",
    ),
    (
        RTN + "    group_size: 0\n",
        "r.yaml:5: stages[0].group_size: group_size is 0; a group holds 1 column or more",
    ),
    (
        RTN + "    granularity: channel\n    group_size: 64\n",
        (
            "r.yaml:6: stages[0].group_size: group_size is 64 with granularity 'channel'; leave it"
            " out, or use granularity 'group'"
        ),
    ),
    (
        RTN + "    scale_search: mes\n",
        (
            "r.yaml:5: stages[0].scale_search: is 'mes'; allowed: minmax, mse, importance, output;"
            " did you mean 'mse'?"
        ),
    ),
    (
        RTN + "    targets: q_proj\n",
        "r.yaml:5: stages[0].targets: is 'q_proj'; it takes a list of text, [q_proj]",
    ),
    (
        RTN + "    targets: Linear\n",
        (
            "r.yaml:5: stages[0].targets: is 'Linear'; it takes a list of text, such as [q_proj,"
            " down_proj]; left out, it takes all linear layers of the blocks"
        ),
    ),
    (
        RTN + "group_size: 4\n",
        (
            "r.yaml:5: group_size: unknown key 'group_size'; it is one of a stage:"
            " stages[0].group_size"
        ),
    ),
    (
        RTN + "bits: 3\n",
        ("r.yaml:5: bits: unknown key 'bits'; it is one of a scheme: stages[0].scheme={bits: 3}"),
    ),
    (
        RTN + "    bits: 3\n",
        (
            "r.yaml:5: stages[0].bits: unknown key 'bits'; it is one of a scheme:"
            " stages[0].scheme={bits: 3}"
        ),
    ),
    (
        RTN + "format: gguf\n",
        "r.yaml:5: format: unknown key 'format'; it is one of output: output.format",
    ),
    (
        RTN + "samples: 64\n",
        "r.yaml:5: samples: unknown key 'samples'; it is one of calibration: calibration.samples",
    ),
    (
        RTN + "calibration: {dataset: wikitext}\n",
        (
            "r.yaml:5: calibration.dataset: unknown key 'dataset'; sources: [{hub: wikitext}] names"
            " a data set of the hub, sources: [{text: FILE}] a file"
        ),
    ),
    (RTN + "    targets: []\n", "r.yaml:5: stages[0].targets: is empty; leave it out to take all"),
    (RTN + "    ignore: ['']\n", "r.yaml:5: stages[0].ignore[0]: is empty; a pattern is a glob"),
    (
        RTN + "    targets:\n      - '*'\n      - 're:(q'\n",
        (
            "r.yaml:7: stages[0].targets[1]: 're:(q' is not a regular expression: missing ), "
            "unterminated subpattern"
        ),
    ),
]

SECTIONS = [
    (
        "name: x\nstages:\n  - method: gptq\n    scheme: W4A16\n",
        (
            "r.yaml:3: stages[0].method: 'gptq' needs calibration data; add"
            " 'calibration: {sources: self}' or name your own texts"
        ),
    ),
    (
        RTN + "    scale_search: importance\n",
        "r.yaml:3: stages[0].method: 'rtn' needs calibration data",
    ),
    (
        "name: x\nstages:\n  - method: fp8\n    scheme: FP8\n",
        "r.yaml:4: stages[0].scheme: fp8 tensor a-fp8 static needs calibration data",
    ),
    (
        RTN + "calibration: {sources: self}\n",
        "r.yaml:5: calibration: no stage looks at calibration data; take it out",
    ),
    (
        calibrated("  samples: 4\n"),
        (
            "r.yaml:5: calibration: required key 'sources' is missing; it takes 'self' or a list of"
            " texts"
        ),
    ),
    (
        calibrated("  sources: self\n  samples: 0\n"),
        "r.yaml:7: calibration.samples: samples is 0; calibration takes 1 row or more",
    ),
    (
        calibrated("  sources: self\n  packing: stack\n"),
        "r.yaml:7: calibration.packing: is 'stack'; allowed: pack, pad; did you mean 'pack'?",
    ),
    (calibrated("  sources: []\n"), "r.yaml:6: calibration.sources: sources is empty; name a"),
    (
        calibrated("  sources: texts.txt\n"),
        (
            "r.yaml:6: calibration.sources: is 'texts.txt'; it takes 'self' or a mapping such as"
            " {text: FILE}"
        ),
    ),
    (
        calibrated("  sources:\n    - {weight: 2}\n"),
        f"r.yaml:7: calibration.sources[0]: names no text; it needs one of {KINDS}",
    ),
    (
        calibrated("  sources:\n    - {txt: a.txt}\n"),
        "r.yaml:7: calibration.sources[0].txt: unknown key 'txt'; allowed: text, jsonl,",
    ),
    (
        calibrated("  sources:\n    - {text: a.txt, jsonl: b.jsonl}\n"),
        (
            "r.yaml:7: calibration.sources[0]: names several kinds of text (text, jsonl); give each"
            " an entry of its own"
        ),
    ),
    (
        calibrated("  sources:\n    - {self: false}\n"),
        "r.yaml:7: calibration.sources[0].self: is 'false'; it takes true",
    ),
    (
        calibrated("  sources:\n    - {text: a.txt, path: b.txt}\n"),
        "r.yaml:7: calibration.sources[0].path: 'path' is already given by 'text'; give it once",
    ),
    (
        calibrated("  sources:\n    - {text: a.txt, weight: 0}\n"),
        "r.yaml:7: calibration.sources[0].weight: weight of a source is 0.0; it is a number above",
    ),
    (
        calibrated("  sources:\n    - {text: a.txt, field: body}\n"),
        (
            "r.yaml:7: calibration.sources[0].field: field is 'body', which a source of kind 'text'"
            " does not use; take it out"
        ),
    ),
    (
        RTN + "evaluation:\n  texts: [{hub: some/set, id: a/b}]\n",
        "r.yaml:6: evaluation.texts[0].id: 'id' is already given by 'hub'; give it once",
    ),
    (
        RTN + "evaluation:\n  texts: [{text: [a.txt, b.txt]}]\n",
        (
            "r.yaml:6: evaluation.texts[0]: required key 'name' is missing; it takes a word for the"
            " quality table"
        ),
    ),
    (
        RTN + "evaluation:\n  texts: [{text: b/a.txt}, {text: b/a.md}]\n",
        "r.yaml:5: evaluation: two texts are named 'b/a'; names must differ",
    ),
    (
        RTN + "evaluation: {window: 1}\n",
        "r.yaml:5: evaluation.window: window is 1; it must be 2 or more",
    ),
    (
        calibrated("  sources: self\nevaluation:\n  texts: [{self: true, seed: 0}]\n"),
        (
            "r.yaml:8: evaluation.texts[0].seed: is 0, the seed of the calibration's self-generated"
            " text; give another, so that it is held out"
        ),
    ),
    (RTN + "output: {format: ggml}\n", "r.yaml:5: output.format: is 'ggml'; allowed: auto,"),
    (
        RTN + "output: {shard_size: 5 apples}\n",
        "r.yaml:5: output.shard_size: is '5 apples'; it takes a size such as 5GB, 500MB or 2GiB",
    ),
    (RTN + "output: {shard_size: 0}\n", "r.yaml:5: output.shard_size: is '0'; it takes a size"),
    (RTN + f"output: {{shard_size: 1{'0' * 400}}}\n", "r.yaml:5: output.shard_size: is '1000"),
]


@pytest.mark.parametrize(("text", "message"), SHAPE + YAML + STAGES + SECTIONS)
def test_a_mistake_is_one_line_with_its_place(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


OVERRIDES = [
    ("seed", "--set seed: not KEY=VALUE; for example stages[0].group_size=64"),
    ("a b=1", "--set a b=1: not KEY=VALUE; for example stages[0].group_size=64"),
    (
        "stages[1].group_size=64",
        (
            "--set stages[1].group_size=64: stages: '1' is no position in this list; positions are"
            " 0 to 0"
        ),
    ),
    ("stages.method=rtn", "--set stages.method=rtn: stages: 'method' is no position in this list"),
    ("name.x=1", "--set name.x=1: name: is the value 'x'; it has no key 'x'"),
    ("output.0=1", "--set output.0=1: output: is no list; it has no position 0"),
    ("seed=one", "--set seed=one: seed: is 'one'; it takes a whole number"),
    ("seed=[", "--set seed=[: not valid YAML: expected the node content"),
    (
        "stages.0.group_sise=64",
        (
            f"--set stages.0.group_sise=64: stages[0].group_sise: unknown key 'group_sise';"
            f" allowed: {STAGE_KEYS}; did you mean 'group_size'?"
        ),
    ),
    (
        "stages[0].scheme.bits=4",
        "--set stages[0].scheme.bits=4: stages[0].scheme: is the value 'W4A16'; it has no key",
    ),
]


@pytest.mark.parametrize(("override", "message"), OVERRIDES)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    assert refusal(RTN, override).startswith(message)


def test_the_method_s_own_options_are_offered_and_no_other_s() -> None:
    message = refusal(RTN + "    damping: 0.1\n")
    assert message.startswith("r.yaml:5: stages[0].damping: unknown key 'damping'; allowed:")


def test_overrides_need_no_current_folder_of_the_file(tmp_path: Path) -> None:
    recipe = parse(RTN, folder=tmp_path, overrides=["evaluation.texts=[{text: a.txt}]"])
    assert recipe.evaluation is not None
    assert recipe.evaluation.texts[0].path == str(Path.cwd() / "a.txt")
