"""Regular expressions of recipes, tasks and checkpoints end in time, and mean what `re` reads."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress import expressions
from compress.arch.spec import LinearSpec
from compress.errors import CheckpointError, RecipeError
from compress.evaluation.tasks.asked import check_task
from compress.expressions import expression
from compress.formats.compressed_tensors.config_read import parse as parse_schemes
from compress.formats.gptq.config import read_rules
from compress.recipe.matching import assign
from compress.recipe.reading.parse import parse
from compress.recipe.task_config import TaskConfig

# Where `re` has not come to an end after an hour.
REPORTED = (
    *("(.*)*x", "(.|.)*z", "((((.*)*)*)*)*!", r"(\w+\.?)+!"),
    "(?=.*.*.*.*.*.*.*.*Z)",
)
ENDLESS = "(.|.)*[!?]"  # where `regex` does not either
NAMES = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(12) for part in "qkv"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.01)


def assigned(key: str, *patterns: str) -> None:
    text = (
        f"name: x\nstages:\n  - method: rtn\n    scheme: W4A16\n    {key}: {json.dumps(patterns)}"
    )
    linears = [LinearSpec(name, f"{name}.weight", (8, 8), "q", "q", name) for name in NAMES]
    assign(parse(text, label="r.yaml").stages, linears)


@pytest.mark.parametrize("key", ["targets", "ignore"])
@pytest.mark.parametrize("pattern", REPORTED)
def test_patterns_that_match_nothing_end(pattern: str, key: str) -> None:
    with pytest.raises(RecipeError, match="matches no layer; layers are called, for example,"):
        assigned(key, f"re:{pattern}")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_patterns_without_an_end_are_told_with_their_place(key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        assigned(key, "v_proj", f"re:{ENDLESS}")
    assert str(caught.value) == (
        f"r.yaml:5: stages[0].{key}[1]: 're:{ENDLESS}' takes more than 0.01 s of processor time,"
        f" here on '{NAMES[0]}'; write it without repeats of what repeats, such as (.*)*"
    )


@pytest.mark.usefixtures("impatient")
def test_patterns_that_are_slow_in_part_are_told_too() -> None:
    # Ends at once on the whole name: the place where it is looked for goes on for ever.
    with pytest.raises(RecipeError, match="matches no layer"):
        assigned("targets", "re:proj(?=(.|.)*[!?])|attn")


def test_the_time_is_for_all_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.05)
    monkeypatch.setattr(expressions, "_FREE", 0.0)
    found = expression(ENDLESS, ValueError)
    assert not found.fullmatch("attn.q")  # one name alone is not too much
    with pytest.raises(ValueError, match="processor time"):
        any(found.fullmatch("attn.q") for _ in range(100_000))


def test_many_names_are_no_matter() -> None:
    found = expression(r"model\.layers\.\d+\.mlp\.experts\.\d+\.(up|down)_proj", ValueError)
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(20) for j in range(256)]
    assert all(map(found.fullmatch, names))


GROUP = {"targets": [f"re:{ENDLESS}"], "weights": {"num_bits": 4, "group_size": 32}}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_patterns_of_a_checkpoint(key: str) -> None:
    block: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    block |= (
        {"config_groups": {"group_0": GROUP}} if key == "targets" else {"ignore": [f"re:{ENDLESS}"]}
    )
    schemes = parse_schemes({"quantization_config": block})
    with pytest.raises(CheckpointError, match=r"^config.json: quantization_config: 're:\(\.\|\.\)"):
        schemes.scheme(NAMES[0])


@pytest.mark.usefixtures("impatient")
def test_rules_of_a_checkpoint() -> None:
    rules = read_rules("block", {"dynamic": {f"-:{ENDLESS}": {}}}, lambda place, said: place)
    with pytest.raises(CheckpointError, match=r"^block.dynamic: '-:\(\.\|\.\).* takes more"):
        rules[0][0].match(NAMES[0])


@pytest.mark.usefixtures("impatient")
def test_what_a_task_extracts(tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps({"context": "what is the name of it " * 3, "answer": "4"}))
    with pytest.raises(RecipeError, match=r"task 'sums': extract is '\(\.\|\.\).* takes more than"):
        check_task(TaskConfig("sums", str(file), extract=ENDLESS), 512)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(", "missing ), unterminated subpattern at position 0"),
        ("(?:" * 400 + "a" + ")" * 400, "is nested too deep"),
        ("((a{1000}){1000}){1000}", "its repeats multiply to 1000000000; 100000 are possible"),
        ("[[a]b]", "Possible nested set at position 1; put a backslash before the inner sign"),
        ("[a--b]", "Possible set difference at position 2; put a backslash before the inner sign"),
        ("[x[:alpha:]]", "[:alpha:] is no class of characters in Python; write them out"),
        (r"\p{L}", r"bad escape \p at position 0"),
        ("(?V1)a", "unknown extension ?V at position 1"),
    ],
)
def test_what_two_readers_would_read_differently(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"is not a regular expression: {reason}")):
        expression(text, ValueError)


PIECES = st.sampled_from(
    [
        *(".", "a", "b", r"\.", r"\d", r"\w", "[ab]", "[^a]", "^", "$", r"\b", "(?:ab|b)", "(a|b)"),
        *("{e}", "{e<=1}", "{", "}", "{}", "{i<=1}", "(?=a)", "(?!b)", "(?<=a)", "(?<!1)", r"\1"),
        *("(?i:A)", "(?>a|ab)", r"\N{DIGIT ONE}", r"\{e<=1}", "(?P<n>a)", "(?(1)a|b)", r"\x61"),
    ]
)
REPEATS = st.sampled_from(
    ["", "", "", "?", "*", "+", "{2}", "{1,2}", "{,2}", "{1,}", "{,}", "+?", "*+"]
)
TEXTS = st.text("ab1.{}e<=", max_size=6)


@given(st.lists(st.tuples(PIECES, REPEATS), min_size=1, max_size=4), st.lists(TEXTS, max_size=8))
def test_what_is_taken_means_what_re_reads(pieces: list[tuple[str, str]], texts: list[str]) -> None:
    text = "".join(piece + repeat for piece, repeat in pieces)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            theirs = re.compile(text)
    except (re.error, FutureWarning):
        with pytest.raises(ValueError, match="is not a regular expression"):
            expression(text, ValueError)
        return
    ours = expression(text, ValueError)
    for x in texts:
        assert ours.fullmatch(x) == (theirs.fullmatch(x) is not None), (text, x)
        assert ours.match(x) == (theirs.match(x) is not None), (text, x)
        assert ours.search(x) == (theirs.search(x) is not None), (text, x)
