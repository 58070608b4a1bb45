"""Numbers of tasks on the engine against plain transformers, item by item."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import DataError
from compress.evaluation.tasks.asked import Task, read_task
from compress.evaluation.tasks.numbers import number
from compress.evaluation.tasks.run import run_task
from compress.recipe.task_config import TaskConfig
from compress.runtime.loading.model import Model
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Sampling
from compress.verbs import CacheOptions, open_model
from helpers import tiny_models

CONTEXT = 128  # of the tiny models
WORDS = "once upon a time a small dog and an old cat sat by the door in the rain for a long time"
CHOICES = (
    {"query": "once upon a time", "choices": ["there was a dog", "rain", "the old cat"], "gold": 0},
    {"query": "the girl found a red stone", "choices": ["and gave it", "park park"], "gold": 1},
    {"query": "the dog\n", "choices": ["who liked to play", " in the park"], "gold": 0},
    {"query": " ".join([WORDS] * 8), "choices": ["the end", "a park é"], "gold": 1},
)
ENDS = (
    {"context": "once upon a", "continuation": "time"},
    {"context": "the old cat sat by the", "continuation": "door"},
    {"context": "", "continuation": "once upon"},
    {"context": " ".join([WORDS] * 8), "continuation": "and a red stone"},
)
OPTIONS = (
    {
        "context_options": ["the dog and the cat, because the dog", "the dog and the cat"],
        "continuation": "was happy.",
        "gold": 0,
    },
    {"context_options": ["a stone", "a very old red stone"], "continuation": "sat", "gold": 1},
)
SUMS = ({"context": "two and two", "answer": "4"}, {"context": "the rain", "answer": "1,000"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("model"), dtype="fp32")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder, limits=Limits(tokens_per_step=64, sequences=4))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def asked(tmp_path: Path, model: Model) -> Callable[..., Task]:
    def make(rows: tuple[dict[str, Any], ...], bos: bool = True, **options: Any) -> Task:
        file = tmp_path / "task.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = TaskConfig("task", str(file), **options)
        return read_task(config, model.tokenizer, CONTEXT, bos=bos)

    return make


def by_hand(plain: Any, model: Model, context: str, end: str) -> tuple[float, bool, bool]:
    """Log-likelihood of `end` behind a context, whether it is greedy, and whether the context was
    cut: one forward, as lm-evaluation-harness does it, a BOS in front."""
    spaces = context[len(context.rstrip()) :]
    context, end = context.rstrip(), spaces + end
    encode = model.tokenizer.encode
    begin, whole = [0, *encode(context)], [0, *encode(context + end)]
    tail = whole[len(begin) :]
    ids = (begin + tail)[-(CONTEXT + 1) :]
    with torch.inference_mode():
        logits = plain(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    rows = logits[len(ids) - 1 - len(tail) :]
    score = float(rows.gather(1, torch.tensor(tail)[:, None]).sum())
    return score, rows.argmax(-1).tolist() == tail, len(begin) + len(tail) > len(ids)


def test_multiple_choice(asked: Callable[..., Task], model: Model, plain: Any) -> None:
    task = asked(CHOICES)
    outcome = run_task(task, model)
    expected: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    for row in CHOICES:
        parted = row["query"].endswith("\n")
        ends = [c if parted or c[0] == " " else f" {c}" for c in row["choices"]]
        scores = [by_hand(plain, model, row["query"], end)[0] for end in ends]
        normed = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
        expected["acc"].append(float(scores.index(max(scores)) == row["gold"]))
        expected["acc_norm"].append(float(normed.index(max(normed)) == row["gold"]))
    assert {key: list(values) for key, values in outcome.values.items()} == expected
    assert (task.kind, task.truncated) == ("multiple_choice", 1)
    assert task.items[3].sizes == (7, 8)  # characters; of bytes the second has nine


def test_last_words(asked: Callable[..., Task], model: Model, plain: Any) -> None:
    task = asked(ENDS)
    outcome = run_task(task, model)
    for row, acc, score in zip(ENDS, *outcome.values.values(), strict=True):
        end = row["continuation"] if not row["context"] else f" {row['continuation']}"
        wanted, greedy, _ = by_hand(plain, model, row["context"], end)
        assert score == pytest.approx(wanted, abs=1e-4)
        assert acc == greedy
    scores = outcome.values["perplexity"]
    mean = sum(scores) / len(scores)
    assert number("perplexity", scores).value == pytest.approx(math.exp(-mean))
    assert (task.kind, task.truncated) == ("continuation", 1)


def test_the_likeliest_token_is_greedy(asked: Callable[..., Task], model: Model) -> None:
    """Continuations that the model itself writes, where they are text."""
    words = WORDS.split()
    contexts = [" ".join(words[:n]) for n in range(1, len(words))]
    written = [r.text for r in model.generate(contexts, Sampling(max_tokens=1, ignore_eos=True))]
    encode = model.tokenizer.encode
    rows = tuple(
        {"context": context, "continuation": text}
        for context, text in zip(contexts, written, strict=True)
        if text and len(encode(context + text)) == len(encode(context)) + 1
    )
    assert rows
    assert set(run_task(asked(rows, delimiter=""), model).values["acc"]) == {1.0}
    assert set(run_task(asked(rows, delimiter=" x"), model).values["acc"]) == {0.0}


def test_a_choice_of_contexts(asked: Callable[..., Task], model: Model, plain: Any) -> None:
    task = asked(OPTIONS)
    outcome = run_task(task, model)
    expected = []
    for row in OPTIONS:
        scores = [
            by_hand(plain, model, option, f" {row['continuation']}")[0]
            for option in row["context_options"]
        ]
        expected.append(float(scores.index(max(scores)) == row["gold"]))
    assert outcome.values == {"acc": tuple(expected)}
    assert task.kind == "partial"


def test_generated_answers(asked: Callable[..., Task], model: Model, plain: Any) -> None:
    """Greedy, cut at the stop string; an answer made of what the model writes is right."""
    rows = []
    for context in ("two and two", "the rain", "a red stone"):
        ids = torch.tensor([[0, *model.tokenizer.encode(context)]])
        for _ in range(20):
            with torch.inference_mode():
                best = plain(ids).logits[0, -1].argmax().view(1, 1)
            ids = torch.cat([ids, best], dim=1)
        new = ids[0, -20:].tolist()
        new = new[: new.index(0)] if 0 in new else new
        rows.append({"context": context, "answer": model.tokenizer.decode(new)})
    rows.append({"context": "the end", "answer": "surely not"})
    task = asked(tuple(rows), prompt="{context}", max_tokens=20, stop=("zz",))
    outcome = run_task(task, model)
    assert outcome.values == {"exact_match": (1.0, 1.0, 1.0, 0.0)}
    cut = rows[0]["answer"][2:4]
    task = asked(tuple(rows[:1]), prompt="{context}", max_tokens=20, stop=(cut,))
    text = rows[0]["answer"]
    assert run_task(task, model).answers == (text[: text.index(cut)].strip(),)


def test_options_of_a_context_are_one_request(asked: Callable[..., Task], folder: Path) -> None:
    """The context is computed once for all of them, and equal pairs are computed once."""
    model = open_model(folder, cache=CacheOptions(reuse=False))
    task = asked(CHOICES[:1] * 3)
    before = model.engine.stats.computed
    seen = []
    run_task(task, model, lambda: seen.append(1))
    begin = len(task.pairs[0][0])
    tails = [len(tail) for _, tail in task.pairs[:3]]
    assert model.engine.stats.computed - before <= begin + sum(tails)
    assert len(seen) == len(task.pairs) == 9


def test_prompts_are_filled_with_fields(asked: Callable[..., Task]) -> None:
    task = asked(CHOICES[:1], prompt="Q: {query}, {gold}? {nothing to fill}\nA:", delimiter=" = ")
    assert task.items[0].pairs[0] == (
        "Q: once upon a time, 0? {nothing to fill}\nA:",
        " = there was a dog",
    )
    assert task.settings["prompt"] == "Q: {query}, {gold}? {nothing to fill}\nA:"
    assert task.settings["delimiter"] == " = "
    (item,) = asked(OPTIONS[1:], prompt="so {context}").items
    assert item.pairs[1] == ("so a very old red stone", " sat")
    (sums,) = asked(SUMS[:1], max_tokens=10).items
    assert sums.pairs == (("Question: two and two\nAnswer:", ""),)


def test_without_bos(asked: Callable[..., Task], model: Model) -> None:
    (begin, tail), *_ = asked(CHOICES, bos=False).pairs
    assert asked(CHOICES).pairs[0] == ((0, *begin), tail)
    with pytest.raises(DataError, match=r"task.jsonl:3: the prompt is empty and none is put in"):
        asked(ENDS, bos=False)


def test_long_prompts_keep_room_for_the_output(asked: Callable[..., Task], model: Model) -> None:
    rows = ({"context": " ".join([WORDS] * 8), "answer": "4"}, *SUMS)
    task = asked(rows)
    assert task.sampling is not None
    assert task.sampling.max_tokens == CONTEXT // 2
    assert len(task.pairs[0][0]) == CONTEXT // 2
    assert (task.truncated, task.numbers) == (1, True)
    assert len(run_task(task, model).answers) == 3


def test_max_items_takes_the_first(asked: Callable[..., Task]) -> None:
    assert [item.gold for item in asked(CHOICES, max_items=2).items] == [0, 1]
    assert asked(CHOICES, max_items=2).settings["max_items"] == 2


def test_what_the_engine_refuses_is_said(asked: Callable[..., Task], folder: Path) -> None:
    model = open_model(folder, cache=CacheOptions(tokens=32))
    with pytest.raises(DataError, match=r"^evaluation task 'task': \d+ positions need \d+ blocks"):
        run_task(asked(CHOICES), model)
    assert model.engine.idle
