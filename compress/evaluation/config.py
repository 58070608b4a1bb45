"""What to evaluate on, and how the text is cut. Plain data: the recipe is parsed into it."""

from dataclasses import dataclass
from typing import Literal

from compress.errors import RecipeError

# Longer windows cost quadratic attention and change perplexity little; a recipe may ask for more.
DEFAULT_WINDOW_CAP = 2048


@dataclass(frozen=True, slots=True)
class TextConfig:
    """One evaluation text.

    name: its row in the quality table.
    kind: "text", "jsonl", "parquet" or "dataset" read `path`; "self" is text sampled from the
        source model (held out by `seed`), for when there is no text at hand.
    field, split, separator: as for calibration sources (compress_calibration.config).
    mode: "documents" starts every document afresh; "stream" joins them (without a separator,
        the wikitext protocol) and cuts the joined text.
    cut: score only the first window of each document.
    max_documents: use the first that many; None is all.
    max_tokens: stop at the document (or, in a stream, the token) that reaches this many scored
        tokens; None is no limit.
    samples, length, seed: size and noise of "self" text; not used by the other kinds.
    """

    name: str
    kind: Literal["text", "jsonl", "parquet", "dataset", "self"] = "text"
    path: str | None = None
    field: str | None = None
    split: str | None = None
    separator: str | None = None
    mode: Literal["documents", "stream"] = "documents"
    cut: bool = False
    max_documents: int | None = None
    max_tokens: int | None = None
    samples: int = 32
    length: int = 256
    seed: int = 1

    def __post_init__(self) -> None:
        where = f"evaluation text {self.name!r}"
        if (self.kind == "self") == (self.path is not None):
            wanted = "takes no path" if self.kind == "self" else "needs a path"
            raise RecipeError(f"{where}: kind {self.kind!r} {wanted}; path is {self.path!r}")
        if self.cut and self.mode == "stream":
            raise RecipeError(f"{where}: cut is for mode 'documents'; a stream is one long text")
        for key in ("max_documents", "max_tokens", "samples", "length"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise RecipeError(f"{where}: {key} is {value}; it must be 1 or more")


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
    bos: put the tokenizer's BOS in front of every document (or of every window of a stream).
    kl: also KL(source || result) and top-1 agreement (needs the source).
    dtype: arithmetic of the blocks; the head and its softmax are always fp32.
    batch_tokens: tokens that go through a block at once.
    spill_bytes: hidden states kept in memory; what is more goes to a file in the work folder.
    """

    texts: tuple[TextConfig, ...] = ()
    window: int | None = None
    stride: int | None = None
    bos: bool = True
    kl: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_tokens: int = 4096
    spill_bytes: int = 256 * 1024 * 1024
    samples: SampleConfig = SampleConfig()

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 2:
            raise RecipeError(f"evaluation: window is {self.window}; it must be 2 or more")
        if self.stride is not None and self.stride < 1:
            raise RecipeError(f"evaluation: stride is {self.stride}; it must be 1 or more")
        if self.batch_tokens < 1:
            raise RecipeError(
                f"evaluation: batch_tokens is {self.batch_tokens}; it must be 1 or more"
            )
        names = [text.name for text in self.texts]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"evaluation: two texts are named {name!r}; names must differ")
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
            f"evaluation: stride is {stride} with window {window};"
            f" it must be in 1 .. {window - 1}"
        )
