"""Every format, width and shape: what is written decodes the slow and obvious way, and what is
packed the slow and obvious way is read and written again to the bit; or a shape is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from compress.errors import RecipeError
from compress.formats import CODECS
from compress.formats.storage import WeightStorage
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor
from helpers.compressed_models import encoded
from helpers.plain_decoding import AWQ_ORDER, dequantized

MODULE = "model.layers.0.mlp.down_proj"
NAME = f"{MODULE}.weight"
Where = tuple[str, int]  # granularity and group size


def integers(
    bits: tuple[int, ...], *places: Where, symmetric: bool | None = None
) -> list[QuantScheme]:
    signs = (True, False) if symmetric is None else (symmetric,)
    return [QuantScheme(b, s, *where) for b in bits for s in signs for where in places]  # type: ignore[arg-type]


FP8, INT8 = PRESETS["FP8"], PRESETS["W8A8_STATIC"]
CHANNEL, TENSOR = ("channel", 0), ("tensor", 0)
BLOCK = replace(
    PRESETS["FP8_BLOCK"],
    group_size=5,
    activation=ActivationScheme(type="float", granularity="group", group_size=5),
)
OF_GPTQ = integers((2, 3, 4, 8), CHANNEL, ("group", 16), ("group", 64))
SCHEMES: dict[str, list[QuantScheme]] = {
    "compressed-tensors": [
        *integers((2, 3, 4, 5, 6, 7, 8), CHANNEL, TENSOR, ("group", 5), ("group", 32)),
        *[PRESETS[x] for x in ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16")],
        *(INT8, BLOCK, replace(INT8, symmetric=False, granularity="group", group_size=7)),
    ],
    "gptq": OF_GPTQ,
    "gptq_v2": OF_GPTQ,
    "awq": integers((4,), CHANNEL, ("group", 16), ("group", 64)),
    "fp8": [FP8, BLOCK, PRESETS["FP8_BLOCK"]],
    "modelopt": [
        *integers((4,), ("group", 7), ("group", 32), symmetric=True),
        *[PRESETS[x] for x in ("W8A16", "W8A8_STATIC", "FP8", "FP8_DYNAMIC", "NVFP4A16")],
        replace(PRESETS["FP8_BLOCK"], activation=None),
    ],
    "bitsandbytes": [PRESETS["LLM_INT8"]],
}
# Codes of 3 and 7 bits cross the ends of words as those of 5 and 6 do.
CASES = [
    pytest.param(f, s, id=f"{f} {s.describe()}", marks=pytest.mark.long if s.bits in (5, 6) else ())
    for f, known in SCHEMES.items()
    for s in known
]
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 140))
STEPS = st.tuples(st.integers(1, 3), st.integers(1, 4))  # of 32 rows and of whole groups
quick = settings(max_examples=10, deadline=None, derandomize=True, database=None)


def random_tensor(
    fmt: str, scheme: QuantScheme, shape: tuple[int, int], seed: int
) -> QuantizedTensor:
    """Any codes, scales, zero points and orders of columns that the format can store."""
    generator = torch.Generator().manual_seed(seed)
    (n, k), scales = shape, scheme.scale_shape(*shape)

    def codes(*size: int, low: int = scheme.code_min) -> Tensor:
        found = torch.randint(low, scheme.code_max + 1, size, generator=generator)
        return found.to(torch.int8)

    if scheme.type == "float":
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        kinds = torch.arange(256).byte().view(torch.float8_e4m3fn).float()  # NaN among them
        kinds = numbers if scheme.is_fp4 else kinds
        values = kinds[torch.randint(len(kinds), (n, k), generator=generator)]
        values = values.to(torch.float8_e4m3fn)
    else:
        values = codes(n, k)
    scale = torch.rand(scales, generator=generator).half()
    scale = scale.to(torch.float8_e4m3fn if scheme.is_fp4 else _scale_dtype(fmt))
    low = scheme.code_min + (fmt == "gptq")  # version 1 has no place for the least
    static = scheme.activation is not None and not scheme.activation.dynamic
    return QuantizedTensor(
        values,
        scale,
        None if scheme.symmetric else codes(*scales, low=low),
        _order(fmt, scheme, k, generator) if seed % 2 else None,
        scheme,
        global_scale=torch.tensor([4096.0]) if scheme.is_fp4 else None,
        input_scale=torch.tensor([0.5]) if static else None,
    )


def _scale_dtype(fmt: str) -> torch.dtype:
    return torch.float16 if CODECS[fmt].scale_dtype == "F16" else torch.float32


def _order(fmt: str, scheme: QuantScheme, k: int, generator: torch.Generator) -> Tensor | None:
    """Groups in an order of their own, where the format has it."""
    if CODECS[fmt].why_not(scheme, g_idx=True) is not None or scheme.groups(k) < 2:
        return None
    return (torch.randperm(k, generator=generator) // scheme.group_size).to(torch.int32)


def parts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items()}


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit, NaN too."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("fmt", "scheme"), CASES)
@quick
@given(odd=SHAPES, steps=st.none() | STEPS, seed=st.integers(0, 99))
def test_written_and_read(
    fmt: str, scheme: QuantScheme, odd: tuple[int, int], steps: tuple[int, int] | None, seed: int
) -> None:
    whole = math.lcm(32, scheme.group_size or 1)
    shape = odd if steps is None else (32 * steps[0], whole * steps[1])
    codec = CODECS[fmt]
    assert codec.reader is not None
    if (reason := codec.why_not(scheme, shape)) is not None:
        assert "; use " in reason or "; ignore the layer or give it scheme " in reason
        with pytest.raises(RecipeError, match=f"{shape[0]}|{shape[1]}"):
            codec.layout(WeightStorage(NAME, shape, scheme, "F16"))
        return
    event("written")
    tensor = random_tensor(fmt, scheme, shape, seed)
    written = encoded(codec, NAME, tensor, dtype=torch.float16)
    parts = load(save(written))
    assert parts.keys() == written.keys()
    want = tensor.dequantize()
    assert same(dequantized(fmt, scheme, parts_of(parts)), want)
    scheme = codec.reader.as_read(scheme)
    back = codec.reader.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    assert same(back.codes, tensor.codes)
    assert same(back.dequantize(), want)
    again = encoded(codec, NAME, back, dtype=torch.float16)
    assert again.keys() == parts.keys()
    for name, part in again.items():
        assert same(part, parts[name]), name


@pytest.mark.parametrize("fmt", CODECS)
def test_what_is_written_is_what_was_announced(fmt: str) -> None:
    """Of one weight the layout tells names and shapes before any work; an encoder that gets another
    one says so, where the file's places would be wrong."""
    scheme = SCHEMES.get(fmt, OF_GPTQ)[-1]
    shape = (160, 5 * 128 * 7)  # every group divides it
    tensor = random_tensor(fmt, scheme, shape, 0)
    how = WeightStorage.of_tensor(NAME, tensor, "F32" if fmt == "fp8" else "F16")
    written = CODECS[fmt].encode(how, tensor)
    places = [(name, part.shape) for name, part in written.items()]
    assert places == [(name, shape) for name, _, shape in CODECS[fmt].layout(how)]
    others = [
        replace(how, shape=shape[::-1]),
        replace(how, scheme=PRESETS["W8A16_ASYM"]),
        replace(how, act_order=True),
    ]
    for other in others:
        with pytest.raises(AssertionError, match=f"{NAME}: .* is not "):
            CODECS[fmt].encode(other, tensor)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2"])
