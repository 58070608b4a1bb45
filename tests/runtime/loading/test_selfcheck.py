"""The check of bits when a model opens, with decoders whose rows look at each other."""

from dataclasses import fields, replace
from itertools import count

import pytest
import torch
from torch import Tensor

from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.batch import FlatBatch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.interfaces import DecoderLike
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading.selfcheck import check_bits
from compress.runtime.loading.tiled import Tiled
from compress.runtime.sequences.request import Request, Sampling
from helpers import tiny_models
from helpers.engine.flat_runs import Runs, load

CALLS = count()


class RowsMatter(Decoder):
    """As with a library that has another kernel for other numbers of rows."""

    def forward(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        return super().forward(batch, cache) * (1 + 1e-6 * len(batch.ids))


class OddRowsMatter(Decoder):
    """As with a library that has other code for the rows behind the last 16."""

    def forward(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        return super().forward(batch, cache) * (1 + 1e-6 * (len(batch.ids) % 16))


class HeadMatters(Decoder):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * (1 + 1e-6 * len(hidden))


class NothingHelps(Decoder):
    """As with sums in an order that chance decides."""

    def forward(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        return super().forward(batch, cache) * (1 + 1e-6 * (next(CALLS) % 7))


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    return load(tiny_models.make(request.param, folder, dtype="fp32"))


def turned(decoder: Decoder, kind: type[Decoder]) -> Decoder:
    return kind(**{field.name: getattr(decoder, field.name) for field in fields(decoder)})


def test_a_good_decoder_stays_as_it_is(decoder: Decoder) -> None:
    checked = check_bits(decoder, 512)
    assert checked.decoder is decoder
    assert checked.notice is None
    assert checked.rows[:2] == (decoder.multiple, 64)


def test_rows_that_matter_but_for_16_are_filled_up(decoder: Decoder) -> None:
    odd = replace(turned(decoder, OddRowsMatter), multiple=1)
    checked = check_bits(odd, 512)
    assert isinstance(checked.decoder, OddRowsMatter)
    assert checked.decoder.multiple == 16
    assert checked.notice == (
        f"steps of {' and '.join(map(str, checked.rows))} rows gave a token different bits here, so"
        " steps are filled up to multiples of 16 rows: slower, but repeatable"
    )
    assert check_bits(replace(odd, multiple=16), 512).notice is None


@pytest.mark.parametrize("kind", [RowsMatter, HeadMatters])
def test_rows_that_matter_lead_to_tiles(decoder: Decoder, kind: type[Decoder]) -> None:
    checked = check_bits(turned(decoder, kind), 512)
    assert isinstance(checked.decoder, Tiled)
    assert checked.notice is not None
    assert "in tiles of 16 rows: slower, but repeatable" in checked.notice


def test_bits_that_nothing_helps_are_said(decoder: Decoder) -> None:
    wild = turned(decoder, NothingHelps)
    checked = check_bits(wild, 64)
    assert checked.decoder is wild
    assert checked.notice is not None
    assert "outputs can depend on what else is served" in checked.notice


def test_tiles_compute_what_the_decoder_computes(decoder: Decoder) -> None:
    """The same bits here, where the decoder's own are good; in an engine with everything."""
    prompts = [tuple(range(3, 3 + n)) for n in (1, 16, 17, 40)]
    requests = [
        Request(str(i), prompt, Sampling(max_tokens=6, n=1 + i % 2, temperature=0.7))
        for i, prompt in enumerate(prompts)
    ]
    found = [
        [result.tokens for result in engine_of(decoder, each).generate(requests)]
        for each in (decoder, Tiled(decoder))
    ]
    assert found[0] == found[1]


def engine_of(decoder: Decoder, each: DecoderLike[KVCache]) -> Engine:
    groups = [40] * len(decoder.how.windows)
    cache = KVCache(decoder.how, groups, 8, dtype=torch.float32, device=decoder.device)
    return Engine(LocalRunner(each, cache), ModelFacts(128, decoder.spec.vocab))


def test_rows_that_matter_do_not_in_tiles(decoder: Decoder) -> None:
    wobbly = Tiled(turned(decoder, RowsMatter))
    ids, runs = list(range(5, 45)), Runs(replace(decoder, multiple=16), texts=2, most=64)

    def logits(*chunks: tuple[int, list[int], int, int]) -> list[Tensor]:
        batch = runs.batch(chunks)
        parts = wobbly.logits(wobbly.forward(batch, runs.cache))[: batch.count]
        return list(torch.split(parts, [len(tokens) for _, tokens, _, _ in chunks]))

    (whole,) = logits((0, ids, 0, 40))
    (first,) = logits((0, ids[:7], 0, 40))
    _, rest = logits((1, ids, 0, 40), (0, ids[7:], 7, 40))
    assert torch.equal(torch.cat((first, rest)), whole)
