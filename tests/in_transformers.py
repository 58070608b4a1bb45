"""Checkpoints that `compressed_models` wrote, opened by transformers with compressed-tensors."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from compress.formats import runtimes
from compressed_models import Compressed

IDS = torch.arange(48).view(2, 24)


def load(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def load_compressed(
    written: Compressed, *, dequantize: bool, dtype: torch.dtype = torch.float32
) -> Any:
    from transformers import CompressedTensorsConfig

    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    return load(written.folder, dtype=dtype, **(options if dequantize else {}))


def plain(written: Compressed, source: Path, folder: Path, *, rounded: bool) -> Any:
    """transformers model with our dequantized weights; rounded: to the storage dtype."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    state = written.reference()
    if rounded:
        for name in written.quantized:
            state[name] = state[name].to(written.source[name].dtype).float()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return load(folder)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def verdict_of(written: Compressed) -> Any:
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    g_idx = any(t.g_idx is not None for t in written.quantized.values())
    found = runtimes("compressed-tensors", schemes, written.spec, g_idx=g_idx)
    return next(v for v in found if v.runtime == "transformers")
