"""Tiny checkpoints in every format, and what must hold of one whose config or headers changed."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import CompressError
from compress.formats import FORMATS, FP8_CACHE, open_weights
from compress.inspect.inspect import inspect_checkpoint
from compress.inspect.table import inspect_table
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.verbs import export
from helpers import compressed_models, plain_configs, tiny_models
from helpers.plain_decoding import dequantized

SYM, ASYM = QuantScheme(group_size=32), QuantScheme(group_size=32, symmetric=False)
WEIGHTS = "model.safetensors"
SIDE_FILES = ("hf_quant_config.json", "quantize_config.json")
Schemes = Mapping[str, QuantScheme]  # by module


def tries(examples: int, fixed: bool) -> settings:
    """That many examples, `fixed` or other ones in each run; each of them opens files."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=fixed,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def _mixed(linear: Any) -> QuantScheme | None:
    if linear.role == "o":
        return None
    return PRESETS["NVFP4A16"] if linear.role == "down" else QuantScheme(bits=8, group_size=32)


_INPUTS = ActivationScheme(type="float", granularity="group", group_size=32)
_BLOCK = QuantScheme(8, True, "block", 32, _INPUTS, "float")

# Kind -> format, scheme (or choice of one), options of compressed_models.write and the family.
KINDS: Mapping[str, tuple[str, Any, dict[str, Any]]] = MappingProxyType(
    {
        "ct-sym": ("compressed-tensors", SYM, {}),
        "ct-asym": ("compressed-tensors", ASYM, {}),
        "ct-order": ("compressed-tensors", SYM, {"act_order": True}),
        "ct-tensor": (
            "compressed-tensors",
            QuantScheme(bits=8, granularity="tensor", group_size=0, symmetric=False),
            {},
        ),
        "ct-w8a8": ("compressed-tensors", PRESETS["W8A8_STATIC"], {"kv_cache": FP8_CACHE}),
        "ct-fp8": ("compressed-tensors", PRESETS["FP8_DYNAMIC"], {}),
        "ct-block": ("compressed-tensors", _BLOCK, {}),
        "ct-mixed": ("compressed-tensors", _mixed, {}),
        "ct-turned": ("compressed-tensors", SYM, {"family": "gpt2"}),
        "gptq-sym": ("gptq", SYM, {"act_order": True}),
        "gptq-asym": ("gptq", ASYM, {}),
        "gptq-turned": ("gptq", SYM, {"family": "gpt2"}),
        "gptq_v2-asym": ("gptq_v2", ASYM, {}),
        "awq-asym": ("awq", ASYM, {}),
        "fp8-static": ("fp8", PRESETS["FP8"], {}),
        "fp8-block": ("fp8", _BLOCK, {}),
        "modelopt-int4": ("modelopt", SYM, {}),
        "modelopt-fp8": ("modelopt", PRESETS["FP8"], {"kv_cache": FP8_CACHE}),
        "modelopt-nvfp4": ("modelopt", PRESETS["NVFP4A16"], {}),
        "bitsandbytes": ("bitsandbytes", PRESETS["LLM_INT8"], {}),
    }
)
_LAYERS = {"gpt2": "n_layer"}
_CONV1D = ("c_attn", "c_proj", "c_fc")
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


@dataclass(frozen=True, slots=True)
class Sound:
    """A valid checkpoint. weights: all of the original model, by name. schemes: by module."""

    folder: Path
    weights: dict[str, Tensor]
    schemes: dict[str, QuantScheme]

    @classmethod
    def make(cls, kind: str, folder: Path) -> "Sound":
        fmt, scheme, options = KINDS[kind]
        dtype: tiny_models.Dtype = "fp16" if FORMATS[fmt].scale_dtype == "F16" else "bf16"
        source = folder.parent / "source"
        family = options.get("family", "llama")
        layers = {_LAYERS.get(family, "num_hidden_layers"): 1}
        tiny_models.make(family, source, tied=True, dtype=dtype, **layers)
        others = {key: value for key, value in options.items() if key != "family"}
        compressed_models.write(source, folder, scheme, fmt=fmt, **others)
        read, schemes = read_all(folder)
        return cls(folder, read, schemes)


