"""Write a compressed checkpoint with plain rounding: what codec and loader tests start from."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.formats import FORMATS
from compress.formats.format import EncodeWeight
from compress.formats.storage import WeightStorage
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor

Choose = Callable[[LinearSpec], QuantScheme | None]


@dataclass(frozen=True, slots=True)
class Compressed:
    """folder: the checkpoint. quantized: by tensor name. spec and source: of the original."""

    folder: Path
    quantized: dict[str, QuantizedTensor]
    spec: DecoderSpec
    source: dict[str, Tensor]

    def reference(self) -> dict[str, Tensor]:
        """State dict of the original with our dequantized weights in it, in fp32."""
        state = {name: tensor.float() for name, tensor in self.source.items()}
        transposed = {x.tensor for x in self.spec.linears() if x.transposed}
        for name, tensor in self.quantized.items():
            weight = tensor.dequantize()
            state[name] = weight.t().contiguous() if name in transposed else weight
        return state


class Encodes(Protocol):
    """A row of FORMATS, or the module of a codec."""

    encode: EncodeWeight


def encoded(
    codec: Encodes,
    name: str,
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> dict[str, Tensor]:
    """The tensors that a codec writes for a weight. dtype: the source's; that of the scales where
    None, which most schemes share with it."""
    code = "" if dtype is None else DTYPE_CODES[dtype]
    return codec.encode(WeightStorage.of_tensor(name, tensor, code, transposed=transposed), tensor)


def round_weight(
    weight: Tensor, scheme: QuantScheme, *, act_order: bool = False, seed: int = 0
) -> QuantizedTensor:
    """Nearest codes of weight [N, K] under minmax scales; act_order shuffles the groups.

    Scales of symmetric weight-only grids are negative in every second group of a row and in every
    second row of a group, as a search may make them; the first is, also where it is the only one.

    A static scheme gets an input scale that fits no inputs in particular.
    """
    act = scheme.activation
    static = act is not None and not act.dynamic
    inputs = torch.tensor([0.05], dtype=weight.dtype) if static else None
    if scheme.type == "float":
        return _round_floats(weight, scheme, inputs)
    k = weight.shape[1]
    step = scheme.columns_per_scale(k)
    groups = torch.arange(k) // step
    if act_order:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(seed))]
    w = weight.float()
    flat = scheme.granularity == "tensor"
    pieces, where = (
        (w.reshape(1, -1), torch.zeros(w.numel(), dtype=torch.int64)) if flat else (w, groups)
    )
    scale, zero = _minmax(pieces, where, scheme, weight.dtype)
    if scheme.symmetric and act is None:
        turned = torch.arange(scale.shape[0])[:, None] + torch.arange(scale.shape[1])
        scale[turned % 2 == 0] *= -1
    codes = (w / scale.float()[:, groups]).round() + zero.float()[:, groups]
    codes = codes.clamp(scheme.code_min, scheme.code_max).to(torch.int8)
    return QuantizedTensor(
        codes,
        scale,
        None if scheme.symmetric else zero,
        groups.to(torch.int32) if act_order else None,
        scheme,
        input_scale=inputs,
    )


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GLOBAL = torch.tensor([4096.0])  # one for all weights, as fused ones must share theirs


def _round_floats(weight: Tensor, scheme: QuantScheme, inputs: Tensor | None) -> QuantizedTensor:
    """E4M3 by torch's own cast, E2M1 by distance."""
    n, k = weight.shape
    w, largest = weight.float(), 6.0 if scheme.is_fp4 else 448.0
    rows, columns = scheme.rows_per_scale(n), scheme.columns_per_scale(k)
    over = -n % rows, -k % columns
    blocks = (
        pad(w.abs(), (0, over[1], 0, over[0])).unfold(0, rows, rows).unfold(1, columns, columns)
    )
    scales = blocks.amax((2, 3)) / largest
    if scheme.is_fp4:
        stored = (scales * GLOBAL).to(torch.float8_e4m3fn)
        steps = (stored.float() / GLOBAL).clamp(min=1e-9)
    else:
        stored = torch.where(scales > 0, scales, 1.0).to(weight.dtype)
        steps = stored.float()
    steps = steps.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    values = (w / steps).clamp(-largest, largest)
    if scheme.is_fp4:
        nearest = (values.abs()[..., None] - E2M1).abs().argmin(-1)
        values = E2M1[nearest] * values.sign()
    codes = values.to(torch.float8_e4m3fn)
    whole = GLOBAL.clone() if scheme.is_fp4 else None
    return QuantizedTensor(codes, stored, None, None, scheme, whole, inputs)


def write(
    source: Path,
    folder: Path,
    choose: QuantScheme | Choose,
    *,
    head: QuantScheme | None = None,
    embedding: QuantScheme | None = None,
    fmt: str = "compressed-tensors",
    act_order: bool = False,
    kv_cache: ActivationScheme | None = None,
    kv_scale: float = 0.02,
) -> Compressed:
    """Quantize the linears that `choose` gives a scheme (the router never), write all.

    head, embedding: their schemes; `choose` is not asked about them. kv_cache: with scales of
    that cache, all `kv_scale`.
    """
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    spec = describe(config, shapes)
    output, quantized = dict(tensors), {}
    codec = FORMATS[fmt]
    for linear in spec.all_linears():
        if linear.role in ("head", "embedding"):
            scheme = head if linear.role == "head" else embedding
        else:
            scheme = choose if isinstance(choose, QuantScheme) else choose(linear)
        if scheme is None or linear.role == "router":
            continue
        weight = output.pop(linear.tensor)
        weight = weight.t().contiguous() if linear.transposed else weight
        rounded = round_weight(weight, scheme, act_order=act_order)
        quantized[linear.tensor] = rounded
        output |= encoded(
            codec, linear.tensor, rounded, dtype=weight.dtype, transposed=linear.transposed
        )
    schemes = {name: tensor.scheme for name, tensor in quantized.items()}
    block = codec.config(
        spec, shapes, schemes, with_g_idx=schemes if act_order else (), kv_cache=kv_cache
    )
    if kv_cache is not None:
        assert codec.cache is not None, f"{fmt} has no place for scales of a cache"
        scale = torch.tensor([kv_scale], dtype=tensors[spec.embedding].dtype)
        for decoder_block in spec.blocks:
            output |= codec.cache.encode(decoder_block, scale.clone(), scale.clone())
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json" and file.name != "config.json":
            shutil.copy(file, folder)
    save_file(output, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**config, "quantization_config": block} if block else config
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name, made in codec.files.items():
        (folder / name).write_text(json.dumps(made(block or {}), indent=2))
    return Compressed(folder, quantized, spec, tensors)


def _minmax(
    w: Tensor, groups: Tensor, scheme: QuantScheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale in `dtype` and int8 zero [N, groups] of w [N, K], whose columns are of `groups` [K]."""
    steps = scheme.code_max - scheme.code_min
    where = groups.expand(w.shape[0], -1)
    start = torch.zeros(w.shape[0], int(groups.max()) + 1)
    if scheme.symmetric:
        scale = (start.scatter_reduce(1, where, w.abs(), "amax") / (steps / 2)).to(dtype)
        scale[scale == 0] = 1
        return scale, torch.zeros_like(scale, dtype=torch.int8)
    # From 0 on: the grid holds it.
    low, high = (start.scatter_reduce(1, where, w, end) for end in ("amin", "amax"))
    scale = ((high - low) / steps).to(dtype)
    scale[scale == 0] = 1
    zero = (scheme.code_min - low / scale.float()).round()
    return scale, zero.clamp(scheme.code_min, scheme.code_max).to(torch.int8)
