"""The engine's decoder used plainly: one text at a time, its prompt in one go, then token by token.

No scheduler, no shared blocks, no batch: what the engine is held to, tokens and bits.
"""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from compress.runtime.decoder.decoder import Decoder
from compress.runtime.sampling.sampling import sample
from compress.runtime.sequences.request import Metrics, Request, RequestResult, TokenLogprob
from compress.runtime.sequences.sequence import Sequence, Times
from helpers.engine.flat_runs import Runs

UNTIMED = Metrics(0.0, None, None, 0.0, 0)


class Output(NamedTuple):
    """logits: fp32 [tokens, vocabulary], what each token of the result was chosen from."""

    result: RequestResult
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
        seen, reports, row = [], [], runs.whole(request.prompt)[-1:]
        for _ in range(request.sampling.max_tokens):
            seen.append(row)
            (choice,) = sample(row.clone(), [one])
            assert choice is not None
            at = len(one.tokens)
            one.tokens.append(choice.token)
            reports += [] if choice.report is None else [choice.report]
            (row,) = runs.step([(0, [choice.token], at, start)])
        tokens, logprobs = tuple(one.tokens[start:]), tuple(reports)
        result = RequestResult(request.id, index, tokens, "length", UNTIMED, logprobs=logprobs)
        return Output(result, torch.cat(seen))

    def score(self, request: Request, index: int) -> RequestResult:
        """Of the prompt, or of its continuation `index`."""
        assert request.score_from is not None
        text = request.prompt + (request.continuations[index] if request.continuations else ())
        runs = Runs(self.decoder, texts=1, most=self.most, block_size=self.most)
        tail = text[request.score_from :]
        rows = runs.whole(text)[request.score_from - 1 : -1]
        values = rows.log_softmax(dim=-1)[torch.arange(len(tail)), torch.tensor(tail)].tolist()
        greedy = [token == best for token, best in zip(tail, rows.argmax(-1).tolist(), strict=True)]
        return RequestResult(
            id=request.id,
            index=index,
            tokens=tail,
            finish_reason="stop",
            metrics=UNTIMED,
            logprobs=tuple(map(TokenLogprob, tail, values, greedy)),
            score=sum(values),
            greedy=all(greedy),
        )
