"""Every recipe that comes along does what its header says, on the embedded model."""

import re
from pathlib import Path

import pytest

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.recipe import builtin, builtin_names, load
from compress.verbs import make_plan, run
from helpers import tiny_models

# Few tokens: what is tried is that the recipe runs and what it stores, not how well it does.
FEW = ("calibration.samples=8", "calibration.length=32")
TOKENS = 256  # of a training: one step
NONE = ("evaluation=null",)
KEYS = ("For", "Needs", "Loads", "Size", "On tale-6m")
# Bits are measured, so its plan has no bytes to compare.
OPEN = {"smallest"}


@pytest.mark.usefixtures("answered_here")
@pytest.mark.parametrize("name", builtin_names())
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model whose widths take every group size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    if name.startswith("mla"):  # of a latent, too
        sizes |= {"num_key_value_heads": 8, "head_dim": 32}
    source = tiny_models.make("llama", tmp_path / "source", **sizes)
    low, high = between(name, source, few_tokens(name))
    report = run(name, source, tmp_path / "out", overrides=few_tokens(name))
    assert name in OPEN or low <= report.result.bytes <= high
    spec = open_weights(Checkpoint.open(tmp_path / "out")).spec
    # Of these mistral takes heads that do not fill hidden, ministral has windows by layer.
    assert spec.family in ("llama", "mistral", "ministral", "deepseek_v3")
    compressed = [layer for layer in report.layers if layer.skipped_reason is None]
    whole = name.startswith("gguf")  # embedding and head are in blocks, too, and the file is proved
    linears = spec.all_linears() if whole else spec.linears()
    assert len(compressed) == (len(list(linears)) if load(name).stages else 0)
    made = ["gguf"] if whole else [x.to for x in load(name).export]
    assert [x.target for x in report.exports] == made
    assert all(x.proof in ("logits", "tokens") for x in report.exports)


@pytest.mark.parametrize("name", sorted({*builtin_names()} - OPEN))
def test_its_result_is_as_large_as_its_header_says(name: str, demo_model: Path) -> None:
    low, high = (size / 1e6 for size in between(name, demo_model))
    assert low - 0.006 <= said_megabytes(name) <= high + 0.006


@pytest.mark.long
@pytest.mark.usefixtures("answered_here")
@pytest.mark.parametrize("name", builtin_names())
def test_the_embedded_model_becomes_as_large_as_its_header_says(
    name: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = run(name, demo_model, tmp_path / "out", overrides=few_tokens(name))
    assert report.result.bytes / 1e6 == pytest.approx(said_megabytes(name), abs=0.006)
    compressed = [layer for layer in report.layers if layer.skipped_reason is None]
    assert all(layer.error is not None and layer.error < 0.2 for layer in compressed)


def few_tokens(name: str) -> tuple[str, ...]:
    """Overrides that make a run short."""
    recipe = load(name)
    trains = [edit.index for edit in recipe.edits if edit.method == "distill"]
    tokens = (f"stages[{index}].tokens={TOKENS}" for index in trains)
    hybrids = [edit.index for edit in recipe.edits if edit.method == "hybrid"]
    windows = (f"stages[{i}].{key}" for i in hybrids for key in ("window=8", "global=1"))
    return (*(FEW if recipe.calibration else ()), *tokens, *windows, *NONE)


def between(name: str, source: Path, overrides: tuple[str, ...] = ()) -> tuple[int, int]:
    """The least and most bytes that the plan says."""
    plan = make_plan(name, source, overrides=overrides)
    return plan.bytes_range or (plan.shards.total_bytes, plan.shards.total_bytes)


def said_megabytes(name: str) -> float:
    said = re.search(r"12\.3 -> ([\d.]+) MB", builtin(name).text)
    assert said is not None
    return float(said[1])


@pytest.mark.parametrize("name", builtin_names())
def test_it_loads_where_its_header_says(name: str, demo_model: Path) -> None:
    plan = make_plan(name, demo_model)
    assert plan.problems == ()
    loads = re.search(r"^# Loads: (.*?)^# Size: ", builtin(name).text, re.MULTILINE | re.DOTALL)
    assert loads is not None
    said = {
        "transformers": r"transformers(?: with (?:compressed-tensors|bitsandbytes|gguf)|, )",
        "llama.cpp": r"llama\.cpp",
        "vLLM on GPU": r"vLLM(?! on CPU)",
        "vLLM on CPU": r"vLLM(?! on GPU)",
    }
    for verdict in plan.runtimes:
        found = re.search(said[verdict.runtime], loads[1]) is not None
        assert found == (verdict.verdict in ("yes", "expected")), (verdict, loads[1])


@pytest.mark.parametrize("name", builtin_names())
def test_its_header_has_all_that_a_user_asks(name: str) -> None:
    header = builtin(name).text.partition("\nname: ")[0].splitlines()
    assert all(line.startswith("# ") and len(line) <= 100 for line in header)
    keys = [key for line in header if (key := line[2:].partition(":")[0]) in KEYS]
    assert keys == list(KEYS)
    assert re.search(
        r"12\.3 -> \d+\.\d\d MB; perplexity 7\.990 -> \d\.\d{3}, KL 0\.\d{4}, top-1 agreement"
        r" \d\d\.\d %\n#        \(first 120 stories of TinyStories' test set, windows of 512\)\.",
        "\n".join(header),
    )
