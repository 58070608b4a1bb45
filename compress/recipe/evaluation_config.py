"""What to evaluate on, and how the text is cut. Plain data: the recipe is parsed into it."""

from dataclasses import dataclass
from typing import Literal

from compress.errors import RecipeError
from compress.recipe.task_config import TaskConfig
from compress_calibration.config import DEFAULT_SEPARATOR, SourceConfig, SourceKind

# Longer windows cost quadratic attention and change perplexity little; a recipe may ask for more.
DEFAULT_WINDOW_CAP = 2048


@dataclass(frozen=True, slots=True)
class TextConfig:
    """One evaluation text.

    name: its row in the quality table.
    kind, path, id, subset, field, split, separator: as for a calibration source
        (compress_calibration.config), only read in file order. "self" is text that the source
        model writes, for when there is none at hand: `samples` rows of `length` tokens, drawn with
        `seed` (calibration draws with another).
    mode: "documents" starts every document afresh; "stream" joins them and cuts what comes out.
    cut: score only the first window of each document.
    max_documents: use the first that many; None is all.
    max_tokens: score the first that many tokens; None is all.

    Raises RecipeError for values out of range and for keys that the kind does not use.
    """

    name: str
    kind: SourceKind = "text"
    path: str | tuple[str, ...] = ()
    id: str = ""
    subset: str = ""
    field: str = ""
    split: str = ""
    separator: str = DEFAULT_SEPARATOR
    mode: Literal["documents", "stream"] = "documents"
    cut: bool = False
    max_documents: int | None = None
    max_tokens: int | None = None
    samples: int = 32
    length: int = 256
    seed: int = 1

    def __post_init__(self) -> None:
        where = f"evaluation text {self.name!r}"
        try:
            self.source()
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from None
        if self.mode not in ("documents", "stream"):
            raise RecipeError(f"{where}: mode is {self.mode!r}; it is documents or stream")
        if self.cut and self.mode == "stream":
            raise RecipeError(f"{where}: cut is for mode 'documents'; a stream is one long text")
        for key, least in (("max_documents", 1), ("max_tokens", 1), ("samples", 1), ("length", 2)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise RecipeError(f"{where}: {key} is {value}; it must be {least} or more")

    def source(self) -> SourceConfig:
        """Where the documents come from, in calibration's words."""
        return SourceConfig(
            kind=self.kind,
            path=self.path,
            id=self.id,
            subset=self.subset,
            field=self.field,
            split=self.split,
            separator=self.separator,
        )


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """Generated text shown before and after: one greedy continuation a prompt."""

    prompts: tuple[str, ...] = ()
    tokens: int = 64

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise RecipeError(f"evaluation samples: tokens is {self.tokens}; it must be 1 or more")


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """How to measure quality.

    window: tokens the model sees at once, BOS included; None is the model's context, at most 2,048.
    stride: tokens scored by each window after the first; every one of them has at least
        window - stride tokens of context. None is half the window.
    bos: put the tokenizer's BOS, where it has one, in front of every document and stream, and of
        every prompt of a task.
    kl: also KL(source || result) and top-1 agreement (needs the source).
    plain: of a run that rounds by what data shows, also what plain rounding under the same schemes
        costs on the texts.
    dtype: arithmetic of the blocks; the head and its softmax are always fp32.
    tasks: questions with right answers, put to the models through the engine.
    batch_tokens: tokens that go through a block at once.
    spill_bytes: hidden states kept in memory; what is more goes to a file in the work folder.
    """

    texts: tuple[TextConfig, ...] = ()
    window: int | None = None
    stride: int | None = None
    bos: bool = True
    kl: bool = True
    plain: bool = True
    dtype: Literal["fp32", "bf16"] = "fp32"
    batch_tokens: int = 4096
    spill_bytes: int = 256 * 1024 * 1024
    samples: SampleConfig = SampleConfig()
    tasks: tuple[TaskConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 2:
            raise RecipeError(f"evaluation: window is {self.window}; it must be 2 or more")
        if self.stride is not None and self.stride < 1:
            raise RecipeError(f"evaluation: stride is {self.stride}; it must be 1 or more")
        if self.dtype not in ("fp32", "bf16"):
            raise RecipeError(f"evaluation: dtype is {self.dtype!r}; it is fp32 or bf16")
        for key in ("batch_tokens", "spill_bytes"):
            if getattr(self, key) < 1:
                raise RecipeError(
                    f"evaluation: {key} is {getattr(self, key)}; it must be 1 or more"
                )
        for kind, parts in (("texts", self.texts), ("tasks", self.tasks)):
            names = [part.name for part in parts]
            for name in names:
                if names.count(name) > 1:
                    raise RecipeError(
                        f"evaluation: two {kind} are named {name!r}; names must differ"
                    )
        if self.window is not None and self.stride is not None:
            check_stride(self.window, self.stride)

    def resolve(self, context: int) -> tuple[int, int]:
        """(window, stride) for a model of that context length; RecipeError when they do not fit."""
        window = self.window or min(context, DEFAULT_WINDOW_CAP)
        if window > context:
            raise RecipeError(
                f"evaluation: window is {window}, but the model's context is {context};"
                " give a smaller window"
            )
        stride = self.stride or max(1, window // 2)
        check_stride(window, stride)
        return window, stride


def check_stride(window: int, stride: int) -> None:
    """RecipeError unless 1 <= stride < window: a token's own window must hold what precedes it."""
    if not 1 <= stride < window:
        raise RecipeError(
            f"evaluation: stride is {stride} with window {window}; it must be in 1 .. {window - 1}"
        )
