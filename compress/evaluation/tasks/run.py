"""A task put to a model: all its items go to the engine together."""

from collections.abc import Callable, Sequence

from compress.errors import DataError, RequestError
from compress.evaluation.tasks.answers import Answer, answer_of, is_right
from compress.evaluation.tasks.asked import Task
from compress.evaluation.tasks.numbers import TaskOutcome
from compress.runtime.loading.model import Model
from compress.runtime.sequences.request import Request, RequestResult, Sampling
from compress.serve.questions import score_pairs, serve

Counter = Callable[[], None]


def uncounted() -> None:
    """The default listener."""


def run_task(task: Task, model: Model, count: Counter = uncounted) -> TaskOutcome:
    """What the model does on the task; `count` is called for each of its pairs that is done.

    The model must read what the task was read for. DataError where the engine cannot serve an item,
    with the reason.
    """
    try:
        if task.sampling is not None:
            return _generated(task, task.sampling, model, count)
        return _scored(task, model, count)
    except RequestError as error:
        raise DataError(f"{task.config.label}: {error}") from None


def _scored(task: Task, model: Model, count: Counter) -> TaskOutcome:
    scores = [0.0] * len(task.pairs)
    greedy = [False] * len(task.pairs)

    def tell(place: int, score: float, likeliest: bool) -> None:
        scores[place], greedy[place] = score, likeliest
        count()

    score_pairs(model, task.pairs, tell)
    if task.kind == "continuation":
        values = {"acc": tuple(map(float, greedy)), "perplexity": tuple(scores)}
        return TaskOutcome(values, tuple(greedy))
    return _chosen(task, scores)


def _chosen(task: Task, scores: Sequence[float]) -> TaskOutcome:
    """The likeliest option of each item, the first of equals; `acc_norm` by log-likelihood a
    character of the option, as lm-evaluation-harness counts."""
    plain, normed, chosen = [], [], []
    at = 0
    for item in task.items:
        own = scores[at : at + len(item.pairs)]
        at += len(own)
        chosen.append(own.index(max(own)))
        shares = [score / size for score, size in zip(own, item.sizes, strict=True)]
        plain.append(float(chosen[-1] == item.gold))
        normed.append(float(shares.index(max(shares)) == item.gold))
    values = {"acc": tuple(plain)}
    if task.kind == "multiple_choice":
        values["acc_norm"] = tuple(normed)
    return TaskOutcome(values, tuple(chosen))


def _generated(task: Task, sampling: Sampling, model: Model, count: Counter) -> TaskOutcome:
    answers: list[Answer] = [None] * len(task.items)
    extract = task.config.extraction()

    def ended(result: RequestResult) -> None:
        assert result.text is not None
        answers[int(result.id)] = answer_of(result.text, extract, task.numbers)
        count()

    requests = [Request(str(i), prompt, sampling) for i, (prompt, _) in enumerate(task.pairs)]
    serve(model, requests, ended)
    pairs = zip(answers, task.items, strict=True)
    right = tuple(float(is_right(answer, item.answers)) for answer, item in pairs)
    return TaskOutcome({"exact_match": right}, tuple(answers))
