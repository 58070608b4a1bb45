"""What lm-evaluation-harness asks, in the engine's terms: windows to score, prompts to continue.

Nothing of the harness is imported here; compress.serve.harness is what it calls.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from compress.errors import RequestError
from compress.runtime.loading.model import Model
from compress.runtime.sequences.request import Request, Sampling
from compress.serve.questions import serve
from compress.text.prompt import Ids

# Generation settings of the harness (transformers' names) -> fields of Sampling.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "frequency_penalty": "frequency_penalty",
        "presence_penalty": "presence_penalty",
        "min_new_tokens": "min_tokens",
    }
)
# Settings that are known under this value only, which is what the engine does anyway.
_FIXED: Mapping[str, Any] = MappingProxyType({"num_beams": 1, "use_cache": True})
_READ = ("do_sample", "temperature")
# What a generation_config.json can hold that changes the tokens and is in no field of Sampling.
OTHER_SETTINGS = (
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
)


def window(context: Ids, continuation: Ids, length: int, shown: str) -> tuple[Ids, Ids]:
    """The pair with its context cut at the left, so that at most `length` tokens are read.

    The last token of a continuation is not read. shown: text of the continuation, for messages.
    RequestError where one of the two has no token, or nothing is left of the context.
    """
    if not context or not continuation:
        empty = "continuation" if context else "context"
        raise RequestError(
            f"the {empty} of a task's pair has no token of its own, the continuation being"
            f" {shown!r:.60}; both need text"
        )
    if len(continuation) > length:
        raise RequestError(
            f"the continuation {shown!r:.60} has {len(continuation)} tokens: max_length is"
            f" {length}; cut the text, or raise max_length where the model reads more"
        )
    return context[-(length + 1 - len(continuation)) :], continuation


def continue_prompts(
    model: Model, prompts: Sequence[tuple[Ids, Sampling]], tell: Callable[[int, Ids], None]
) -> None:
    """Token ids behind each prompt, the one that ended it included.

    tell: called with the place of a prompt and its ids as soon as it ends, in no order.
    Each time that a prompt stands there again its seed is one higher: a task that repeats a
    question wants other answers, and the same ones in every run.
    """
    seen: Counter[Ids] = Counter()
    requests = []
    for place, (ids, sampling) in enumerate(prompts):
        seed = (sampling.seed + seen[ids]) % 2**64
        requests.append(Request(f"prompt {place}", ids, replace(sampling, seed=seed)))
        seen[ids] += 1
    places = {request.id: place for place, request in enumerate(requests)}
    serve(model, requests, lambda result: tell(places[result.id], result.tokens))


def sampling_of(
    settings: Mapping[str, Any], stop: Sequence[str], max_tokens: int, seed: int
) -> Sampling:
    """How a task wants its text generated; RequestError for settings that have no meaning here.

    settings: `do_sample` and `temperature` as the harness normalises them, and those of FIELDS;
    None stands for not given. Without `do_sample` the most likely token is taken.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        fixed = name in _FIXED and value == _FIXED[name]
        if name not in FIELDS and name not in _READ and not fixed:
            known = ", ".join([*_READ, *FIELDS])
            raise RequestError(
                f"the generation setting {name}={value!r} is not one of this engine; it has {known}"
            )
    temperature = given.get("temperature", 0.0) if given.get("do_sample") else 0.0
    if given.get("do_sample") and temperature == 0:
        raise RequestError("do_sample=True needs a temperature above 0; give both or none")
    fields = {FIELDS[name]: value for name, value in given.items() if name in FIELDS}
    return Sampling(
        temperature=temperature,
        max_tokens=max_tokens,
        stop=tuple(text for text in stop if text),
        seed=seed,
        **fields,
    )
