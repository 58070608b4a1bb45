"""What a result is worth: on texts, in the engine, at tasks."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class MathQuality:
    """What the engine's `math` costs on one text, beside what is rounded in the file.

    perplexity: with it. kl: mean KL(exact || math) in nats a token. top1_agreement: share of tokens
    where it ranks the token first that `exact` does, in [0, 1].
    """

    math: str
    perplexity: float
    kl: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class PlainQuality:
    """What rounding to nearest without data costs on one text, under the result's schemes.

    perplexity: of the source so rounded. kl, top1_agreement: against the source, as of the result.
    closed: share of what it loses that the result does not lose: 1 is lossless, 0 plain rounding,
        below 0 worse. Of the KL; without it of the logarithm of perplexity; None where plain
        rounding loses nothing.
    """

    perplexity: float
    kl: float | None = None
    top1_agreement: float | None = None
    closed: float | None = None


@dataclass(frozen=True, slots=True)
class TextQuality:
    """What one text says of the result.

    tokens: predicted tokens. kl: mean KL(source || result) in nats a token.
    top1_agreement: share of tokens where both models rank the same token first, in [0, 1].
    settings: how it was measured (window, stride, BOS). math: of the result in the engine, where
    it was asked. plain: of the same layers plainly rounded, where the recipe looked at data.
    sha256: of the tokens: two results with the same were measured on the same.
    """

    name: str
    tokens: int
    ppl_source: float | None
    ppl_result: float
    kl: float | None = None
    top1_agreement: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    math: MathQuality | None = None
    plain: PlainQuality | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class TaskNumber:
    """A number of a task, of the result and where there is one of the source.

    result_error, source_error: standard errors over the items. difference_error: that of result -
        source, item by item, so smaller than the two where both mostly do alike. None for one item.
    """

    result: float
    result_error: float | None = None
    source: float | None = None
    source_error: float | None = None
    difference_error: float | None = None


@dataclass(frozen=True, slots=True)
class TaskQuality:
    """What one task says of the result.

    kind: "multiple_choice", "partial", "continuation" or "generation".
    truncated: items whose context lost its beginning, as the model does not read so many tokens.
    numbers: by name: "acc", "acc_norm" and "exact_match" are shares of items in [0, 1],
        "perplexity" is that of a continuation.
    same_answers: share of items where both models chose or wrote the same, in [0, 1].
    settings: how it was asked.
    """

    kind: str
    items: int
    truncated: int
    numbers: dict[str, TaskNumber]
    same_answers: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quality:
    """Texts in the order they were given, the first being the headline; tasks by name.

    plain_reason: why plain rounding was not measured on the texts; None where it was, and where
    nothing was rounded.
    """

    texts: tuple[TextQuality, ...] = ()
    tasks: dict[str, TaskQuality] = field(default_factory=dict)
    plain_reason: str | None = None
