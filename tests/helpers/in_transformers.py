"""Checkpoints that `compressed_models` wrote, opened by transformers with compressed-tensors."""

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.formats.runtimes.judge import runtimes
from compress.quant.activations import fake_quantize, quantize_inputs
from compress.quant.tensor import InputQuantization
from helpers.compressed_models import Compressed

IDS = torch.arange(48).view(2, 24)


def load(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def load_compressed(
    written: Compressed, *, dequantize: bool, dtype: torch.dtype = torch.float32
) -> Any:
    return load_folder(written.folder, dequantize=dequantize, dtype=dtype)


def load_folder(folder: Path, *, dequantize: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import CompressedTensorsConfig

    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    return load(folder, dtype=dtype, **(options if dequantize else {}))


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


def said(folder: Path, text: str, length: int = 16) -> Tensor:
    """Logits [rows, length, vocab] of a folder on the whole rows that a text makes."""
    from transformers import AutoTokenizer

    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    return logits(load(folder), ids[: len(ids) // length * length].view(-1, length))


def lost(folder: Path, source: Path, text: str) -> float:
    """Mean squared difference of the logits of two folders on a text."""
    return float((said(folder, text) - said(source, text)).square().mean())


def verdict_of(written: Compressed) -> Any:
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    g_idx = any(t.g_idx is not None for t in written.quantized.values())
    found = runtimes("compressed-tensors", schemes, written.spec, g_idx=g_idx)
    return next(v for v in found if v.runtime == "transformers")


def quantized_inputs(model: Any, written: Compressed) -> Any:
    """Our own rounding of the inputs of every linear outside experts, as the files say it."""
    weights = open_weights(Checkpoint.open(written.folder))
    for linear in written.spec.linears():
        inputs = weights.activation(linear.name)
        if inputs is not None and linear.expert is None:
            quantize_inputs(model.get_submodule(linear.name), inputs)
    return model


class RoundingCache:
    """transformers' cache, rounding what it is given, while this is entered."""

    def __init__(self, how: InputQuantization) -> None:
        self.how = how

    def __enter__(self) -> None:
        from transformers.cache_utils import DynamicCache

        update, how = DynamicCache.update, self.how
        self.restore = lambda: setattr(DynamicCache, "update", update)

        def rounded(cache: Any, keys: Tensor, values: Tensor, *rest: Any, **named: Any) -> Any:
            keys, values = fake_quantize(keys, how), fake_quantize(values, how)
            return update(cache, keys, values, *rest, **named)

        DynamicCache.update = rounded

    def __exit__(self, *_: object) -> None:
        self.restore()


def cache_is_left_alone() -> bool:
    """transformers calls a block's cache by another name since 5.24; compressed-tensors 0.20 looks
    for the old one, and rounds nothing where it finds none."""
    renamed = Version(version("transformers")) >= Version("5.24")
    return renamed and Version(version("compressed-tensors")) < Version("0.21")
