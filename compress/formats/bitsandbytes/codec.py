"""bitsandbytes' 8-bit layout of one weight, both ways (read by transformers with bitsandbytes).

`x.weight` [N, K] becomes
    x.weight         int8 [N, K], also where the source stores it transposed (Conv1D)
    x.SCB            fp32 [N], the largest magnitude of each row: a weight is code * SCB / 127
    x.weight_format  uint8 [] = 0, "row"
which is all that LLM.int8() with dynamic outlier columns needs. For calibrated columns a second
file, compress_model/outliers.safetensors below the checkpoint, has for every such weight
    x.columns        int64 [O], ascending
    x.weight         [N, O], as the source stores them
A loader that does not know the file finds the columns at run time, and so runs the dynamic form.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.arch.spec import DecoderSpec
from compress.checkpoint.shards.layout import Entry
from compress.errors import CheckpointError, RecipeError
from compress.formats.compressed_tensors.config import ignored_modules
from compress.formats.names import module_of
from compress.formats.storage import WeightStorage
from compress.formats.stored import Beside, Has, Parts, Read, Stored
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import OutlierColumns, QuantizedTensor

NAME = "bitsandbytes"
FOLDER, SIDE_NAME = "compress_model", "outliers.safetensors"
SIDE_FILE = f"{FOLDER}/{SIDE_NAME}"
# What a quantized module's tensors are called below its path.
PARTS = ("weight", "SCB", "weight_format")
ROW_FORMAT = 0


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> str | None:
    """Why the format cannot hold a weight, and what can; None when it can. g_idx: act-order."""
    if g_idx:
        return "it has no act-order; use compressed-tensors"
    if scheme.activation is None or scheme.activation.outliers == "none":
        return (
            f"it holds LLM.int8() only (method llm_int8), not {scheme.describe()}; use"
            " compressed-tensors"
        )
    return None


def why_not_together(schemes: Iterable[QuantScheme]) -> str | None:
    """Why these schemes cannot be in one checkpoint of this format; None when they can."""
    thresholds = set()
    for scheme in schemes:
        if (alone := why_not(scheme)) is not None:
            return alone.partition(";")[0]
        assert scheme.activation is not None
        thresholds.add(scheme.activation.threshold)
    if len(thresholds) > 1:
        shown = " and ".join(f"{t:g}" for t in sorted(thresholds))
        return f"it has one threshold for all layers, the stages have {shown}"
    return None


def layout(how: WeightStorage) -> list[Entry]:
    """Exact (name, dtype code, shape) of every tensor that `encode` will return.

    Its dtypes and its order are the format's, whatever the source has.
    """
    module, (n, k) = module_of(how.name), how.shape
    _refuse(how)
    return [
        (how.name, "I8", (n, k)),
        (f"{module}.SCB", "F32", (n,)),
        (f"{module}.weight_format", "U8", ()),
    ]


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors to write, keyed and ordered as `layout` says; those of its outlier columns are
    `encode_outliers`' business."""
    name, module = how.name, module_of(how.name)
    how.expect(tensor)
    _refuse(how)
    absmax = tensor.scale.float().reshape(-1) * 127
    assert bool((absmax / 127 == tensor.scale.reshape(-1)).all()), f"{name}: scales would not last"
    return {
        name: tensor.codes,
        f"{module}.SCB": absmax,
        f"{module}.weight_format": torch.tensor(ROW_FORMAT, dtype=torch.uint8),
    }


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or bitsandbytes wrote for it.

    has, read: the checkpoint's names and its reader. Outlier columns are `decode_outliers`'
    business. CheckpointError when a part is missing or of another kind.
    """
    stored = Stored(module_of(name), scheme, has, read)
    parts = gather(stored)
    scale = (parts["SCB"] / 127).reshape(-1, 1)
    return beside(stored, parts).around(parts["weight"], scale, scheme)


def gather(stored: Stored) -> Parts:
    """All tensors of a module, each of the dtype and shape that its scheme needs.

    CheckpointError for what does not fit; values are not looked at.
    """
    codes = stored.get("weight", (torch.int8,))
    parts = {"weight": codes, "SCB": stored.get("SCB", (torch.float32,), (codes.shape[0],))}
    if stored.holds("weight_format"):
        parts["weight_format"] = stored.read(stored.at("weight_format"))
    return parts


def beside(stored: Stored, parts: Parts) -> Beside:
    """Nothing; CheckpointError for codes that do not lie row by row."""
    weight_format = parts.get("weight_format", torch.tensor(ROW_FORMAT))
    value = weight_format.tolist()
    if value not in (ROW_FORMAT, [ROW_FORMAT]):
        raise CheckpointError(
            f"{stored.at('weight_format')} is {value}; only 0, codes row by row, can be read: save"
            " the model again with bitsandbytes 0.45 or later"
        )
    return Beside()


def remarks(schemes: Sequence[QuantScheme]) -> list[str]:
    """That the size of the side file is not known before the run."""
    if not any(x.activation is not None and x.activation.outliers == "calibrated" for x in schemes):
        return []
    size = "comes on top of the planned size: calibration decides how many outlier columns it holds"
    return [f"{SIDE_FILE} {size}; the run needs twice its size on the disk"]


def outlier_names(name: str) -> tuple[str, str]:
    """What the side file calls the columns and the weights of the weight called `name`."""
    module = module_of(name)
    return f"{module}.columns", f"{module}.weight"


def encode_outliers(name: str, outliers: OutlierColumns) -> dict[str, Tensor]:
    """What the side file has of the weight called `name`."""
    return dict(zip(outlier_names(name), (outliers.columns, outliers.weight), strict=True))


def decode_outliers(
    name: str, shape: tuple[int, ...], has: Has, read: Read
) -> OutlierColumns | None:
    """Outlier columns of the weight `name` [N, K] from the side file; None when it has none.

    CheckpointError for what is not columns of such a weight.
    """
    columns_at, weight_at = outlier_names(name)
    if not has(columns_at) and not has(weight_at):
        return None
    if not (has(columns_at) and has(weight_at)):
        missing = columns_at if has(weight_at) else weight_at
        raise CheckpointError(f"{SIDE_FILE} lacks tensor {missing}; write the checkpoint again")
    columns, weight = read(columns_at), read(weight_at)
    found = columns.tolist() if columns.dtype == torch.int64 and columns.dim() == 1 else [-1]
    inside = not found or (found[0] >= 0 and found[-1] < shape[1])
    if found != sorted(set(found)) or not inside:
        raise CheckpointError(
            f"{SIDE_FILE}: {columns_at} is {columns.dtype} {list(columns.shape)}; it must be int64,"
            f" ascending columns of 0 to {shape[1] - 1}"
        )
    if not weight.is_floating_point() or tuple(weight.shape) != (shape[0], len(found)):
        raise CheckpointError(
            f"{SIDE_FILE}: {weight_at} is {weight.dtype} {list(weight.shape)}; it must be floats"
            f" {[shape[0], len(found)]}, the weights of its columns"
        )
    return OutlierColumns(columns, weight)


def quantization_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
    kv_cache: object = None,
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None when nothing is quantized.

    shapes: of every tensor of the source. schemes: of every quantized tensor, by tensor name. The
    keys are those of transformers' BitsAndBytesConfig, and "transposed" is ours: modules that the
    source stores as [K, N]. RecipeError for scales of a cache.
    """
    if kv_cache is not None:
        raise RecipeError(
            f"kv_cache: {NAME} has no place for the scales of the key/value cache; use"
            " output.format 'compressed-tensors'"
        )
    if not schemes:
        return None
    refused = why_not_together(schemes.values())
    assert refused is None, refused
    (threshold,) = {s.activation.threshold for s in schemes.values() if s.activation is not None}
    transposed = [x.name for x in spec.all_linears() if x.transposed and x.tensor in schemes]
    return {
        "quant_method": NAME,
        "load_in_8bit": True,
        "load_in_4bit": False,
        "llm_int8_threshold": threshold,
        "llm_int8_skip_modules": ignored_modules(spec, shapes, schemes),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        **({"transposed": transposed} if transposed else {}),
    }


def _refuse(how: WeightStorage) -> None:
    if (found := why_not(how.scheme, g_idx=how.act_order)) is not None:
        raise RecipeError(f"format {NAME!r}: {found}")
