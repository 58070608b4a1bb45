"""An engine and a tokenizer: text in, text out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from compress.errors import RequestError
from compress.runtime.engine.engine import Engine
from compress.runtime.sequences.request import Request, RequestResult, Sampling, Update
from compress.text.prompt import TextTokenizer, pair_ids, prompt_ids
from compress_kernels.panels import Math

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A checkpoint that answers. notices: what one should know of how it runs, in lines. math: of
    its products with codes.

    One thread at a time works with it.
    """

    engine: Engine
    tokenizer: TextTokenizer
    notices: tuple[str, ...] = ()
    math: Math = "exact"
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def context(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self.engine.facts.context

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, with the beginning-of-text token in front where the tokenizer has one
        and the text does not begin with it. RequestError for an empty text without such a token,
        and for what is no text.
        """
        return prompt_ids(self.tokenizer, text)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> list[RequestResult]:
        """The outputs of each prompt, sampling.n of them, in order.

        prompts: texts, or ids, which are taken as they are. A prompt that cannot be served has one
        result, with the reason in `error`. Errors: RequestError for what is no prompt at all.
        """
        if isinstance(prompts, str):
            raise RequestError(f"prompts is the text {prompts!r:.60}; give a list of texts")
        return self.engine.generate([self._request(prompt, sampling) for prompt in prompts])

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[Update]:
        """The outputs of a prompt as they come. Closing the iterator ends them.

        Errors: RequestError for what cannot be served.
        """
        return self.engine.stream(self._request(prompt, sampling))

    def score(self, context: str, continuations: Sequence[str]) -> list[RequestResult]:
        """Of each continuation how likely it is behind the context: `score` (nats), `greedy`; and
        by which `math`.

        A space at the end of the context counts to the continuation, as tokens begin with spaces.
        Errors: RequestError for a continuation without a token, and for what is no text.
        """
        if isinstance(continuations, str) or not continuations:
            raise RequestError(f"continuations is {continuations!r:.60}; give a list of texts")
        for text in (context, *continuations):
            if not isinstance(text, str):
                raise RequestError(f"{text!r:.60} is to be scored; it must be a text")
        pairs = [pair_ids(self.tokenizer, context, c) for c in continuations]
        begin = self.encode(context.rstrip())
        tails = tuple(tail for _, tail in pairs)
        name = f"score {next(self._numbers)}"
        request = Request(name, begin, score_from=len(begin), continuations=tails)
        return [replace(result, math=self.math) for result in self.engine.generate([request])]

    def _request(self, prompt: Prompt, sampling: Sampling | None) -> Request:
        if sampling is not None and not isinstance(sampling, Sampling):
            raise RequestError(f"sampling is {sampling!r:.60}; give a compress.Sampling")
        ids = self.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        return Request(f"text {next(self._numbers)}", ids, sampling or Sampling())


def _ids(prompt: object) -> tuple[int, ...]:
    """RequestError for what is neither text nor ids."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"a prompt is {prompt!r:.60}; give a text, or a tuple of token ids")
    return tuple(prompt)
