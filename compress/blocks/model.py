"""transformers' causal LM of a checkpoint, without its weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.arch.resize.between import built_with, is_between
from compress.arch.spec import DecoderSpec
from compress.arch.text_config import config_at
from compress.blocks.between import fit_heads
from compress.errors import CheckpointError


def remedy(spec: DecoderSpec) -> str:
    """What is left to do with a decoder that transformers cannot run."""
    if spec.family == "generic":
        return "it is in no architecture table, so nothing could be said about a result of it"
    return "only methods without calibration can be used on it"


def build_model(
    checkpoint_config: Mapping[str, Any], spec: DecoderSpec, dtype: torch.dtype, device: str
) -> nn.Module:
    """The causal LM on the meta device, in eval mode; only computed buffers (rotary tables) exist.

    Attention is torch's scaled_dot_product_attention where the family has it. Code that comes with
    a checkpoint is never run. Raises CheckpointError for a model_type transformers does not know,
    for one that is no decoder, and for values in config.json that it cannot make a model of.
    """
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config_at(checkpoint_config, spec.text_config)
    heads_cut = is_between(text)
    if spec.model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"model_type {spec.model_type!r} is unknown to this transformers; {remedy(spec)}"
        )
    known = built_with(text)
    known.pop("quantization_config", None)
    with _refusing(spec):
        kind: Any = CONFIG_MAPPING[spec.model_type]
        # Infinity is {"__float__": "Infinity"} in files of transformers (mamba2's time_step_limit).
        config: Any = kind.from_dict(kind._decode_special_floats(known))
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    if (why := _why_not_decoder(config)) is not None:
        raise CheckpointError(
            f"config.json describes no decoder: {why}; only decoder language models are compressed,"
            " so take the config of these weights"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    # Random numbers would go to the meta device: 4 of the 10 ms that two small blocks take.
    with _refusing(spec), torch.device("meta"), no_init_weights():
        model: nn.Module = model_class._from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    if heads_cut:
        fit_heads(model, model.get_submodule(find_stack(model, spec)), spec)
    # Read for a warning about masks only; masks come from the caller. Set past checks of its type.
    vars(config)["pad_token_id"] = None
    with _refusing(spec):
        _compute_buffers(model, spec, device)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # means nothing in a forward, but would bound a row subset
    return model.eval().requires_grad_(False)


def _why_not_decoder(config: Any) -> str | None:
    """What makes transformers' class of a config something else than a decoder."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    if config.is_encoder_decoder:
        return f"a {kind!r} model has an encoder, too (is_encoder_decoder is true)"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no causal language model of type {kind!r}"
    # Of classes that can be both, such as BERT's; gpt_neox has the key and is a decoder always.
    masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    key = next((k for k in ("is_decoder", "causal") if getattr(config, k, None) is False), None)
    if masked and key is not None:
        return f"tokens of a {kind!r} model read later ones where {key} is false"
    return None


@contextmanager
def _refusing(spec: DecoderSpec) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    # A wrong value in config.json shows in transformers as whatever its use raises: KeyError for
    # an activation, ZeroDivisionError for a head_dim, validation errors of several kinds.
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot build a {spec.model_type!r} decoder from config.json:"
            f" {short_reason(error)}; mend it or fetch it again"
        ) from error


def short_reason(error: Exception, limit: int = 240) -> str:
    """Type and words of someone else's error, in one line."""
    words = " ".join(str(error).split())
    words = words if len(words) <= limit else words[: limit - 3] + "..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def find_stack(model: nn.Module, spec: DecoderSpec) -> str:
    """Path of the list of blocks in the causal LM, "model.layers"."""
    leaf = spec.blocks[0].prefix.split(".")[-2:][0]
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == len(spec.blocks)
        and name.rpartition(".")[2] == leaf
    ]
    if not found:
        raise CheckpointError(
            f"transformers' {type(model).__name__} has no list of {len(spec.blocks)} blocks called"
            f" {leaf!r} as the checkpoint has; {remedy(spec)}"
        )
    shortest: str = min(found, key=len)
    return shortest


def set_parameter(model: nn.Module, path: str, value: Tensor) -> None:
    """Put a tensor in the place of a parameter."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(value, requires_grad=False))


def _compute_buffers(model: Any, spec: DecoderSpec, device: str) -> None:
    """Give real values to buffers that no checkpoint holds, the way from_pretrained does."""
    for path, module in model.named_modules():
        lost = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and name in module._non_persistent_buffers_set
        ]
        for name in lost:
            meta = module._buffers[name]
            module._buffers[name] = torch.full_like(meta, _unset(meta), device=device)
        if lost:
            model._init_weights(module)
        for name in lost:
            value = module._buffers[name]
            if value.numel() and bool((value != value).any() | (value == _unset(value)).all()):
                raise CheckpointError(
                    f"transformers does not say how to compute buffer {path}.{name}; {remedy(spec)}"
                )


def _unset(buffer: Tensor) -> float:
    """A value no computed buffer is made of, by which a forgotten one is noticed."""
    if buffer.dtype.is_floating_point:
        return float("nan")
    return 0 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min
