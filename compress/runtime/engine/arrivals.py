"""The sequences of a request as it comes in."""

from array import array
from time import monotonic

from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.sequences.prefix import root_key
from compress.runtime.sequences.request import Request
from compress.runtime.sequences.sequence import Sequence, Status, Times
from compress.runtime.sequences.stops import Decode, Writer


def sequences_of(
    request: Request, arrival: int, facts: ModelFacts, groups: int, decode: Decode | None
) -> list[Sequence]:
    """One for each output or continuation; the first leads and the others are parked behind it."""
    count = request.sampling.n if request.sampling is not None else 1
    tails: tuple[tuple[int, ...], ...] = request.continuations or ((),) * count
    now, stop_ids = monotonic(), _stop_ids(request, facts)
    sequences = [
        Sequence(
            request=request,
            index=index,
            order=(arrival, index),
            tokens=array("i", [*request.prompt, *tail]),
            root=_root(request, len(tail), facts),
            stop_ids=stop_ids,
            writer=_writer(request, decode),
            times=Times(now),
            groups=groups,
            status=Status.PARKED,
        )
        for index, tail in enumerate(tails)
    ]
    sequences[0].followers = sequences[1:]
    return sequences


def _stop_ids(request: Request, facts: ModelFacts) -> frozenset[int]:
    sampling = request.sampling
    if sampling is None:
        return frozenset()
    return frozenset(sampling.stop_tokens) | frozenset(() if sampling.ignore_eos else facts.eos)


def _root(request: Request, tail: int, facts: ModelFacts) -> bytes:
    variant = facts.variant(len(request.prompt) + tail)
    return root_key(facts.fingerprint, str(variant), request.salt)


def _writer(request: Request, decode: Decode | None) -> Writer | None:
    if request.sampling is None or decode is None:
        return None
    return Writer(decode, list(request.prompt), request.sampling.stop)
