"""What both kinds of tokenizers come down to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compress.errors import CheckpointError

# GGUF's types of tokens; what has none is a NORMAL one.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class Words:
    """model: tokenizer.ggml.model. cut: tokenizer.ggml.pre. types: of tokens that are not normal.

    merges: "a b", of byte-level BPE. scores: of every token, of sentencepiece. space: one is put
    in front of a text. mark: what stands for a space in tokens.
    """

    model: str
    cut: str
    types: Mapping[int, int] = field(default_factory=dict)
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    space: bool = False
    mark: str = ""
    notes: tuple[str, ...] = ()

    def plain(self, text: str) -> str:
        """An added token's text as readers look for it in a text."""
        return text.replace(self.mark, " ") if self.mark else text


def refusal(file: Path, what: str, wanted: str) -> CheckpointError:
    """One line: what the tokenizer has, and what GGUF can express."""
    return CheckpointError(
        f"{file}: {what}; GGUF's tokenizers have {wanted}, so take onnx, beside which"
        " tokenizer.json lies as it is"
    )
