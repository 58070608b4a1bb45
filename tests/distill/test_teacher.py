"""What teachers say: the model's own logits, whether computed or cut to the likeliest."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.blocks.walk import walk
from compress.distill.losses import choose
from compress.distill.rows import TokenRows, all_rows
from compress.distill.teacher import (
    ResidentTeacher,
    Teacher,
    head_of,
    keep_final,
    open_cache,
)
from compress.distill.trained import whole
from distill.conftest import Pair, chain
from helpers import tiny_models

FIRST = slice(0, 1000)


def logits(teacher: Teacher, rows: TokenRows) -> Tensor:
    found = teacher.targets(rows).of(FIRST)
    assert isinstance(found.logits, Tensor)
    return found.logits


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gemma2"])
def test_decoder_is_transformers_own_and_trained_as_a_whole(
    family: str, make_pair: Callable[..., Pair], rows: TokenRows
) -> None:
    """Also with Conv1D, split experts and capped logits; of a tied head and an untied one."""
    from transformers import AutoModelForCausalLM

    pair = make_pair(family, tied=family == "gemma2")
    decoder = pair.teacher()
    plain = AutoModelForCausalLM.from_pretrained(pair.model, dtype=torch.float32)
    few = rows.take(torch.arange(3))
    with torch.no_grad():
        expected = plain(input_ids=few.ids, use_cache=False).logits
    found = logits(ResidentTeacher(decoder), few)
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-4, atol=1e-4)
    trained = whole(decoder.model, decoder.names)
    assert len(trained.parameters) == len(list(decoder.model.parameters()))
    said = decoder.head.run(decoder.hidden(few.ids).flatten(0, 1))
    torch.autograd.backward(said.square().sum())
    assert all(p.grad is not None for p in trained.parameters.values())


def test_rows_are_padded_as_their_mask_says(pair: Pair, rows: TokenRows) -> None:
    """What a real token gets does not depend on what stands in the padding behind it."""
    decoder = pair.teacher()
    mask = torch.arange(12).expand(24, 12) < 8
    other = torch.where(mask, rows.ids, 7)
    first, second = (decoder.hidden(ids, mask)[mask] for ids in (rows.ids, other))
    torch.testing.assert_close(first, second)
    assert TokenRows(rows.ids, mask, rows.index).tokens == 24 * 8


def test_cache_holds_what_was_chosen_and_outlives_its_process(
    pair: Pair, rows: TokenRows, tmp_path: Path
) -> None:
    """Filled in parts; fp16 is all that is lost. vocab: what a shorter student has."""
    decoder, k, vocab = pair.teacher(), 9, 200
    cache = open_cache(tmp_path, (24, 12), k, vocab)
    with torch.no_grad():
        for start in (0, 10):
            part = rows.ids[start : start + 10 if start == 0 else 24]
            cache.fill(start, decoder.hidden(part), decoder.head)
    cache.flush()
    some = rows.take(torch.tensor([23, 4]))
    exact = choose(logits(ResidentTeacher(decoder), some), k, vocab)
    found = open_cache(tmp_path, (24, 12), k, vocab).targets(some).of(FIRST)
    assert torch.equal(found.ids, exact.ids)
    assert found.vocab == vocab
    torch.testing.assert_close(found.rest, exact.rest)
    torch.testing.assert_close(found.log_probs, exact.log_probs.half().float())
    assert vocab < tiny_models.VOCAB


def test_streamed_teacher_says_what_a_whole_one_would(pair: Pair, tmp_path: Path) -> None:
    """Block by block, then kept as the likeliest tokens. Also of padded rows."""
    streamed = chain(pair.model)
    for block in walk(streamed):
        block.run_on()
    ids = torch.cat([batch.ids for batch in streamed.batches])
    mask = torch.cat([batch.mask for batch in streamed.batches if batch.mask is not None])
    rows, head = all_rows(ids, mask), head_of(streamed)
    expected = logits(ResidentTeacher(pair.teacher()), rows)[mask.flatten()]
    final: list[Tensor] = []
    keep_final(streamed, lambda start, states: final.append(states.flatten(0, 1)))
    found = head.run(torch.cat(final))[mask.flatten()]
    torch.testing.assert_close(found, expected)
    cache = open_cache(tmp_path, (len(ids), ids.shape[1]), 5, tiny_models.VOCAB)
    keep_final(streamed, lambda start, states: cache.fill(start, states, head))
    kept = cache.targets(rows).of(FIRST).ids[mask.flatten()]
    assert torch.equal(kept, choose(expected, 5, tiny_models.VOCAB).ids)
