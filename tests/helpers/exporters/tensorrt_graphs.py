"""Quantized tiny models as TensorRT's graphs take them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compress.quant.scheme import PRESETS, QuantScheme
from helpers import compressed_models

# Sizes that blocks of 128 fill.
WIDE: Mapping[str, Any] = MappingProxyType({"hidden_size": 128, "intermediate_size": 256})
G64 = replace(PRESETS["W4A16"], group_size=64)
COLUMNS = (3, 17, 40)


def positive(source: Path, folder: Path, scheme: QuantScheme, **options: Any) -> Path:
    """A quantized checkpoint in `folder` whose scales are above 0."""
    compressed_models.write(source, folder, scheme, **options)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("weight_scale") and tensor.dtype != torch.float8_e4m3fn:
            tensors[name] = tensor.abs()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def with_outliers(source: Path, folder: Path) -> Path:
    """LLM.int8() with COLUMNS fixed, whose weights are five times as large."""
    made = compressed_models.write(source, folder, PRESETS["LLM_INT8"], fmt="bitsandbytes")
    columns, side = torch.tensor(COLUMNS), dict[str, torch.Tensor]()
    for tensor in made.quantized:
        side[tensor.removesuffix("weight") + "columns"] = columns.clone()
        side[tensor] = 5 * made.source[tensor][:, columns].contiguous()
    (folder / "compress_model").mkdir()
    save_file(side, folder / "compress_model" / "outliers.safetensors")
    return folder
