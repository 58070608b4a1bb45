"""The engine's decoder used plainly: one text at a time, its prompt in one go, then token by token.

No scheduler, no shared blocks, no batch: what the engine is held to, tokens and bits.
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from compress.runtime.decoder import Decoder
from compress.runtime.request import Request
from compress.runtime.sampling import sample
from compress.runtime.sequence import Sequence, Times
from flat_runs import Runs


class Output(NamedTuple):
    """tokens: of the output. logits: fp32 [tokens, vocabulary], what each was chosen from."""

    tokens: list[int]
    logits: Tensor


@dataclass(slots=True)
class OneByOne:
    """Answers are kept: schedules ask for the same requests again."""

    decoder: Decoder
    most: int
    _generated: dict[tuple[str, int], Output] = field(default_factory=dict)

    def generation(self, request: Request, index: int) -> Output:
        """Output `index` of a request, ends ignored."""
        key = (request.id, index)
        if key not in self._generated:
            self._generated[key] = self._generate(request, index)
        return self._generated[key]

    def _generate(self, request: Request, index: int) -> Output:
        assert request.sampling is not None
        runs = Runs(self.decoder, texts=1, most=self.most, block_size=self.most)
        start = len(request.prompt)
        one = Sequence(
            request=request,
            index=index,
            order=(0, index),
            tokens=array("i", request.prompt),
            root=b"",
            stop_ids=frozenset(),
            writer=None,
            times=Times(0.0),
            groups=1,
        )
        seen, row = [], runs.whole(request.prompt)[-1:]
        for _ in range(request.sampling.max_tokens):
            seen.append(row)
            (choice,) = sample(row.clone(), [one])
            assert choice is not None
            at = len(one.tokens)
            one.tokens.append(choice.token)
            (row,) = runs.step([(0, [choice.token], at, start)])
        return Output(list(one.tokens[start:]), torch.cat(seen))

    def scores(self, text: tuple[int, ...], begin: int) -> list[float]:
        """Log-probability of each token from `begin` on."""
        runs = Runs(self.decoder, texts=1, most=self.most, block_size=self.most)
        rows = runs.whole(text)[begin - 1 : -1].log_softmax(dim=-1)
        return rows[torch.arange(len(rows)), torch.tensor(text[begin:])].tolist()
