"""What a fresh process is asked about a checkpoint, and what it answers."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

_KEY = "question"


@dataclass(frozen=True, slots=True)
class LoadQuestion:
    """The part of a question that is text.

    folder: of the checkpoint, absolute. first_block: whether the model is cut behind its first
    block, because the whole does not fit the memory; names and shapes are compared of all blocks.
    shapes: of the tensors in the files. spare: names of tensors that are part of no decoder; the
    class may have no place for them. texts, tokens: what the tokenizer reads, and the ids that the
    source's gave; both empty where the source has none.
    """

    folder: str
    first_block: bool
    shapes: dict[str, list[int]]
    spare: list[str]
    texts: list[str]
    tokens: list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """ids: int64 [1, tokens]. logits: what our own reading of the checkpoint gives for them, fp32
    [1, tokens, vocab]."""

    asked: LoadQuestion
    ids: Tensor
    logits: Tensor

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        from safetensors.torch import save

        tensors = {"ids": self.ids.contiguous(), "logits": self.logits.contiguous()}
        data: bytes = save(tensors, metadata={_KEY: json.dumps(asdict(self.asked))})
        return data

    @classmethod
    def read(cls, path: Path) -> "Question":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            text, tensors = file.metadata()[_KEY], [file.get_tensor(x) for x in ("ids", "logits")]
        return cls(LoadQuestion(**json.loads(text)), *tensors)


@dataclass(frozen=True, slots=True)
class Answer:
    """transformers: its version. model_class: the class that AutoModelForCausalLM chose.

    max_error: largest difference of a logit. relative_error: norm of the difference over that of
    our logits. why_not: what is wrong, in words; None where nothing is.
    """

    transformers: str
    model_class: str = ""
    max_error: float = 0.0
    relative_error: float = 0.0
    why_not: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Answer":
        """ValueError where it is none."""
        found: Any = json.loads(text)
        if not isinstance(found, dict) or found.keys() != {x.name for x in fields(cls)}:
            raise ValueError("no answer")
        return cls(**found)
