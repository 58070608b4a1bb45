"""Weights of quantized modules computed the slow and obvious way, from nothing but the layouts as
docs/formats.md has them: what our readers are held to when config or headers were changed."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from compress.quant.scheme import QuantScheme

Parts = Mapping[str, Tensor]  # below the module's path, as the safetensors library reads them
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def dequantized(fmt: str, scheme: QuantScheme, parts: Parts) -> Tensor:
    """fp32 [N, K]. fmt: a key of FORMATS."""
    if fmt in ("gptq", "gptq_v2"):
        return _gptq(scheme, parts, 1 if fmt == "gptq" else 0)
    if fmt == "awq":
        codes, zeros = _awq(parts["qweight"]), _awq(parts["qzeros"])
        return _scaled(scheme, codes - zeros[:, _places(scheme, codes)], parts["scales"].t())
    if fmt == "bitsandbytes":
        return parts["weight"].float() * (parts["SCB"] / 127)[:, None]
    if scheme.is_fp4:
        return _nvfp4(scheme, parts)
    if fmt == "modelopt" and "weight_packed" not in parts and scheme.bits == 4:
        rows = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], 1).flatten(0, 1).int()
        weight = _scaled(scheme, torch.where(rows > 7, rows - 16, rows), parts["weight_scale"])
        factor = parts.get("pre_quant_scale")
        return weight if factor is None else weight * factor.float()
    if "weight_packed" in parts:
        return _packed(scheme, parts)
    return _plain(scheme, parts)


def _plain(scheme: QuantScheme, parts: Parts) -> Tensor:
    codes = parts["weight"].float()
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    assert scale is not None
    scale = scale.float()
    if scheme.granularity == "block":
        n, k = codes.shape
        side = scheme.group_size
        scale = scale.reshape(-(-n // side), -(-k // side))
        return codes * scale[torch.arange(n) // side][:, torch.arange(k) // side]
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        codes = codes - zeros.float().reshape(-1, zeros.shape[-1])[:, _places(scheme, codes)]
    return _scaled(scheme, codes, scale if scale.dim() == 2 else scale.reshape(-1, 1))


def _packed(scheme: QuantScheme, parts: Parts) -> Tensor:
    n, k = parts["weight_shape"].tolist()
    codes = _string(parts["weight_packed"], scheme.bits, k)
    places = parts.get("weight_g_idx")
    if places is None or bool((places < 0).all()):
        places = _places(scheme, codes)
    if not scheme.symmetric:
        zeros = parts["weight_zero_point"]
        if scheme.granularity == "tensor":
            zeros = zeros.reshape(1, 1)
        else:
            zeros = _string(zeros.t(), scheme.bits, n).t()
        codes = codes - zeros[:, places.long()]
    scale = parts["weight_scale"]
    return _scaled(scheme, codes, scale if scale.dim() == 2 else scale.reshape(-1, 1), places)


def _gptq(scheme: QuantScheme, parts: Parts, less: int) -> Tensor:
    places = parts.get("g_idx")
    words, n = parts["qweight"].t(), parts["qweight"].shape[1]
    k = places.numel() if places is not None else words.shape[1] * 32 // scheme.bits
    codes = _string(words, scheme.bits, k)
    places = _places(scheme, codes) if places is None else places
    zeros = (_string(parts["qzeros"], scheme.bits, n) + less).t()
    return _scaled(scheme, codes - zeros[:, places.long()], parts["scales"].t(), places)


def _nvfp4(scheme: QuantScheme, parts: Parts) -> Tensor:
    packed = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1, 2).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    scale = parts["weight_scale"].float()
    if "weight_global_scale" in parts:
        scale = scale / parts["weight_global_scale"].float().reshape(1)
    else:
        scale = scale * parts["weight_scale_2"].float().reshape(1)
    weight = _scaled(scheme, values, scale)
    factor = parts.get("pre_quant_scale")
    return weight if factor is None else weight * factor.float()


def _scaled(
    scheme: QuantScheme, codes: Tensor, scale: Tensor, places: Tensor | None = None
) -> Tensor:
    places = _places(scheme, codes) if places is None else places
    return codes.float() * scale.float()[:, places.long()]


def _places(scheme: QuantScheme, codes: Tensor) -> Tensor:
    """Group of every column."""
    k = codes.shape[1]
    return torch.arange(k) // (scheme.group_size if scheme.granularity == "group" else k)


def _string(words: Tensor, bits: int, count: int) -> Tensor:
    """Signed codes of rows of words, each row one little-endian string of bits."""
    data = np.ascontiguousarray(words.numpy()).view(np.uint8)
    cut = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits]
    values = cut.reshape(len(data), count, bits).astype(np.int64) @ (1 << np.arange(bits))
    return torch.from_numpy(values - (1 << (bits - 1)))


def _awq(words: Tensor) -> Tensor:
    """Signed codes [N, K] of words [K, N / 8]."""
    nibbles = torch.stack([(words >> 4 * i) & 15 for i in range(8)], 2)  # [K, N / 8, 8]
    codes = torch.empty_like(nibbles)
    for place, column in enumerate(AWQ_ORDER):
        codes[:, :, column] = nibbles[:, :, place]
    return codes.flatten(1).t() - 8
