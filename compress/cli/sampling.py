"""Options of sampling, for the commands that write text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from compress.runtime.sequences.request import Sampling

F = TypeVar("F", bound=Callable[..., Any])


def sampling(temperature: float, top_p: float) -> Callable[[F], F]:
    """All of them, with these defaults; the command gets them as **asked, for `sampling_of`."""

    def decorate(command: F) -> F:
        for name, options in reversed(_options(temperature, top_p)):
            command = click.option(*name.split(), **options)(command)
        return command

    return decorate


def _options(temperature: float, top_p: float) -> list[tuple[str, dict[str, Any]]]:
    def number(default: float, text: str) -> dict[str, Any]:
        return {"type": float, "default": default, "show_default": True, "help": text}

    return [
        ("--temperature", number(temperature, "0 takes the most likely token each time.")),
        ("--top-k", {"type": int, "default": 0, "help": "Only the K most likely; 0: all."}),
        ("--top-p", number(top_p, "The most likely, up to this probability together.")),
        ("--min-p", number(0.0, "At least so likely, relative to the most likely.")),
        ("--repetition-penalty", number(1.0, "Against tokens of prompt and output.")),
        ("--frequency-penalty", number(0.0, "Against tokens of the output, by count.")),
        ("--presence-penalty", number(0.0, "Against tokens that the output has.")),
        (
            "--logit-bias biases",
            {
                "multiple": True,
                "metavar": "TOKEN=BIAS",
                "help": "Add to the logit of a token id. May be repeated.",
            },
        ),
        (
            "--seed",
            {"type": int, "default": 0, "show_default": True, "help": "One seed, one text."},
        ),
        (
            "--stop",
            {"multiple": True, "metavar": "TEXT", "help": "End before TEXT. May be repeated."},
        ),
        ("--min-tokens", {"type": int, "default": 0, "help": "No end before so many tokens."}),
        ("--ignore-eos", {"is_flag": True, "help": "Go on behind the end of a text."}),
    ]


def sampling_of(asked: dict[str, Any], max_tokens: int, **more: Any) -> "Sampling":
    """Of the values of `sampling`'s options. Errors: RequestError, UsageError."""
    from compress.runtime.engine.refusals import check
    from compress.runtime.sequences.request import Sampling

    biases = dict(_bias(text) for text in asked.pop("biases"))
    found = Sampling(logit_bias=biases, max_tokens=max_tokens, **asked, **more)
    check(found)
    return found


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise click.UsageError(
            f"--logit-bias {text!r}: a token id and a number are needed, such as 17=-5"
        ) from None