@quick
@given(shape=SHAPES, size=st.sampled_from([-1, 5, 16, 64]), seed=st.integers(0, 999))
def test_gptq_of_any_shape_is_read(
    fmt: str, bits: int, shape: tuple[int, int], size: int, seed: int
) -> None:
    """gptqmodel pads words that codes do not fill; whatever lies there has no say."""
    (n, k), rng = shape, np.random.default_rng(seed)
    where: Where = ("group", size) if size > 0 else CHANNEL
    scheme = QuantScheme(bits, False, *where)  # type: ignore[arg-type]
    groups = scheme.groups(k)
    less = 1 if fmt == "gptq" else 0
    codes = rng.integers(0, 2**bits, (n, k))
    zeros = rng.integers(less, 2**bits, (groups, n))  # version 1 has no place for the least
    scales = torch.from_numpy(rng.random((groups, n))).half()
    order = rng.permutation(k) // (size if size > 0 else k)
    parts = {
        f"{MODULE}.qweight": words(codes, bits, rng).t().contiguous(),
        f"{MODULE}.qzeros": words(zeros - less, bits, rng),
        f"{MODULE}.scales": scales,
        f"{MODULE}.g_idx": torch.from_numpy(order).to(torch.int32),
    }
    reader = CODECS[fmt].reader
    assert reader is not None
    back = reader.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    assert reader.weight_shape(MODULE, scheme, shapes.get) == shape
    steps = scales.float().numpy()[order].T
    want = (codes - zeros[order].T).astype(np.float32) * steps
    assert same(back.dequantize(), torch.from_numpy(want))


