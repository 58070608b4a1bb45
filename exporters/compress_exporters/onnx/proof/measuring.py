"""How far a graph that is open in some runtime is from our decoder: in one step, in chunks, and
beside padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compress_exporters.onnx.proof.running import Array, Steps

PARTS = (7, 1, 1)  # tokens of the first chunks; the rest follows in one


@dataclass(frozen=True, slots=True)
class Error:
    """Of logits: the largest difference, and the norm of all by that of the logits."""

    largest: float
    relative: float

    @classmethod
    def of(cls, found: Array, want: Array) -> "Error":
        difference = found.astype(np.float32) - want
        size = float(np.linalg.norm(want))
        relative = float(np.linalg.norm(difference)) / size if size else 0.0
        return cls(float(np.abs(difference).max()), relative)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A text, and our decoder's logits of it, fp32 [tokens, rows of the head]."""

    ids: Sequence[int]
    logits: Array

    def error(self, steps: Steps) -> Error:
        """Of the text in one step."""
        ids = np.array([self.ids])
        return Error.of(steps.step(ids, np.ones_like(ids))[0][0], self.logits)

    def errors(self, steps: Steps, *, left: bool = True) -> Mapping[str, Error]:
        """By what was done. left: whether the graph reads padding on the left, too."""
        found = {
            f"{len(self.ids)} tokens in one step": self.error(steps),
            "the same in chunks": Error.of(_chunks(steps, self.ids), self.logits),
        }
        for side in ("right", "left")[: 1 + left]:
            found[f"beside a text padded on the {side}"] = self._padded(steps, side)
        return found

    def _padded(self, steps: Steps, side: str) -> Error:
        """A batch of the text and of a shorter one, which is its beginning."""
        ids, short = self.ids, max(1, len(self.ids) // 2)
        place = slice(len(ids) - short, len(ids)) if side == "left" else slice(0, short)
        batch, mask = np.zeros((2, len(ids)), np.int64), np.zeros((2, len(ids)), np.int64)
        batch[0], mask[0] = ids, 1
        batch[1, place], mask[1, place] = ids[:short], 1
        logits, _ = steps.step(batch, mask)
        both = np.concatenate([logits[0], logits[1][place]])
        return Error.of(both, np.concatenate([self.logits, self.logits[:short]]))


def _chunks(steps: Steps, ids: Sequence[int]) -> Array:
    at, past, found = 0, None, []
    for size in (*PARTS, len(ids)):
        part = np.array([ids[at : at + size]])
        if part.size:
            at += part.shape[1]
            logits, past = steps.step(part, np.ones((1, at), np.int64), past)
            found.append(logits[0])
    return np.concatenate(found)