def read_all(folder: Path) -> tuple[dict[str, Tensor], dict[str, QuantScheme]]:
    """Every weight of a checkpoint, and the schemes of its quantized modules."""
    weights = open_weights(Checkpoint.open(folder))
    for block in weights.spec.blocks:
        weights.cache(block)
        for linear in block.linears:
            weights.activation(linear.name)
    found = {name: weights.read(name) for name in weights.shapes}
    if not weights.format.coded:
        return found, {}
    modules = [name.removesuffix(".weight") for name in found]
    schemes = {x: s for x in modules if (s := weights.scheme(x)) is not None}
    return found, schemes


def examine(folder: Path, sound: Sound, to: str) -> str:
    """Hold a changed checkpoint to what must be true: it is refused in one line, or every weight is
    what config and tensors plainly mean now.

    to: a format to export to, which must then give the same weights. Returns "refused", "same" or
    "other".
    """
    _one_line(lambda: inspect_table(inspect_checkpoint(folder)))
    out = folder.parent / "exported"
    shutil.rmtree(out, ignore_errors=True)
    if _one_line(lambda: read_all(folder)) is None:
        assert _one_line(lambda: export(folder, to, out)) is None, "what cannot be read is exported"
        assert not list(folder.parent.glob("exported*")), "a refused export leaves something"
        return "refused"
    weights, schemes = read_all(folder)
    if _one_line(lambda: export(folder, to, out)) is not None:
        after, _ = read_all(out)
        assert after.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(after[name].float(), weight.float()), f"{name} changed in the export"
    assert not list(folder.parent.glob("exported.partial")), "an export leaves something"
    same = weights.keys() == sound.weights.keys() and all(
        torch.equal(weights[name], known) for name, known in sound.weights.items()
    )
    _require_plain_meaning(folder, weights, schemes)
    return "same" if same else "other"


def _require_plain_meaning(folder: Path, weights: dict[str, Tensor], schemes: Schemes) -> None:
    """Weights are what config and tensors mean, the former as plain_configs reads it, the latter as
    the safetensors library has them."""
    try:
        raw = load((folder / WEIGHTS).read_bytes())
    except SafetensorError as error:
        raise AssertionError(f"read though the safetensors library refuses it: {error}") from error
    block = plain_configs.block_of(config_of(folder), _side_of(folder))
    dtype = next(raw[name].dtype for name in _EMBEDDINGS if name in raw)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module not in schemes:
            assert _equal(weight, raw[name]), f"{name} is not what the file has"
            continue
        said = plain_configs.scheme_of(block, module)
        assert said == replace(schemes[module], activation=None), f"{module} is said to be {said}"
        parts = {
            key.removeprefix(f"{module}."): value
            for key, value in raw.items()
            if key.startswith(f"{module}.")
        }
        plain = dequantized(plain_configs.format_of(block), said, parts).to(dtype)
        plain = plain.t() if module.endswith(_CONV1D) else plain
        assert _equal(weight, plain), f"{name} is not what its parts mean"


def _side_of(folder: Path) -> Any:
    """What lies beside config.json and repeats it."""
    found = [folder / name for name in SIDE_FILES if (folder / name).exists()]
    return json.loads(found[0].read_text()) if found else None


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for what NaN is made of."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(a.nan_to_num() if a.is_floating_point() else a, _clean(b))


def _clean(b: Tensor) -> Tensor:
    return b.nan_to_num() if b.is_floating_point() else b


def _one_line(work: Any) -> Any:
    """What `work` returns; None for a refusal, which must be one line and of ours."""
    try:
        return work()
    except CompressError as error:
        said = str(error)
    assert said, "a refusal says nothing"
    assert "\n" not in said, f"more than one line: {said}"
    return None


def copy_into(sound: Sound, folder: Path) -> None:
    """The sound checkpoint, to be changed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound.folder, folder)


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())
