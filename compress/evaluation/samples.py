"""Greedy continuations of prompts by the source and by the result, for people to read.

Generation keeps a whole model in memory, one at a time. A model that does not fit gives no samples
but a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.blocks.author import Author
from compress.blocks.sample import OwnText
from compress.errors import DataError
from compress.evaluation.stream import make_skeleton
from compress.evaluation.workspace import Workspace
from compress.formats.weights import Weights
from compress.recipe.evaluation_config import SampleConfig
from compress.text.tokenizer import Tokenizer

NO_PROMPTS = "no prompts were given"


@dataclass(frozen=True, slots=True)
class SamplePair:
    """How both continue a prompt (which is not repeated); source is None when there is none."""

    prompt: str
    source: str | None
    result: str


def sample_pairs(
    result: Weights,
    source: Weights | None,
    tokenizer: Tokenizer | None,
    config: SampleConfig,
    work: Workspace,
) -> tuple[tuple[SamplePair, ...], str | None]:
    """A pair for every prompt, and the reason why some or all are missing (None: none is).

    Greedy, in fp32, up to `config.tokens` tokens, the context's end or an end-of-text token.
    """
    if not config.prompts:
        return (), NO_PROMPTS
    assert tokenizer is not None, "prompts are text"
    context = result.spec.context
    prompts, reason = _encode(config.prompts, tokenizer, context)
    try:
        # Of the source they are kept: each of its results is shown beside them.
        after = _continuations(result, prompts, tokenizer, config.tokens, work)
        before = (
            {}
            if source is None
            else _continuations(source, prompts, tokenizer, config.tokens, work)
        )
    except DataError as error:
        # Its remedy, behind the semicolon, is meant for texts.
        return (), str(error).split(";")[0]
    pairs = [SamplePair(prompt, before.get(prompt), after[prompt]) for prompt in prompts]
    return tuple(pairs), reason


def _encode(
    texts: Sequence[str], tokenizer: Tokenizer, context: int
) -> tuple[dict[str, list[int]], str | None]:
    """Ids of every prompt that can be continued, BOS in front, and why others cannot."""
    prompts: dict[str, list[int]] = {}
    reason = None
    for text in texts:
        ids = tokenizer.encode(text)
        if tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id, *ids]
        if not ids:
            reason = "an empty prompt cannot be continued: the tokenizer has no BOS"
        elif context and len(ids) >= context:
            reason = f"prompt {text[:40]!r} has {len(ids)} tokens, the model's context is {context}"
        else:
            prompts[text] = ids
    return prompts, reason


def _continuations(
    weights: Weights,
    prompts: dict[str, list[int]],
    tokenizer: Tokenizer,
    tokens: int,
    work: Workspace,
) -> dict[str, str]:
    """Prompt -> its greedy continuation. Prompts of the same length are one batch."""
    skeleton = make_skeleton(weights, torch.float32, work)
    author = Author(weights, lambda: skeleton, work.kept)
    context = weights.spec.context
    found: dict[str, str] = {}
    for length in sorted({len(ids) for ids in prompts.values()}):
        batch = {text: ids for text, ids in prompts.items() if len(ids) == length}
        stop = min(length + tokens, context) if context else length + tokens
        prompt_ids = torch.tensor(list(batch.values()))
        greedy = OwnText(len(batch), stop, seed=0, temperature=0.0, prompt_ids=prompt_ids)
        rows = author.write(greedy, None, work.progress)
        for text, row in zip(batch, rows.tolist(), strict=True):
            found[text] = _continuation(row, length, tokenizer)
    return found


def _continuation(ids: list[int], length: int, tokenizer: Tokenizer) -> str:
    """Text behind the first `length` ids, up to an end-of-text token."""
    new = ids[length:]
    if tokenizer.eos_id in new:
        new = new[: new.index(tokenizer.eos_id)]
    before = tokenizer.decode(ids[:length], skip_special=True)
    whole = tokenizer.decode(ids[:length] + new, skip_special=True)
    # Decoding the new ids alone would lose the blank that a sentencepiece token starts with.
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(new, skip_special=True)
