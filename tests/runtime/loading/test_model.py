"""An engine opened from a checkpoint, with text in and out."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.api import verbs as api_verbs
from compress.checkpoint import Checkpoint
from compress.errors import CompressError, RequestError
from compress.formats import open_weights
from compress.quant.scheme import QuantScheme
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.one_call import OneCallDecoder, why_no_calls
from compress.runtime.engine.batch import FlatBatch, TextChunk
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading import open_engine as engine_opening
from compress.runtime.loading import room
from compress.runtime.loading.model import Model
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sampling.sampling import Best
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from compress.serve.open_model import KV_DTYPES, CacheOptions
from compress.text.tokenizer import load_tokenizer
from compress.verbs import open_model
from compress_kernels.ops.pairs import compiled_pairs
from helpers import compressed_models, tiny_models

OP_BY_OP = "steps run op by op, not in one call"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("model"), dtype="fp32")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder, limits=Limits(tokens_per_step=64, sequences=4))


def test_the_front_is_where_the_documents_say() -> None:
    assert compress.open_model is api_verbs.open_model
    assert compress.Sampling is Sampling
    assert {"open_model", "Sampling"} <= set(dir(compress))


def test_generate_and_stream_agree(model: Model) -> None:
    assert model.notices == ()
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=5, n=2)
    results = model.generate(["once upon", "the old cat"], sampling)
    assert [(r.index, r.error) for r in results] == [(0, None), (1, None)] * 2
    for prompt, own in (("once upon", results[:2]), ("the old cat", results[2:])):
        texts = {0: "", 1: ""}
        for update in model.stream(prompt, sampling):
            texts[update.index] += update.text
        assert [texts[0], texts[1]] == [result.text for result in own]
    assert model.engine.idle


def test_prompts_begin_with_the_beginning_once(model: Model) -> None:
    assert model.tokenizer.bos_id == 0
    ids = model.encode("once")
    assert ids == (0, *model.tokenizer.encode("once"))
    assert model.encode("<|endoftext|>once") == ids
    assert model.encode("") == (0,)


NO_PROMPTS: dict[str, Callable[[Model], object]] = {
    "a prompt is 5; give a text, or a tuple of token ids": lambda m: m.generate([5]),  # type: ignore[list-item]
    "a prompt is b'old'; give a text, or a tuple of token ids": lambda m: m.generate([b"old"]),
    "sampling is {'n': 2}; give a compress.Sampling": lambda m: m.generate(["a"], {"n": 2}),  # type: ignore[arg-type]
    "continuations is 'cat'; give a list of texts": lambda m: m.score("the", "cat"),
    "continuations is []; give a list of texts": lambda m: m.score("the", []),
    "7 is to be scored; it must be a text": lambda m: m.score("the", ["cat", 7]),  # type: ignore[list-item]
    "None is to be scored; it must be a text": lambda m: m.score(None, ["cat"]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("says", NO_PROMPTS)
def test_what_is_no_prompt(model: Model, says: str) -> None:
    """Bytes would be taken for ids, and the letters of a continuation for continuations."""
    with pytest.raises(RequestError) as caught:
        NO_PROMPTS[says](model)
    assert str(caught.value) == says
    assert model.engine.idle


def test_greedy_tokens_are_those_of_all_logits(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing but the highest logit is asked of a step, it is found where logits are made."""
    runner, asked = model.engine.runner, count()
    assert isinstance(runner, LocalRunner)

    def best(chunks: Sequence[TextChunk]) -> Best | None:
        assert runner.best is not None
        next(asked)
        return runner.best(chunks)

    monkeypatch.setattr(model.engine, "runner", replace(runner, best=best))
    prompts = ["once upon", "the old cat", "a"]
    found = model.generate(prompts, Sampling(max_tokens=12, n=2))
    assert next(asked) > 10
    for other in (Sampling(max_tokens=12, logprobs=1), Sampling(max_tokens=12, min_tokens=1)):
        before = next(asked)
        wanted = model.generate(prompts, other)
        assert next(asked) == before + 1
        assert [r.tokens for r in found[::2]] == [r.tokens for r in wanted]


