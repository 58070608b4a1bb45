"""What the engine does not take on, said at the door: with the field, the value and the bound."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from compress.errors import RequestError
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from compress.runtime.sequences.tables import BlockTables

MOST_LOGPROBS = 20
# Each output has keys and values of its own and one more row in every step; engines and services
# known to us take 128 at most.
MOST_OUTPUTS = 1024
MOST_STOPS, LONGEST_STOP = 64, 1000


def one_variant(length: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests must fit.

    context: positions that the model reads at most. vocabulary: its logits in a row. eos: ids that
    end a text. fingerprint: of the weights and of everything else that keys and values depend on.
    variant: length of a text when it comes -> a number; texts of one number have the same rotary
    frequencies (longrope, dynamic), and only they share keys and values.
    """

    context: int
    vocabulary: int
    eos: tuple[int, ...] = ()
    fingerprint: str = ""
    variant: Callable[[int], int] = one_variant


# Field -> (lowest, highest); both included.
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, math.inf),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")
_COUNTS: Mapping[str, tuple[int, float]] = {
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "n": (1, MOST_OUTPUTS),
    "logprobs": (0, MOST_LOGPROBS),
}


def check(sampling: Sampling) -> None:
    """Errors: RequestError with the field, its value and the range."""
    for name, (low, high) in _NUMBERS.items():
        value = getattr(sampling, name)
        above = name in _ABOVE_ZERO
        if not _number(value) or not low <= value <= high or (above and value == low):
            raise RequestError(f"{name} is {value!r}: a {_range(low, high, above)} is needed")
    for name, (least, most) in _COUNTS.items():
        value = getattr(sampling, name)
        if not _whole(value) or not least <= value <= most:
            raise RequestError(f"{name} is {value!r}: a whole {_range(least, most)} is needed")
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, {sampling.max_tokens}"
        )
    _check_stops(sampling.stop)
    if not isinstance(sampling.logit_bias, Mapping):
        raise RequestError(f"logit_bias is {sampling.logit_bias!r}: a map of token ids is needed")
    for token, bias in sampling.logit_bias.items():
        if not _number(bias) or not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias of token {token!r} is {bias!r}: a number from -100 to 100 is needed"
            )


def check_request(
    request: Request, facts: ModelFacts, limits: Limits, tables: BlockTables, *, text: bool
) -> None:
    """text: a tokenizer is at hand. Errors: RequestError; then nothing of the request was kept."""
    if not isinstance(request.id, str) or not isinstance(request.salt, str):
        raise RequestError(f"id {request.id!r} and salt {request.salt!r}: strings are needed")
    if (request.sampling is None) == (request.score_from is None):
        raise RequestError("a request has either sampling or score_from")
    _check_tokens("the prompt", request.prompt, facts.vocabulary)
    if request.sampling is not None:
        if request.continuations:
            raise RequestError("continuations are for scores: a request with sampling has none")
        _check_generation(request.sampling, facts, limits, text=text)
        longest = len(request.prompt) + request.sampling.max_tokens
        if longest > facts.context:
            plural = "s" if len(request.prompt) > 1 else ""
            raise RequestError(
                f"{len(request.prompt)} token{plural} of prompt and max_tokens "
                f"{request.sampling.max_tokens} are {longest}: the model reads {facts.context}"
            )
    else:
        longest = _check_score(request, facts)
    _check_room(longest - 1, tables)


def _check_generation(sampling: Sampling, facts: ModelFacts, limits: Limits, *, text: bool) -> None:
    check(sampling)
    if sampling.n > limits.sequences:
        raise RequestError(
            f"n is {sampling.n}: the engine runs at most {limits.sequences} sequences"
        )
    if sampling.stop and not text:
        raise RequestError("stop strings need a tokenizer, and the engine was given none")
    _check_ids("stop_tokens", sampling.stop_tokens, facts.vocabulary)
    _check_ids("logit_bias", sampling.logit_bias, facts.vocabulary)


def _check_score(request: Request, facts: ModelFacts) -> int:
    """Tokens of the longest text."""
    if not isinstance(request.continuations, tuple | list):
        raise RequestError(f"continuations are {request.continuations!r}: a tuple is needed")
    for index, continuation in enumerate(request.continuations):
        _check_tokens(f"continuation {index}", continuation, facts.vocabulary)
    last = len(request.prompt) - (not request.continuations)
    begin = request.score_from
    if not isinstance(begin, int) or isinstance(begin, bool) or not 1 <= begin <= last:
        raise RequestError(
            f"score_from is {begin!r}: a whole number from 1 to {last} is needed, as "
            "the first token has nothing before it and one token at least is scored"
        )
    longest = len(request.prompt) + max(map(len, request.continuations), default=0)
    if longest - 1 > facts.context:
        raise RequestError(
            f"a text of {longest} tokens cannot be scored: the model reads {facts.context}, and "
            "the last token is not read"
        )
    return longest


def _check_room(positions: int, tables: BlockTables) -> None:
    for group, pool in enumerate(tables.pools):
        needed = tables.bound(group, positions)
        if needed > pool.count - 1:
            raise RequestError(
                f"{positions} positions need {needed} blocks of {tables.block_size}: the cache has "
                f"{pool.count - 1}"
            )


def _check_stops(stops: tuple[str, ...]) -> None:
    if not isinstance(stops, tuple | list) or len(stops) > MOST_STOPS:
        raise RequestError(f"stop is {stops!r:.80}: a tuple of at most {MOST_STOPS} is needed")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= LONGEST_STOP:
            raise RequestError(
                f"stop string {stop!r:.80}: 1 to {LONGEST_STOP} characters are needed"
            )
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise RequestError(f"stop string {stop!r:.80} is not UTF-8, so no text has it")


def _check_tokens(place: str, tokens: tuple[int, ...], vocabulary: int) -> None:
    if not isinstance(tokens, tuple | list) or not tokens:
        raise RequestError(f"{place} is {tokens!r:.80}: a tuple of token ids is needed, not empty")
    _check_ids(place, tokens, vocabulary)


def _check_ids(place: str, tokens: Iterable[int], vocabulary: int) -> None:
    if not isinstance(tokens, tuple | list | Mapping):
        raise RequestError(f"{place} is {tokens!r:.80}: a tuple of token ids is needed")
    for token in tokens:
        if not _whole(token) or not 0 <= token < vocabulary:
            raise RequestError(
                f"{place} has token {token!r}: an id from 0 to {vocabulary - 1} is needed"
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return whole or (isinstance(value, float) and math.isfinite(value))


def _range(low: float, high: float, above: bool = False) -> str:
    start = f"number above {low}" if above else f"number from {low} on"
    return start if high == math.inf else f"number {'above' if above else 'from'} {low} to {high}"
