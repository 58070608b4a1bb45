"""A token set holds exactly what was asked for, counted, the same for the same seed."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import DataError
from compress.text.tokenizer import load_tokenizer
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.dataset import build, shares

VOCAB = 4096


@pytest.fixture(scope="session")
def tokenizer(demo_model):
    return load_tokenizer(demo_model)


@pytest.fixture(scope="session")
def stories(tmp_path_factory):
    """A file of 200 short documents; each begins with its number."""
    path = tmp_path_factory.mktemp("stories") / "stories.txt"
    path.write_text("<|endoftext|>".join(f"{i} was a cat. " * (1 + i % 7) for i in range(200)))
    return str(path)


def sampler(count, length):
    """Rows no text gives: all 9."""
    return torch.full((count, length), 9)


def make(tokenizer, *sources, generate=sampler, vocab=VOCAB, **fields):
    config = CalibrationConfig(sources=sources, **{"samples": 8, "length": 32, **fields})
    return build(config, tokenizer, generate=generate, vocab=vocab)


def text(path, weight=1.0):
    return SourceConfig("text", path=path, weight=weight)


def test_packed_rows_are_full_and_made_of_whole_documents(tokenizer, stories):
    tokens = make(tokenizer, text(stories))
    assert tokens.ids.shape == (8, 32)
    assert tokens.ids.dtype == torch.int64
    assert tokens.mask is None
    joined = tokenizer.decode(tokens.ids.flatten().tolist())
    assert joined.startswith("<|endoftext|>")
    documents = joined.split("<|endoftext|>")[1:]
    known = {f"{i} was a cat. " * (1 + i % 7) for i in range(200)}
    assert {f"{one} " for one in documents[:-1]} <= known
    assert tokens.summary.sources[0].documents == len(documents)
    assert tokens.summary.tokens == 8 * 32


def test_padded_rows_are_masked_on_the_right(tokenizer, stories):
    tokens = make(tokenizer, text(stories), packing="pad", length=20)
    assert tokens.mask is not None
    lengths = tokens.mask.sum(dim=1)
    assert torch.equal(tokens.mask, torch.arange(20) < lengths[:, None])
    assert 1 <= int(lengths.min()) < 20
    assert int(lengths.max()) == 20
    (used,) = tokens.summary.sources
    assert used.tokens == tokens.summary.tokens == int(lengths.sum())
    assert (used.rows, used.documents) == (8, 8)
    assert used.cut_tokens > 0
    assert bool((tokens.ids[:, 0] == tokenizer.bos_id).all())


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_the_seed_decides(tokenizer, stories, packing):
    one, same, other = (
        make(tokenizer, text(stories), packing=packing, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(one.ids, same.ids)
    assert one.summary == same.summary
    assert not torch.equal(one.ids, other.ids)
    assert one.summary.sha256 != other.summary.sha256


def test_the_hash_covers_ids_and_mask(tokenizer, stories):
    import hashlib

    tokens = make(tokenizer, text(stories), packing="pad")
    assert tokens.mask is not None
    raw = tokens.ids.numpy().tobytes() + tokens.mask.numpy().tobytes()
    assert tokens.summary.sha256 == hashlib.sha256(raw).hexdigest()


def test_the_summary_is_json(tokenizer, stories):
    summary = make(tokenizer, text(stories), SourceConfig("self")).summary
    held = json.loads(json.dumps(summary.to_json()))
    assert held["samples"] == 8
    assert [source["kind"] for source in held["sources"]] == ["text", "self"]
    assert [source["rows"] for source in held["sources"]] == [4, 4]


def test_self_alone_needs_no_tokenizer():
    tokens = make(None, SourceConfig("self"))
    assert bool((tokens.ids == 9).all())
    assert tokens.summary.sources[0].tokens == 256


def test_self_asks_the_sampler_once(tokenizer, stories):
    calls = []

    def generate(count, length):
        calls.append((count, length))
        return sampler(count, length)

    make(tokenizer, SourceConfig("self"), samples=5, generate=generate)
    assert calls == [(5, 32)]


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    packing=st.sampled_from(["pack", "pad"]),
    samples=st.integers(40, 60),
)
def test_a_mixture_keeps_to_its_shares(tokenizer, stories, weights, packing, samples):
    sources = [SourceConfig("self", weight=weights[0])]
    sources += [text(stories, weight) for weight in weights[1:]]
    tokens = make(tokenizer, *sources, packing=packing, samples=samples, length=16)
    summary = tokens.summary
    assert sum(used.rows for used in summary.sources) == samples
    for used, share in zip(summary.sources, shares(sources), strict=True):
        # Webster's rule is never more than a row per source away from the exact share.
        assert abs(used.tokens - share * summary.tokens) <= 16 * len(sources)
    assert int((tokens.ids == 9).all(dim=1).sum()) == summary.sources[0].rows


class TestRefusals:
    def test_too_little_text(self, tokenizer, stories):
        message = (
            r"stories\.txt holds \d+ rows of 32 tokens, 900 rows are asked for;"
            " lower samples or length, or add text"
        )
        with pytest.raises(DataError, match=message):
            make(tokenizer, text(stories), samples=900)

    def test_too_few_documents(self, tokenizer, stories):
        message = r"stories\.txt holds 200 documents, 201 rows are asked for"
        assert make(tokenizer, text(stories), samples=200, packing="pad").summary.tokens > 0
        with pytest.raises(DataError, match=message):
            make(tokenizer, text(stories), samples=201, packing="pad")

    def test_too_little_in_a_mixture(self, tokenizer, stories):
        with pytest.raises(DataError, match="50% of 900 rows is its share"):
            make(tokenizer, text(stories), SourceConfig("self"), samples=900)

    def test_an_empty_file(self, tokenizer, tmp_path):
        (tmp_path / "a.txt").write_text(" \n")
        with pytest.raises(DataError, match=r"a\.txt holds 0 rows of 32 tokens"):
            make(tokenizer, text(str(tmp_path / "a.txt")))

    def test_a_share_too_small_for_a_row(self, tokenizer, stories):
        message = "self gets none of 8 rows at weight 0.01; raise samples or its weight"
        with pytest.raises(DataError, match=message):
            make(tokenizer, text(stories), SourceConfig("self", weight=0.01))

    def test_a_tokenizer_of_another_model(self, tokenizer, stories):
        message = r"gives id \d+, the model has 100 embeddings; they do not belong together"
        with pytest.raises(DataError, match=message):
            make(tokenizer, text(stories), vocab=100)

    def test_text_without_a_tokenizer(self, stories):
        with pytest.raises(DataError, match=r"stories\.txt is text, and the checkpoint has no"):
            make(None, text(stories))


def test_real_text_is_quick_and_counted(tokenizer, shared_dir):
    path = str(shared_dir / "text/tinystories/tinystories_train.txt")
    tokens = make(tokenizer, text(path), samples=64, length=256)
    assert tokens.summary.tokens == 64 * 256
    starts = int((tokens.ids == tokenizer.bos_id).sum())
    assert tokens.summary.sources[0].documents == starts