@pytest.mark.parametrize("call", [0, 1, 4])
def test_ctrl_c_leaves_an_engine_that_works(
    model: Model, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Wherever it comes: nothing of the request stays, and the next one gets what it would get."""
    sampling, calls = Sampling(max_tokens=8, n=2, temperature=1.0), count()
    expected = [result.tokens for result in model.generate(["once"], sampling)]
    forward = OneCallDecoder.forward

    def interrupting(*arguments: object) -> object:
        if next(calls) == call:
            raise KeyboardInterrupt
        return forward(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(OneCallDecoder, "forward", interrupting)
        with pytest.raises(KeyboardInterrupt):
            list(model.stream("once", sampling))
    assert model.engine.idle
    assert model.engine.usage == 0
    assert [result.tokens for result in model.generate(["once"], sampling)] == expected


def test_a_stream_that_is_closed_ends(model: Model) -> None:
    stream = model.stream("once", Sampling(max_tokens=30))
    next(stream)
    assert not model.engine.idle
    stream.close()
    assert model.engine.idle
    assert model.engine.usage == 0


def test_stop_strings_cut_the_text(model: Model) -> None:
    (free,) = model.generate(["once"], Sampling(max_tokens=30, ignore_eos=True))
    assert free.text is not None
    stop = free.text[4:7]
    (cut,) = model.generate(["once"], Sampling(max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert (cut.text, cut.finish_reason) == (free.text[: free.text.index(stop)], "stop")


def test_scores_are_sums_of_logprobs(model: Model) -> None:
    results = model.score("once upon ", ["a time", "the dog"])
    for result, tail in zip(results, ("a time", "the dog"), strict=True):
        begin, whole = model.encode("once upon"), model.encode(f"once upon {tail}")
        assert result.tokens == whole[len(begin) :]
        assert result.score == sum(report.logprob for report in result.logprobs)
    with pytest.raises(RequestError, match="continuation '' adds no token"):
        model.score("once", [""])


def test_refusals_name_the_value(model: Model) -> None:
    with pytest.raises(RequestError, match="prompts is the text 'once'; give a list"):
        model.generate("once")
    (result,) = model.generate(["once"], Sampling(max_tokens=1000))
    assert result.error is not None
    assert "max_tokens 1000" in result.error
    with pytest.raises(RequestError, match=r"top_p is 2: a number above 0 to 1 is needed"):
        list(model.stream("once", Sampling(top_p=2)))


def test_a_tokenizer_without_a_beginning_needs_a_prompt(model: Model) -> None:
    class Bare:
        bos_id = None
        encode = model.tokenizer.encode
        decode = model.tokenizer.decode

    bare = Model(model.engine, Bare())
    assert bare.encode("once") == model.encode("once")[1:]
    with pytest.raises(RequestError, match="the prompt is empty"):
        bare.encode("")


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_compressed_checkpoints_open_alike(folder: Path, tmp_path: Path, scheme: str) -> None:
    from compress.quant.scheme import PRESETS

    how = QuantScheme(bits=4, group_size=32) if scheme == "int4" else PRESETS["FP8_DYNAMIC"]
    compressed_models.write(folder, tmp_path / "out", how)
    tokenizer = load_tokenizer(folder)
    engine, notices = open_engine(open_weights(Checkpoint.open(tmp_path / "out")), Opening())
    found = Model(engine, tokenizer, notices).score("once upon", [" a time"])
    (dense,) = open_model(folder).score("once upon", [" a time"])
    assert found[0].score != dense.score
    assert found[0].score == pytest.approx(dense.score, rel=0.2)
    assert notices == ()


def test_ends_are_those_of_all_files(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 9999]}))
    assert open_model(other).engine.facts.eos == (0, 7, 9)


def test_memory_is_looked_at_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: 1000)
    line = r"needs 0\.0 GiB of memory as torch\.float32, 0\.0 GiB are free; take dtype bf16"
    with pytest.raises(RequestError, match=line):
        open_model(folder)


def test_codes_count_as_they_are_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a byte for a code of 4 bits and four for its scale; the head stays as it is, and the
    embedding is there twice while it is read."""
    compressed_models.write(folder, tmp_path / "out", QuantScheme(group_size=32))
    spec = open_weights(Checkpoint.open(folder)).spec
    codes = sum(prod(linear.shape) for linear in spec.linears())
    head = spec.head_linear()
    dense = 2 * prod(spec.embedding_shape) + (0 if head is None else prod(head.shape))
    needed = codes // 2 + 4 * codes // 32 + 4 * dense
    monkeypatch.setattr(room, "available_bytes", lambda: needed - 1)
    with pytest.raises(RequestError, match="of memory as"):
        open_model(tmp_path / "out")
    monkeypatch.setattr(room, "available_bytes", lambda: needed)
    assert open_model(tmp_path / "out").encode("once")


def test_the_cache_fits_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all contexts where there is memory; less is said."""
    assert open_model(folder, limits=Limits(sequences=3)).engine.layout.groups[0].blocks == 25
    token = 2 * 2 * 2 * 16 * 4
    monkeypatch.setattr(room, "available_bytes", lambda: 2**20)
    monkeypatch.setattr(engine_opening, "CACHE_SHARE", 100 * token / 2**20)
    model = open_model(folder)
    assert model.engine.layout.groups[0].blocks == 1 + 7
    assert model.notices == ("the cache has room for 100 tokens; the model reads 128",)
    with pytest.raises(RequestError, match="120 positions need 8 blocks of 16: the cache has 7"):
        list(model.stream("once", Sampling(max_tokens=121 - len(model.encode("once")))))


REFUSED_OPENINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no cache": (
        {"cache": CacheOptions(tokens=0)},
        "cache_tokens is 0: a whole number from 1 on is needed",
    ),
    "half": (
        {"cache": CacheOptions(tokens=1.5)},
        "cache_tokens is 1.5: a whole number from 1 on is needed",
    ),
    "blocks": (
        {"cache": CacheOptions(block_size=0)},
        "block_size is 0: a whole number from 1 on is needed",
    ),
    "limits": ({"limits": 5}, "limits is 5: compress.runtime.sequences.limits.Limits is needed"),
    "step": (
        {"limits": Limits(sequences=0)},
        "sequences is 0: a whole number from 1 on is needed",
    ),
}


@pytest.mark.parametrize("case", REFUSED_OPENINGS)
def test_what_no_engine_opens_with(folder: Path, case: str) -> None:
    given, says = REFUSED_OPENINGS[case]
    with pytest.raises(RequestError) as caught:
        open_model(folder, **given)
    assert str(caught.value) == says


def test_a_cache_that_no_memory_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of two heads of 16 in fp32: 512 bytes a token, and a null block of 16 tokens."""
    monkeypatch.setattr(room, "available_bytes", lambda: 2**30)
    with pytest.raises(RequestError) as caught:
        open_model(folder, cache=CacheOptions(tokens=2**21 - 15))
    assert str(caught.value) == (
        "keys and values of 2097137 tokens take 1.0 GiB of memory, 1.0 GiB are free;"
        " take fewer cache_tokens"
    )
    blocks = (
        open_model(folder, cache=CacheOptions(tokens=2**21 - 16)).engine.layout.groups[0].blocks
    )
    assert blocks == 2**17


def by_hand(folder: Path, stored: torch.dtype) -> Engine:
    decoder = Decoder.load(open_weights(Checkpoint.open(folder)))
    cache = KVCache(decoder.how, [30], 16, dtype=stored, device=decoder.device)
    return Engine(LocalRunner(decoder, cache), ModelFacts(128, decoder.spec.vocab, (0,)))


@pytest.mark.parametrize(("name", "stored"), KV_DTYPES.items(), ids=KV_DTYPES)
def test_keys_and_values_are_stored_as_asked(folder: Path, name: Any, stored: torch.dtype) -> None:
    """Tokens and scores are those of an engine with such a cache, and fp32's are others."""
    model = open_model(folder, cache=CacheOptions(kv_dtype=name))
    assert model.notices == ()
    assert isinstance(model.engine.runner, LocalRunner)
    assert {keys.dtype for keys, _ in model.engine.runner.cache.states} == {stored}
    requests = [
        Request("a", tuple(range(3, 40)), Sampling(max_tokens=12, temperature=1.0, seed=3)),
        Request("b", tuple(range(60, 3, -1)), score_from=1),
    ]
    found, want = model.engine.generate(requests), by_hand(folder, stored).generate(requests)
    assert [(r.tokens, r.score) for r in found] == [(r.tokens, r.score) for r in want]
    (exact,) = by_hand(folder, torch.float32).generate(requests[1:])
    assert (found[1].score == exact.score) == (stored == torch.float32)
    assert found[1].score == pytest.approx(exact.score, rel=1e-3)


def test_smaller_keys_and_values_leave_room_for_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 16 takes 18 bytes in int8 where fp32 takes 64."""
    monkeypatch.setattr(room, "available_bytes", lambda: 2**20)
    monkeypatch.setattr(engine_opening, "CACHE_SHARE", 2 * 2 * 2 * 16 * 4 * 32 / 2**20)
    blocks = [
        open_model(folder, cache=CacheOptions(kv_dtype=name), limits=Limits(sequences=1))
        .engine.layout.groups[0]
        .blocks
        for name in (None, "bf16", "int8")
    ]
    assert blocks == [1 + 2, 1 + 4, 1 + 8]
    assert open_model(
        folder, cache=CacheOptions(kv_dtype="int8"), limits=Limits(sequences=1)
    ).notices == ("the cache has room for 113 tokens; the model reads 128",)


def test_bits_are_tried_with_keys_and_values_as_they_are_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    forward = Decoder.forward

    def noted(decoder: Decoder, batch: FlatBatch, cache: KVCache) -> torch.Tensor:
        seen.append(cache.states[0][0].dtype)
        return forward(decoder, batch, cache)

    monkeypatch.setattr(Decoder, "forward", noted)
    open_model(folder, cache=CacheOptions(kv_dtype="int8"))
    assert set(seen) == {torch.int8}


def test_codes_are_decoded_once_where_memory_is_plenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else for every product, and steps are no longer one call."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="bf16")
    compressed_models.write(source, tmp_path / "out", QuantScheme(bits=4, group_size=4))
    monkeypatch.setattr(room, "MOST_DECODED", 0)
    (plenty,) = open_model(tmp_path / "out").notices
    assert "codes that are decoded once" in plenty
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    twice = 2 * room.kept_bytes(weights, Opening().arithmetic)
    monkeypatch.setattr(room, "available_bytes", lambda: twice)
    assert "decoded once" in open_model(tmp_path / "out").notices[0]
    monkeypatch.setattr(room, "available_bytes", lambda: twice - 1)
    short = open_model(tmp_path / "out").notices
    assert "codes that are decoded in tiles" in short[0]
    assert f"{OP_BY_OP}: codes are decoded in tiles" in short


def test_windows_need_less_room(tmp_path: Path) -> None:
    folder = tiny_models.make("gemma3_text", tmp_path, dtype="fp32")
    limits = Limits(tokens_per_step=16, sequences=2)
    groups = {g.window: g.blocks for g in open_model(folder, limits=limits).engine.layout.groups}
    assert groups == {32: 1 + 2 * 4, None: 1 + 2 * 8}


def test_outlier_columns_are_of_a_token_alone(folder: Path, tmp_path: Path) -> None:
    """Or else neighbours would choose which columns are rounded."""
    compress.run("llm-int8", folder, tmp_path / "out", overrides=["evaluation=null"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["llm_int8_threshold"] = 1.0
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    (notice,) = open_model(tmp_path / "out").notices
    assert notice == (
        "math int16: 14 linears sum whole numbers, inputs rounded as their scheme says; exact sums"
        " the same in fp32"
    )
    assert open_model(tmp_path / "out", math="exact").notices == ()


def test_what_8_bits_of_the_checkpoint_take_is_said(folder: Path, tmp_path: Path) -> None:
    compress.run(
        "fp8-static-kv",
        folder,
        tmp_path / "out",
        overrides=["calibration.samples=2", "calibration.length=16", "evaluation=null"],
    )
    model = open_model(tmp_path / "out", dtype="bf16")
    *_, notice = model.notices
    assert notice == (
        "keys and values are rounded to 8 bits by the checkpoint's scales, and take the memory of"
        " torch.bfloat16"
    )
    assert isinstance(model.engine.runner, LocalRunner)
    called = model.engine.runner.decoder
    assert isinstance(called, OneCallDecoder) == compiled_pairs(torch.device("cpu"))
    decoder = called.decoder if isinstance(called, OneCallDecoder) else called
    assert decoder.dtype == torch.bfloat16


def test_steps_in_a_dtype_without_products_are_told(folder: Path) -> None:
    """With the dtype to take."""
    (told,) = open_model(folder, dtype="fp16").notices
    reason = why_no_calls(torch.float16, torch.device("cpu"))
    assert reason is not None
    assert told == f"{OP_BY_OP}: {reason}"


def test_wrong_arguments_are_one_line(folder: Path) -> None:
    for options, words in (
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"cache": CacheOptions(kv_dtype="fp8")}, "kv_dtype is 'fp8'; it is one of fp32, bf16"),
        ({"device": "tpu"}, "'tpu'"),
    ):
        with pytest.raises(CompressError, match=words):
            open_model(folder, **options)
    with pytest.raises(CompressError, match="does not exist"):
        open_model(folder / "no")