@pytest.mark.parametrize("bits", range(2, 9))
@quick
@given(shape=SHAPES, size=st.sampled_from([-1, 5, 32]), seed=st.integers(0, 999))
def test_padding_of_packed_words_has_no_say(
    bits: int, shape: tuple[int, int], size: int, seed: int
) -> None:
    (n, k), rng = shape, np.random.default_rng(seed)
    where: Where = ("group", size) if size > 0 else CHANNEL
    scheme = QuantScheme(bits, False, *where)  # type: ignore[arg-type]
    groups = scheme.groups(k)
    codes, zeros = rng.integers(0, 2**bits, (n, k)), rng.integers(0, 2**bits, (groups, n))
    scales = torch.from_numpy(rng.random((n, groups))).float()
    parts = {
        f"{MODULE}.weight_packed": words(codes, bits, rng),
        f"{MODULE}.weight_shape": torch.tensor([n, k]),
        f"{MODULE}.weight_scale": scales,
        f"{MODULE}.weight_zero_point": words(zeros, bits, rng).t().contiguous(),
    }
    codec = CODECS["compressed-tensors"]
    assert codec.reader is not None
    back = codec.reader.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    order = np.arange(k) // (size if size > 0 else k)
    want = (codes - zeros[order].T).astype(np.float32) * scales.numpy()[:, order]
    assert same(back.dequantize(), torch.from_numpy(want))


@quick
@given(n=st.integers(1, 9), k=st.integers(1, 140), seed=st.integers(0, 999))
def test_awq_of_any_shape_is_read(n: int, k: int, seed: int) -> None:
    n, rng = 8 * n, np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (1, n))
    scales = torch.from_numpy(rng.random((1, n))).half()
    places = [8 * word + column for word in range(n // 8) for column in AWQ_ORDER]
    parts = {
        f"{MODULE}.qweight": words(codes[:, places], 4, rng),
        f"{MODULE}.qzeros": words(zeros[:, places], 4, rng),
        f"{MODULE}.scales": scales,
    }
    codec = CODECS["awq"]
    assert codec.reader is not None
    scheme = QuantScheme(4, False, "channel", 0)
    back = codec.reader.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    want = (codes - zeros).T.astype(np.float32) * scales.float().numpy().T
    assert same(back.dequantize(), torch.from_numpy(want))
    for name, part in encoded(codec, NAME, back).items():
        assert same(part, parts[name]), name


def words(values: np.ndarray, bits: int, rng: np.random.Generator) -> Tensor:
    """int32 [rows, ceil(count * bits / 32)] of numbers [rows, count], each row one little-endian
    string of bits; what the last word has left is filled at random."""
    rows, count = values.shape
    flat = (values[:, :, None] >> np.arange(bits) & 1).reshape(rows, count * bits)
    rest = rng.integers(0, 2, (rows, -(count * bits) % 32))
    whole = np.packbits(np.concatenate([flat, rest], 1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(whole.view(np.int32).copy())
