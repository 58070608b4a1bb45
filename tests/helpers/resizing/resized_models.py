"""Tiny models of all families, cut by compress.arch.resize and loaded by transformers; and beside
them the source with zeros in place of what goes, made from roles and shapes by nothing of ours."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from compress.arch.describe import describe
from compress.arch.resize.config import resized
from compress.arch.resize.cut import Kept, cut, cut_name
from compress.arch.resize.entries import entries
from compress.arch.resize.shape import Shape
from compress.arch.spec import DecoderSpec, LinearSpec

IDS = torch.arange(48).view(2, 24) * 5
LAYERS = 3
WIDTH = 16  # of a head
LAYER_NORM = ("gpt2", "gpt_neox", "opt")
# Keys of the epsilon of norms, so small here that zeroed channels change nothing but a factor.
EPS = {"gpt2": "layer_norm_epsilon", "gpt_neox": "layer_norm_eps"}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_layer": LAYERS},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tiny model in fp32 with three blocks. model: as transformers loads it."""

    config: dict[str, Any]
    state: State
    spec: DecoderSpec
    model: Any


def options_of(family: str) -> dict[str, Any]:
    """Of tiny_models.make."""
    layers = {} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    eps = {} if family == "opt" else {EPS.get(family, "rms_norm_eps"): 1e-12}
    return {"dtype": "fp32", **layers, **OPTIONS.get(family, {}), **eps}


def read(folder: Path) -> Source:
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    return Source(config, state, describe(config, shapes(state)), load(folder))


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def cut_model(
    source: Source, shape: Shape, kept: Callable[[int], Kept], hidden: int | None = None
) -> tuple[dict[str, Any], State]:
    """Config and tensors of a result. kept: by index of the source's block. hidden: as of
    `resized`.

    Holds what a plan is promised: the entries are the tensors, and they are of the config.
    """
    spec = source.spec
    config = resized(source.config, spec, shape, hidden).config
    blocks = {name: block for block in spec.blocks for name, _ in block.modules}
    state: State = {}
    for name, value in source.state.items():
        block = blocks.get(name)
        stays = kept(0 if block is None else block.index)
        new = cut_name(
            spec, name, Kept(hidden=stays.hidden) if block is None else stays, shape.layers
        )
        if new is not None:
            state[new] = cut(block, name, value, stays).contiguous()
    tensors = [(name, "F32", tuple(value.shape)) for name, value in source.state.items()]
    planned = entries(spec, tensors, shape)
    assert {name: dims for name, _, dims in planned} == shapes(state)
    assert len(planned) == len(state)
    assert {dtype for _, dtype, _ in planned} == {"F32"}
    describe(config, shapes(state))
    return config, state


def write(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> Any:
    """transformers' class of a folder's config, which must have exactly the folder's tensors."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any, state: Mapping[str, Tensor] | None = None) -> Tensor:
    """state: tensors to use in place of the model's, by its own names."""
    options = {"attention_mask": torch.ones_like(IDS)}
    with torch.no_grad():
        found: Tensor = functional_call(model, dict(state or {}), (IDS,), options).logits
    return found


def logits_of(source: Source, state: State, folder: Path) -> Tensor:
    """Of the source with other values in its tensors, which may lie stacked in the module."""
    if state.keys() <= source.model.state_dict().keys():
        return logits(source.model, state)
    write(folder, source.config, state)
    return logits(load(folder))


def zero_inputs(state: State, linear: LinearSpec, stays: Tensor, run: int = 1) -> None:
    """Zero a linear's columns but for runs of `run` of them."""
    weight = state[linear.tensor].T if linear.transposed else state[linear.tensor]
    goes = torch.ones(weight.shape[1] // run, dtype=torch.bool)
    goes[stays] = False
    weight[:, goes.repeat_interleave(run)] = 0


def clone(source: Source) -> State:
    return {name: value.clone() for name, value in source.state.items()}


def writers(spec: DecoderSpec, blocks: Sequence[int]) -> list[LinearSpec]:
    """What adds to the residual."""
    return [x for i in blocks for x in spec.blocks[i].linears if x.role in ("o", "down")]


def without_heads(source: Source, kept: Mapping[int, Kept]) -> State:
    """Zeros where the heads that go are read; where all heads share a norm (olmo2), zeros in them
    as well, and gains that make up for the mean of more squares."""
    zeroed = clone(source)
    for block in source.spec.blocks:
        heads, kv_heads = kept[block.index].heads, kept[block.index].kv_heads
        if heads is None:
            group = block.sizes.heads // block.sizes.kv_heads
            queries = torch.arange(block.sizes.heads)
            heads = queries[torch.isin(queries // group, kv_heads)]
        for linear in block.linears:
            if linear.role == "o":
                zero_inputs(zeroed, linear, heads, WIDTH)
        for norm, stays in (("q", heads), ("k", kv_heads)):
            gains = zeroed.get(f"{block.prefix}.self_attn.{norm}_norm.weight", torch.ones(WIDTH))
            if len(gains) > WIDTH and stays is not None:
                rows = zeroed[f"{block.prefix}.self_attn.{norm}_proj.weight"]
                goes = torch.ones(len(gains) // WIDTH, dtype=torch.bool)
                goes[stays] = False
                rows[goes.repeat_interleave(WIDTH)] = 0
                gains *= (len(stays) * WIDTH / len(gains)) ** 0.5
    return zeroed
