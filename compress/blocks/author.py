"""A model that writes text of its own, which is kept: each text is written once on a machine."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.blocks.sample import OwnText, generate
from compress.blocks.skeleton import Skeleton
from compress.events import Progress, by_tenths, note
from compress.formats.weights import Weights
from compress.usercache.cache import UserCache
from compress.usercache.entry import Entry
from compress.usercache.facts import computed_facts

SAID = "text that the model wrote"


@dataclass(frozen=True, slots=True, eq=False)
class Author:
    """skeleton: of the model in the arithmetic it writes in, made when it is first needed.
    kept: where its texts lie; None to keep none."""

    weights: Weights
    skeleton: Callable[[], Skeleton]
    kept: UserCache | None = None

    def write(self, asked: OwnText, stage: str | None, progress: Progress) -> Tensor:
        """Ids as `generate` gives them, int64 [count, length], whether they are drawn or were kept.

        stage: under which progress is told; None for not at all.
        """
        skeleton = self.skeleton()
        entry = None if self.kept is None else _entry(self.weights, skeleton, asked)
        if self.kept is None or entry is None:
            return self._drawn(skeleton, asked, stage, progress)
        found = bytearray()
        if self.kept.find(entry, found.extend, SAID):
            if stage is not None:
                progress(note(stage, f"{_rows(asked)} that the model wrote before, as kept"))
            ids = torch.frombuffer(found, dtype=torch.int32)
            return ids.reshape(asked.count, asked.length).long()
        ids = self._drawn(skeleton, asked, stage, progress)
        self.kept.keep(entry, partial(_stored, ids))
        return ids

    def _drawn(
        self, skeleton: Skeleton, asked: OwnText, stage: str | None, progress: Progress
    ) -> Tensor:
        if stage is None:
            return generate(self.weights, skeleton, asked)
        progress(note(stage, f"the model writes {_rows(asked)}"))
        counter = by_tenths(progress, stage, "text written")
        return generate(self.weights, skeleton, asked, progress=counter)


def _rows(asked: OwnText) -> str:
    return f"{asked.count} rows of {asked.length} tokens"


def _stored(ids: Tensor) -> Iterator[memoryview]:
    yield ids.to(torch.int32).contiguous().view(-1).view(torch.uint8).numpy().data


def _entry(weights: Weights, skeleton: Skeleton, asked: OwnText) -> Entry | None:
    """None where nobody knows whether the model is what it was."""
    facts = computed_facts(weights.checkpoint, skeleton.device, skeleton.dtype)
    if facts is None:
        return None
    prompt = asked.prompt_ids
    drawn = {
        "text": [asked.count, asked.length, asked.seed, asked.temperature],
        "prompt": None if prompt is None else [list(prompt.shape), _digest(prompt)],
    }
    return Entry("text", {**facts, **drawn}, torch.int32.itemsize * asked.count * asked.length)


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.long().contiguous().numpy().tobytes()).hexdigest()
