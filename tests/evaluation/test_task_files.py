"""Task files: their kinds by their fields, and a mistake is one line with its place."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import CompressError, DataError, RecipeError
from compress.evaluation.tasks.asked import check_task, read_task
from compress.evaluation.tasks.items import FIELDS, read_items
from compress.recipe.task_config import KINDS, TaskConfig

CHOICES = {"query": "q", "choices": ["a", "b"], "gold": 1}
PARTIAL = {"context_options": ["a", "b"], "continuation": "c", "gold": 0}
ENDS = {"context": "a", "continuation": "b"}
SUMS = {"context": "a", "answer": "4"}
PROGRAM = {"prompt": "def f():", "test": "assert f()", "canonical_solution": "  return 1"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "task.jsonl"


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def refusal(file: Path, **options: Any) -> str:
    with pytest.raises(CompressError) as caught:
        read_items(TaskConfig("task", str(file), **options))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message.replace(str(file.parent), "")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (CHOICES, "multiple_choice"),
        (PARTIAL, "partial"),
        (ENDS, "continuation"),
        (SUMS, "generation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_say_the_kind(file: Path, row: dict[str, Any], kind: str) -> None:
    found, items = read_items(TaskConfig("task", str(write(file, row, row))))
    assert (found, len(items)) == (kind, 2)
    assert items[1].where == f"{file}:2"
    assert read_items(TaskConfig("task", str(file), kind=kind))[1] == items


ROWS = [
    ([1, 2], "/task.jsonl:2 holds a list; a line must be a JSON object"),
    ({"query": "q"}, "/task.jsonl:2 has no field 'choices'; multiple_choice needs query, choices,"),
    ({**CHOICES, "gold": 2}, "/task.jsonl:2: gold is 2; it is an index from 0 to 1"),
    ({**CHOICES, "gold": True}, "/task.jsonl:2: gold is True; it is an index from 0 to 1"),
    ({**CHOICES, "gold": "1"}, "/task.jsonl:2: gold is '1'; it is an index from 0 to 1"),
    ({**CHOICES, "query": ""}, "/task.jsonl:2: query is ''; it must be a text"),
    ({**CHOICES, "query": 4}, "/task.jsonl:2: query is 4; it must be a text"),
    ({**CHOICES, "choices": ["a"]}, "/task.jsonl:2: choices is ['a']; it must be a list of two"),
    ({**CHOICES, "choices": ["a", ""]}, "/task.jsonl:2: choices is ['a', '']; it must be a list"),
    ({**CHOICES, "choices": "ab"}, "/task.jsonl:2: choices is 'ab'; it must be a list of two"),
]


@pytest.mark.parametrize(("row", "message"), ROWS, ids=range(len(ROWS)))
def test_rows_that_are_wrong(file: Path, row: Any, message: str) -> None:
    assert refusal(write(file, CHOICES, row)).startswith(message)


def test_lines_that_are_no_json(file: Path) -> None:
    file.write_text(f'{json.dumps(CHOICES)}\n\n{{"query": "q"\n')
    assert refusal(file).startswith("/task.jsonl:3 is not JSON: Expecting ',' delimiter")
    file.write_bytes(b'{"query": "\xff"}\n')
    assert refusal(file).startswith("/task.jsonl:1 is not JSON: ")
    file.write_text("[" * 100_000)
    assert refusal(file).startswith("/task.jsonl:1 is not JSON: ")


def test_files_that_are_no_task(file: Path, tmp_path: Path) -> None:
    assert refusal(file).startswith("/task.jsonl: there is no such file (looked from ")
    assert refusal(write(file)) == "/task.jsonl holds no item; a line is a JSON object"
    assert "cannot be read: it is a folder" in refusal(tmp_path)
    assert refusal(write(file, {"text": "once"})) == (
        "/task.jsonl:1 has the fields text; a task has query, choices, gold; context_options,"
        " continuation, gold; context, continuation; context, answer"
    )


def test_programs_are_never_run(file: Path) -> None:
    assert refusal(write(file, PROGRAM)) == (
        "/task.jsonl:1 asks for a program, which is scored by running it; nothing that a model"
        " wrote is run here, so leave this file out"
    )


def test_answers_are_texts_or_numbers(file: Path) -> None:
    rows = [{"context": "a", "answer": answer} for answer in ("x", 4, 0.5, ["x", 4])]
    _, items = read_items(TaskConfig("task", str(write(file, *rows))))
    assert [item.answers for item in items] == [("x",), ("4",), ("0.5",), ("x", "4")]
    for answer in ([], None, {"a": 1}, [None], True, [True]):
        message = refusal(write(file, {"context": "a", "answer": answer}))
        assert message.startswith(f"/task.jsonl:1: answer is {answer!r}; it is a text, a number")


def test_prompts_name_fields_that_are_there(file: Path) -> None:
    assert refusal(write(file, CHOICES), prompt="{query} {hint}") == (
        "/task.jsonl:1: the prompt names {hint}, no text of a line; it has query, choices, gold"
    )
    assert "names {choices}, no text" in refusal(file, prompt="{choices}")


def test_the_shared_tasks_are_read(shared_dir: Path) -> None:
    """Every file but the one with programs, whole."""
    kinds = {}
    for path in sorted((shared_dir / "text" / "tasks").glob("*.jsonl")):
        try:
            kinds[path.stem], _ = read_items(TaskConfig(path.stem, str(path)))
        except DataError as error:
            kinds[path.stem] = str(error).partition(":1 ")[2][:18]
    choices = ("arc_challenge", "arc_easy", "boolq", "commonsense_qa", "copa", "openbook_qa")
    assert kinds == {
        **dict.fromkeys((*choices, "piqa", "siqa"), "multiple_choice"),
        **dict.fromkeys(("winograd_wsc", "winogrande"), "partial"),
        "lambada_openai": "continuation",
        "gsm8k": "generation",
        "human_eval": "asks for a program",
    }


SETTINGS = [
    ({"kind": "choice"}, "kind is 'choice'; it is auto or multiple_choice, partial, continuation,"),
    ({"max_items": 0}, "max_items is 0; it must be 1 or more"),
    ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    ({"answer": "word"}, "answer is 'word'; it is auto, number or text"),
    (
        {"extract": "("},
        "extract is '(', which is not a regular expression: missing ), unte",
    ),
    ({"kind": "partial", "stop": ("x",)}, "stop has no meaning for a task of kind partial; take"),
    ({"kind": "generation", "delimiter": ""}, "delimiter has no meaning for a task of kind gener"),
]


@pytest.mark.parametrize(("options", "message"), SETTINGS, ids=range(len(SETTINGS)))
def test_settings_that_are_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        TaskConfig("t", "x.jsonl", **options)
    assert str(caught.value).startswith(f"evaluation task 't': {message}")


def test_settings_that_the_kind_has_no_use_for(file: Path) -> None:
    message = refusal(write(file, ENDS), max_tokens=5)
    assert message.startswith(
        "evaluation task 'task': max_tokens has no meaning for a task of kind"
    )


def test_prompts_that_ask_every_item_the_same(file: Path) -> None:
    """A brace that was forgotten; another field than that of the options."""
    says = "evaluation task 'task': prompt is {}, the same for all that is asked; write {} in it"
    assert refusal(write(file, CHOICES), prompt="{query") == says.format("'{query'", "{query}")
    assert refusal(write(file, PARTIAL), prompt="{continuation}") == says.format(
        "'{continuation}'", "{context}"
    )
    write(file, CHOICES)
    assert read_items(TaskConfig("task", str(file), prompt="{gold}"))[0] == "multiple_choice"


def test_outputs_that_the_model_cannot_hold(file: Path) -> None:
    write(file, SUMS)
    config = TaskConfig("t", str(file), max_tokens=64)
    with pytest.raises(RecipeError, match="max_tokens is 64, but the model reads 64 tokens, the"):
        check_task(config, 64)
    check_task(config, 65)
    config = TaskConfig("t", str(file), stop=("",))
    with pytest.raises(RecipeError, match=r"evaluation task 't': stop string '': 1 to \d+ char"):
        check_task(config, 65)


def test_a_number_is_wanted_and_none_is_there(file: Path) -> None:
    """Whatever a model wrote would be wrong."""
    config = TaskConfig("t", str(write(file, SUMS, {**SUMS, "answer": ["5", "five"]})))
    check_task(config, 65)
    said = f"{file}:2: answer is 'five', which has no number; take the line out or give the task"
    for ask in (check_task, lambda config, context: read_task(config, Letters(), context)):
        with pytest.raises(DataError) as caught:
            ask(replace(config, answer="number"), 65)
        assert str(caught.value) == f"{said} answer: text"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KIND = st.sampled_from(["auto", *KINDS])
NAMES = st.sampled_from([name for fields in FIELDS.values() for name in fields])


@given(rows=st.lists(st.dictionaries(NAMES, VALUES) | VALUES, max_size=3), kind=KIND)
def test_whatever_a_file_holds_is_read_or_refused(
    rows: list[Any], kind: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = write(tmp_path_factory.getbasetemp() / "any.jsonl", *rows)
    message = ""
    try:
        found = len(read_items(TaskConfig("any", str(file), kind=kind))[1])
    except CompressError as error:
        message, found = str(error), len(rows)
    assert found == len(rows)
    assert len(message.splitlines()) <= 1


class Letters:
    """A token a letter, none in front."""

    bos_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, *, skip_special: bool = False) -> str:
        return bytes(ids).decode()


def test_long_contexts_lose_their_beginning(file: Path) -> None:
    """As many tokens stay as are read: the last of what is scored is not."""
    write(file, {"context": "abcdefgh", "continuation": "xyz"}, {**ENDS, "context": "abc"})
    task = read_task(TaskConfig("t", str(file), delimiter=""), Letters(), 6)
    assert [bytes(begin + tail).decode() for begin, tail in task.pairs] == ["efghxyz", "abcb"]
    assert task.truncated == 1


def test_what_does_not_fit_alone_is_refused(file: Path) -> None:
    write(file, ENDS, {"context": "a", "continuation": "bcdefgh"})
    config = TaskConfig("t", str(file), delimiter="")
    with pytest.raises(DataError) as caught:
        read_task(config, Letters(), 6)
    line = "what is to be scored has 7 tokens, and the model reads 6; take the line out"
    assert str(caught.value) == f"{file}:2: {line}"
    write(file, {"context": "a", "continuation": "\ud800"})
    with pytest.raises(DataError, match=r"task.jsonl:1: the text is not UTF-8"):
        read_task(config, Letters(), 6)
