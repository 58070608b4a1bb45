"""A step as one call of compiled code has the bits of the decoder, op by op: what it returns, and
what it leaves in the cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch.forward.forward import describe_forward
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization
from compress.runtime.decoder import one_call
from compress.runtime.decoder.build import Loader
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.mlp import Mixture
from compress.runtime.decoder.one_call import MOST, OneCallDecoder, in_one_call, why_no_calls
from compress.runtime.forms.form import Arithmetic
from compress_kernels.cpu.library import Native, native
from compress_kernels.ops.pairs import compiled_pairs
from compress_kernels.panels import Math
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import Chunk, Runs, load
from helpers.exporters import gguf_files, gguf_readings

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}
FAMILIES = sorted((*tiny_models.TABLED, *tiny_models.LANDINGS))
# Texts of a step: the number of each, its tokens, where they begin, the tokens of its prompt.
Step = Sequence[Chunk]
CPU = torch.device("cpu")
_bf16 = pytest.mark.skipif(not compiled_pairs(CPU), reason="torch multiplies")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=_bf16)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    def made(family: str, dtype: torch.dtype = torch.float32) -> Decoder:
        folder = tmp_path_factory.mktemp(family)
        model = tiny_models.make(family, folder, dtype="fp32", **WINDOWED.get(family, {}))
        return load(model, dtype)

    return made


def steps() -> list[Step]:
    """A prompt, tokens one by one beside the prompt of another text in chunks, and all together."""
    ids = [(7 * i + 3) % tiny_models.VOCAB for i in range(40)]
    found: list[Step] = [[(0, ids[:19], 0, 19)]]
    found += [[(0, [ids[i]], i, 19), (1, ids[i - 3 : i], 3 * (i - 19), 40)] for i in range(19, 25)]
    found += [[(2, ids[:1], 0, 1), (0, ids[25:27], 25, 19), (1, ids[18:40], 18, 40)]]
    return found


def runs(decoder: Decoder, **options: Any) -> Runs:
    return Runs(decoder, texts=3, most=64, **options)


def check(one: OneCallDecoder, called: Runs, plain: Runs) -> None:
    """Steps in one call and op by op: what they return, and what is in the caches behind them."""
    for step in steps():
        batch = plain.batch(step)
        wanted = plain.decoder.forward(batch, plain.cache)
        assert torch.equal(one.forward(batch, called.cache), wanted)
        logits = plain.decoder.logits(wanted)
        assert torch.equal(one.logits(wanted), logits)
        best = one.best(plain.chunks(step))
        if plain.decoder.how.final_softcap is None:
            assert best is not None
            assert best.tokens == logits.argmax(-1).tolist()
            assert best.logits == logits.amax(-1).tolist()
    for mine, theirs in zip(called.cache.states, plain.cache.states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_bits_of_op_by_op(
    decoder: Callable[..., Decoder], family: str, dtype: torch.dtype
) -> None:
    plain, called = (runs(decoder(family, dtype)) for _ in range(2))
    # Memory that was never written is not read: it would give no number.
    lowered = in_one_call(called.decoder, called.cache, 64)
    assert lowered.decoder is not None, lowered.reason
    for memory in (*lowered.decoder.scratch.buffers, lowered.decoder.chosen.logits):
        memory.fill_(torch.nan)
    check(lowered.decoder, called, plain)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_weights_that_stay_in_16_bits(tmp_path: Path, family: str) -> None:
    plain, called = (runs(load(tiny_models.make(family, tmp_path / x))) for x in ("a", "b"))
    assert plain.decoder.embedding.values.dtype == torch.bfloat16
    one = in_one_call(called.decoder, called.cache, 64).decoder
    assert one is not None
    check(one, called, plain)


G32 = QuantScheme(bits=4, group_size=32)
_GROUPS = ActivationScheme(type="float", granularity="group", group_size=16)
FP8_GROUPS = QuantScheme(
    bits=8, type="float", granularity="block", group_size=16, activation=_GROUPS
)


@pytest.mark.parametrize(
    ("math", "scheme"),
    [
        ("exact", G32),
        ("int16", G32),
        ("int8", G32),
        ("int16", PRESETS["NVFP4A16"]),
        ("int16", PRESETS["W8A8"]),
        ("int8", PRESETS["W8A8_STATIC"]),
        ("exact", PRESETS["W8A8"]),
        ("exact", PRESETS["FP8_DYNAMIC"]),
        ("int16", PRESETS["FP8_DYNAMIC"]),
        ("int16", PRESETS["FP8"]),
        ("int16", FP8_GROUPS),
    ],
    ids=[
        "exact", "int16", "int8", "nvfp4", "w8a8", "w8a8 static",
        "w8a8 exact", "fp8 exact", "fp8", "fp8 static", "fp8 groups",
    ],
)  # fmt: skip
def test_codes_in_panels(tmp_path: Path, math: Math, scheme: QuantScheme) -> None:
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", scheme)
    check_written(tmp_path / "out", math)


GGUF = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "kind", "how"),
    [
        ("llama", "Q4_K_M", ("int16", torch.float32)),
        ("llama", "Q4_K_M", ("exact", torch.float32)),
        pytest.param("llama", "Q4_K_M", ("exact", torch.bfloat16), marks=_bf16),
        ("mixtral", "Q5_1", ("int16", torch.float32)),
        ("gemma2", "IQ4_NL", ("int8", torch.float32)),
        pytest.param("gemma2", "Q4_1", ("exact", torch.bfloat16), marks=_bf16),
    ],
    ids=str,
)
def test_blocks_of_gguf(
    tmp_path: Path, family: str, kind: str, how: tuple[Math, torch.dtype]
) -> None:
    """Their embedding is tied to the head, and gemma's is times a number."""
    source = gguf_files.tiny(tmp_path / "model", family, tied=True, **GGUF)
    found = gguf_readings.opened(source, tmp_path, dtype=None, type=kind)
    check_written(found.checkpoint.path, *how)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral", "deepseek_v3"])
