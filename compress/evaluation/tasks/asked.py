"""A task in tokens: the pairs to score or the prompts to continue, cut to what the model reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compress.errors import DataError, RecipeError, RequestError
from compress.evaluation.tasks.answers import answer_of, is_number
from compress.evaluation.tasks.items import TaskItem, read_items
from compress.recipe.task_config import DEFAULT_STOP, DEFAULT_TOKENS, PROMPTS, Kind, TaskConfig
from compress.runtime.engine.refusals import check
from compress.runtime.sequences.request import Sampling
from compress.text.prompt import Ids, TextTokenizer, pair_ids, prompt_ids


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A task as models are asked it.

    pairs: (context, continuation) in ids, of all options of all items in their order; of a
        generation the prompts, with empty continuations.
    sampling: of a generation, None for scores.
    numbers: answers are compared as numbers.
    truncated: items whose context lost tokens at its beginning, as the model does not read so many.
    settings: how the items were asked, for the report.
    """

    config: TaskConfig
    kind: Kind
    items: tuple[TaskItem, ...]
    pairs: tuple[tuple[Ids, Ids], ...]
    sampling: Sampling | None
    numbers: bool
    truncated: int
    settings: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and continuations, those that items share counted each time, and
        of outputs as many as they may have."""
        written = len(self.items) * (self.sampling.max_tokens if self.sampling else 0)
        return written + sum(len(begin) + len(tail) for begin, tail in self.pairs)

    @property
    def texts(self) -> Iterator[str]:
        """All that is asked."""
        for item in self.items:
            yield from (context + continuation for context, continuation in item.pairs)


def read_task(
    config: TaskConfig, tokenizer: TextTokenizer, context: int, *, bos: bool = True
) -> Task:
    """The task for a model that reads `context` tokens. bos: as for texts.

    A context that is too long loses its beginning, as in lm-evaluation-harness. Raises DataError,
    with file and line, for a file that cannot be used; RecipeError for settings that do not fit.
    """
    kind, items = read_items(config)
    sampling = None
    if kind == "generation":
        sampling = _sampling(config, context)
        _try_extraction(config, items)
    numbers = _numbers(config, items)
    pairs: list[tuple[Ids, Ids]] = []
    truncated = 0
    for item in items:
        with _placed(item.where):
            whole = [_ids(tokenizer, pair, bos, sampling) for pair in item.pairs]
            kept = [_cut(*pair, context, sampling) for pair in whole]
        truncated += kept != whole
        pairs += kept
    return Task(
        config=config,
        kind=kind,
        items=items,
        pairs=tuple(pairs),
        sampling=sampling,
        numbers=numbers,
        truncated=truncated,
        settings=_settings(config, kind, sampling, numbers, bos),
    )


def check_task(config: TaskConfig, context: int) -> None:
    """What `read_task` refuses of a file and of settings, without a tokenizer."""
    kind, items = read_items(config)
    if kind == "generation":
        _sampling(config, context)
        _try_extraction(config, items)
        _numbers(config, items)


@contextmanager
def _placed(where: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise DataError(f"{where}: {error}") from None


def _ids(
    tokenizer: TextTokenizer, pair: tuple[str, str], bos: bool, sampling: Sampling | None
) -> tuple[Ids, Ids]:
    if sampling is not None:
        return prompt_ids(tokenizer, pair[0], bos=bos), ()
    return pair_ids(tokenizer, *pair, bos=bos)


def _cut(begin: Ids, tail: Ids, context: int, sampling: Sampling | None) -> tuple[Ids, Ids]:
    """At most `context` tokens are read: of a pair all but the last, of a prompt all, and the
    output."""
    if sampling is not None:
        return begin[-(context - sampling.max_tokens) :], ()
    if len(tail) > context:
        raise RequestError(
            f"what is to be scored has {len(tail)} tokens, and the model reads {context}; take the"
            " line out"
        )
    return begin[-(context + 1 - len(tail)) :], tail


def _sampling(config: TaskConfig, context: int) -> Sampling:
    """Greedy. RecipeError for what the engine would refuse of every item."""
    tokens = min(DEFAULT_TOKENS, context // 2) if config.max_tokens is None else config.max_tokens
    if tokens >= context:
        raise RecipeError(
            f"{config.label}: max_tokens is {tokens}, but the model reads {context} tokens, the"
            " prompt among them; give fewer"
        )
    stop = DEFAULT_STOP if config.stop is None else config.stop
    sampling = Sampling(max_tokens=tokens, stop=stop)
    try:
        check(sampling)
    except RequestError as error:
        raise RecipeError(f"{config.label}: {error}") from None
    return sampling


def _try_extraction(config: TaskConfig, items: tuple[TaskItem, ...]) -> None:
    """RecipeError where `extract` takes too long on texts such as outputs will be; found here, it
    costs nobody the outputs."""
    extract = config.extraction()
    if extract is not None:
        for item in items:
            extract.last(item.pairs[0][0])


def _numbers(config: TaskConfig, items: tuple[TaskItem, ...]) -> bool:
    """DataError where numbers are wanted and a right answer has none: no output could have it."""
    if config.answer == "auto":
        return all(is_number(answer) for item in items for answer in item.answers)
    for item in items if config.answer == "number" else ():
        for text in item.answers:
            if answer_of(text, None, True) is None:
                raise DataError(
                    f"{item.where}: answer is {text!r:.60}, which has no number; take the line out"
                    " or give the task answer: text"
                )
    return config.answer == "number"


def _settings(
    config: TaskConfig, kind: Kind, sampling: Sampling | None, numbers: bool, bos: bool
) -> dict[str, Any]:
    settings: dict[str, Any] = {"prompt": config.prompt or PROMPTS[kind]}
    if config.delimiter is not None:
        settings["delimiter"] = config.delimiter
    if config.max_items is not None:
        settings["max_items"] = config.max_items
    if not bos:
        settings["bos"] = "off"
    if sampling is not None:
        settings["max_tokens"] = sampling.max_tokens
        settings["stop"] = list(sampling.stop)
        settings["answer"] = "number" if numbers else "text"
        if config.extract:
            settings["extract"] = config.extract
    return settings
