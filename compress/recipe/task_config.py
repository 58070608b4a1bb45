"""What a task is and how it is asked. Plain data: the recipe is parsed into it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from compress.errors import RecipeError
from compress.expressions import Expression, expression

Kind = Literal["multiple_choice", "partial", "continuation", "generation"]
KINDS: tuple[Kind, ...] = ("multiple_choice", "partial", "continuation", "generation")

# Field of a task's lines that the prompt is made of, and the prompt where none is given.
PROMPTS: Mapping[str, str] = MappingProxyType(
    {
        "multiple_choice": "{query}",
        "partial": "{context}",
        "continuation": "{context}",
        "generation": "Question: {context}\nAnswer:",
    }
)
DEFAULT_STOP = ("Question:",)
DEFAULT_TOKENS = 256
_OF_GENERATION = ("max_tokens", "stop", "extract", "answer")


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """One task.

    name: its row in the table of tasks.
    path: a .jsonl file, an item a line.
    kind: "auto" goes by the fields of the first line. "multiple_choice": which of `choices` is
        likeliest behind `query`. "partial": behind which of `context_options` the `continuation` is
        likeliest. "continuation": whether the most likely tokens behind `context` are the
        `continuation`. "generation": whether the greedy output behind `context` has `answer`.
    prompt: the text in front of what is scored or generated; {field} stands for a field of the
        line ({context} for each of `context_options`). None is the row of PROMPTS.
    delimiter: between prompt and continuation; None is a space where neither side has one.
    max_items: use the first that many.
    max_tokens: of an output; None is 256, at most half the model's context.
    stop: an output ends before the first of these; None is "Question:".
    extract: a regular expression; its last match in the output (the first group, where it has one)
        is the answer. Empty: the output is.
    answer: "number" compares the last number in what was extracted, by value; "text" compares
        texts without the white space at their ends; "auto" is "number" where all answers are.

    Raises RecipeError for values out of range and for keys that the kind does not use.
    """

    name: str
    path: str
    kind: Literal["auto", "multiple_choice", "partial", "continuation", "generation"] = "auto"
    prompt: str | None = None
    delimiter: str | None = None
    max_items: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    extract: str = ""
    answer: Literal["auto", "number", "text"] = "auto"

    def __post_init__(self) -> None:
        if self.kind not in ("auto", *KINDS):
            raise RecipeError(
                f"{self.label}: kind is {self.kind!r}; it is auto or {', '.join(KINDS)}"
            )
        for key in ("max_items", "max_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise RecipeError(f"{self.label}: {key} is {value}; it must be 1 or more")
        if self.answer not in ("auto", "number", "text"):
            raise RecipeError(
                f"{self.label}: answer is {self.answer!r}; it is auto, number or text"
            )
        self.extraction()
        if self.kind != "auto":
            self.check_kind(self.kind)

    @property
    def label(self) -> str:
        """The front of a message."""
        return f"evaluation task {self.name!r}"

    def extraction(self) -> Expression | None:
        """`extract`, with time for all outputs of a model; None where it is empty."""
        return expression(self.extract, self._no_expression) if self.extract else None

    def _no_expression(self, why: str) -> RecipeError:
        return RecipeError(f"{self.label}: extract is {self.extract!r:.200}, which {why}")

    def check_kind(self, kind: str) -> None:
        """RecipeError for keys that a task of this kind has no use for."""
        unused = _OF_GENERATION if kind != "generation" else ("delimiter",)
        for item in fields(self):
            if item.name in unused and getattr(self, item.name) != item.default:
                raise RecipeError(
                    f"{self.label}: {item.name} has no meaning for a task of kind {kind};"
                    " take it out"
                )