def test_inputs_and_what_is_stored_in_fp8(tmp_path: Path, family: str) -> None:
    """Of experts and of latents, too."""
    source = tiny_models.make(family, tmp_path / "source", dtype="fp32")
    stored = None if family == "deepseek_v3" else PRESETS["FP8"].activation
    scheme = PRESETS["FP8_DYNAMIC"]
    compressed_models.write(source, tmp_path / "out", scheme, kv_cache=stored)
    check_written(tmp_path / "out", "int16")


@_bf16
@pytest.mark.parametrize(
    "scheme",
    [G32, *(PRESETS[x] for x in ("NVFP4A16", "W8A8", "W8A8_STATIC", "FP8_DYNAMIC", "FP8"))],
    ids=["int4", "nvfp4", "w8a8", "w8a8 static", "fp8", "fp8 static"],
)
def test_codes_in_bf16(tmp_path: Path, scheme: QuantScheme) -> None:
    """Inputs, and what is stored, through codes, too."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="bf16", attention_bias=True)
    stored = PRESETS["FP8"].activation if scheme.activation else None
    compressed_models.write(source, tmp_path / "out", scheme, kv_cache=stored)
    check_written(tmp_path / "out", "exact", torch.bfloat16)


def check_written(folder: Path, math: Math, dtype: torch.dtype = torch.float32) -> None:
    how = Arithmetic.here(dtype, "cpu", math)
    weights = open_weights(Checkpoint.open(folder))
    forward = describe_forward(weights.checkpoint.config, weights.spec)
    plain, called = (runs(Decoder.of(Loader(weights, forward, how))) for _ in range(2))
    lowered = in_one_call(called.decoder, called.cache, 64)
    assert lowered.decoder is not None, lowered.reason
    check(lowered.decoder, called, plain)


def test_what_is_no_program_says_why(decoder: Callable[..., Decoder]) -> None:
    """Here a linear of one of the experts."""
    each = runs(decoder("mixtral"))
    first, *others = each.decoder.layers
    assert isinstance(first.mlp, Mixture)
    rounding = InputQuantization(ActivationScheme(outliers="calibrated"))
    *experts, last = first.mlp.experts
    rounded = replace(last, down=replace(last.down, inputs=rounding))
    layer = replace(first, mlp=replace(first.mlp, experts=(*experts, rounded)))
    model = replace(each.decoder, layers=(layer, *others))
    assert in_one_call(model, each.cache, 64) == (
        None,
        "inputs of linears are rounded but for outliers",
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_keys_and_values_in_fewer_bits(
    decoder: Callable[..., Decoder], family: str, stored: torch.dtype, dtype: torch.dtype
) -> None:
    each = runs(decoder(family, dtype))
    model, blocks = each.decoder, [len(states[0]) for states in each.cache.states[:1]]
    caches = [KVCache(model.how, blocks, 4, dtype=stored, device=model.device) for _ in range(2)]
    called = in_one_call(model, caches[1], 64).decoder
    assert called is not None
    for step in steps():
        batch = each.batch(step)
        wanted = model.forward(batch, caches[0])
        assert torch.equal(called.forward(batch, caches[1]), wanted)


def test_another_dtype_says_why_and_which_to_take(tmp_path: Path) -> None:
    half = runs(load(tiny_models.make("llama", tmp_path), torch.float16))
    bf16 = "bf16 or " if compiled_pairs(CPU) else ""
    why = f"no compiled step is in fp16; take dtype {bf16}fp32"
    assert in_one_call(half.decoder, half.cache, 64) == (None, why)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_another_device_and_no_compiler_say_why(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = why_no_calls(dtype, torch.device("cuda", 1))
    assert why == "compiled steps are for the CPU, and this is cuda"
    monkeypatch.setattr(one_call, "native", lambda: Native(None, "no C++ compiler found"))
    assert why_no_calls(dtype, CPU) == "nothing is compiled (no C++ compiler found)"
    monkeypatch.undo()
    monkeypatch.setattr(one_call, "compiled_pairs", lambda device: False)
    say = "no compiled step is in bf16; take dtype fp32"
    assert why_no_calls(torch.bfloat16, CPU) == say
    assert why_no_calls(torch.float32, CPU) is None


def test_larger_steps_go_op_by_op(decoder: Callable[..., Decoder]) -> None:
    model = runs(decoder("llama"))
    called = in_one_call(model.decoder, model.cache, 8).decoder
    assert called is not None
    assert called.scratch.rows == 8
    step = [(0, list(range(1, 20)), 0, 19)]
    batch = model.batch(step)
    assert called.best(model.chunks(step)) is None
    wanted = runs(decoder("llama"))
    assert torch.equal(
        called.forward(batch, model.cache), wanted.decoder.forward(batch, wanted.cache)
    )
    most = in_one_call(model.decoder, model.cache, 10_000).decoder
    assert most is not None
    assert most.scratch.rows == MOST
