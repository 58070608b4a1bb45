"""Many questions put to an engine at once, so that what they share is computed once."""

from collections.abc import Callable, Sequence

from compress.errors import RequestError
from compress.runtime.loading.model import Model
from compress.runtime.sequences.request import Request, RequestResult
from compress.text.prompt import Ids


def score_pairs(
    model: Model, pairs: Sequence[tuple[Ids, Ids]], tell: Callable[[int, float, bool], None]
) -> None:
    """Log-likelihoods (nats) of continuations behind contexts, and whether each is greedy.

    tell: called with the place of a pair as soon as its score is known, in no order. Continuations
    of one context are one request, and equal pairs are computed once. Errors: RequestError for what
    the engine cannot serve.
    """
    contexts: dict[Ids, dict[Ids, list[int]]] = {}
    for place, (context, continuation) in enumerate(pairs):
        contexts.setdefault(context, {}).setdefault(continuation, []).append(place)
    places = {f"pairs {i}": list(group.values()) for i, group in enumerate(contexts.values())}
    requests = [
        Request(name, context, score_from=len(context), continuations=tuple(group))
        for name, (context, group) in zip(places, contexts.items(), strict=True)
    ]

    def ended(result: RequestResult) -> None:
        assert result.score is not None
        assert result.greedy is not None
        for place in places[result.id][result.index]:
            tell(place, result.score, result.greedy)

    serve(model, requests, ended)


def serve(
    model: Model, requests: Sequence[Request], ended: Callable[[RequestResult], None]
) -> None:
    """All of them to their end, each result as it comes. An error of one is the error of all, a
    RequestError: no score may be missing. Nobody else uses the engine meanwhile."""
    engine = model.engine
    try:
        for request in requests:
            engine.add(request)
        while not engine.idle:
            for update in engine.step():
                if update.result is None:
                    continue
                if update.result.error is not None:
                    raise RequestError(update.result.error)
                ended(update.result)
    except BaseException:
        for request in requests:
            engine.abort(request.id)
        engine.step()  # hands out what the aborted ones had, to nobody
        raise
