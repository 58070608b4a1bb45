"""Refusals name arguments of Python there, and options on the command line."""

import ast
import re
from pathlib import Path

import pytest

import compress
from compress.api.wording import in_python, python_words
from compress.errors import OutputError
from helpers.short_runs import RTN, recipe

REPO = Path(__file__).resolve().parents[2]
ROOTS = ("compress", "calibration", "exporters")
OPTION = re.compile(r"(?<![\w-])--[a-z][A-Za-z_-]+")
# Options of other programs, and of commands of ours that the message gives as a whole line.
OTHERS = frozenset(
    {
        *("--saveEngine", "--onnx", "--stronglyTyped", "--model", "--modules", "--verify"),
        *("--force-reinstall", "--index-url", "--gen_kwargs", "--save", "--gen", "--model_args"),
        *("--help", "--version", "--json", "--seed", "--model-args", "--merge"),
        "--allow-requantize",
    }
)


@pytest.mark.parametrize(
    ("said", "in_words_of_python"),
    [
        ("remove it, or add --resume if this", "give options=RunOptions(resume=True) if this"),
        ("choose another folder or add --overwrite", "or give overwrite=True in options"),
        (
            "use --set 'stages[0].granularity=channel'",
            "overrides=['stages[0].granularity=channel']",
        ),
        ("--set evaluation=null would fit", "overrides=['evaluation=null'] would fit"),
        ("run with --dtype fp32", "run with dtype='fp32' in options"),
        ("use --device cpu", "use device='cpu' in options"),
        ("such as --to dense", "such as to='dense'"),
        ("--shard-size is '5', not a size", "shard_size in options is '5', not a size"),
        ("give --max-context 256, for which", "options=ExportOptions(max_context=256), for"),
        ("max_tokens of a text (eval: --max-tokens) takes", "of a text max_tokens in Eval"),
    ],
)
def test_an_option_becomes_its_argument(said: str, in_words_of_python: str) -> None:
    assert in_words_of_python in in_python(said)
    assert OPTION.search(in_python(said)) is None


def test_a_message_without_options_stays() -> None:
    said = "seed.yaml:3: bits is 9 -- it is 2 to 8; --- is no document"
    assert in_python(said) == said


def messages() -> dict[str, str]:
    """Every text of the code below the command line that names an option -> where it is."""
    found = {}
    for root in ROOTS:
        for path in sorted((REPO / root).rglob("*.py")):
            if {"cli", "api"} & set(path.relative_to(REPO).parts):
                continue
            tree = ast.parse(path.read_text())
            docs = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
                if isinstance(node.body[0], ast.Expr)
            }
            for node in ast.walk(tree):
                text = getattr(node, "value", None)
                if isinstance(text, str) and id(node) not in docs and OPTION.search(text):
                    found[text] = f"{path.relative_to(REPO)}:{node.lineno}"
    return found


def test_no_option_is_left_in_any_message() -> None:
    assert len(messages()) > 30
    left = {
        place: option
        for text, place in messages().items()
        for option in OPTION.findall(in_python(text))
        if option not in OTHERS
    }
    assert left == {}


def test_the_error_keeps_type_cause_and_place() -> None:
    cause = OSError("gone")
    wanted = r"^give options=RunOptions\(resume=True\)$"
    with pytest.raises(OutputError, match=wanted) as caught, python_words():
        raise OutputError("add --resume") from cause
    assert caught.value.__cause__ is cause


def test_a_comparison_goes_on_by_its_own_options(tiny, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError) as caught:
        compress.compare(str(tiny("llama")), tmp_path / "out", recipes=["int4-rtn"])
    assert OPTION.search(str(caught.value)) is None
    with pytest.raises(OutputError, match=r"^add asked=x$"), python_words("asked=x"):
        raise OutputError("add options=RunOptions(resume=True)")


def test_the_same_refusal_on_both_sides(tiny, tmp_path: Path) -> None:
    from compress import verbs

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    asked, source = recipe(RTN, evaluation=None), tiny("llama")
    compress.run(asked, source, tmp_path / "small")
    with pytest.raises(OutputError, match=r"choose another folder or add --overwrite$"):
        verbs.run(asked, source, tmp_path / "small")
    with pytest.raises(OutputError, match=r"or give overwrite=True in options$"):
        compress.run(asked, source, tmp_path / "small")
