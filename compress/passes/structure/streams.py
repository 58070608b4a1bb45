"""The residual stream at the norms of a block, and what these make of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from compress.arch.forward.norms import StreamNorms
from compress.arch.forward.table import FORWARDS
from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec
from compress.arch.text_config import config_at, with_config_at
from compress.edits.repair.rotation import normalised

ATTENTION_READERS = frozenset({"q", "k", "v", "qkv", "q_a", "kv_a"})
MLP_READERS = frozenset({"router", "gate", "up", "gate_up"})


@dataclass(frozen=True, slots=True)
class Reading:
    """Linears of a block that read the stream at one place. norm: path of the norm before them, and
    None where there is none; path: of the module whose input is the stream."""

    linears: tuple[LinearSpec, ...]
    norm: str | None

    @property
    def path(self) -> str:
        return self.norm or self.linears[0].module


def readings(block: BlockSpec, norms: StreamNorms) -> Iterator[Reading]:
    """In the order in which the block computes them: attention's, then the MLP's."""
    sides = ((ATTENTION_READERS, norms.at.attention_in), (MLP_READERS, norms.at.mlp_in))
    for roles, norm in sides:
        yield Reading(tuple(x for x in block.linears if x.role in roles), norm)


@dataclass(frozen=True, slots=True, eq=False)
class StreamNorm:
    """A norm of the stream. gain: fp32 [hidden], with what the family adds to its weight; bias:
    [hidden] of a LayerNorm. None for none."""

    how: StreamNorms
    gain: Tensor | None = None
    bias: Tensor | None = None

    def of(self, stream: Tensor) -> Tensor:
        """fp32 [..., hidden]."""
        if self.how.kind == "layer":
            return layer_norm(stream.float(), stream.shape[-1:], self.gain, self.bias, self.how.eps)
        wide = normalised(stream, self.how.eps)
        return wide if self.gain is None else wide * self.gain


def norm_of(
    norms: StreamNorms, tensors: Mapping[str, Tensor], path: str | None, device: str
) -> StreamNorm | None:
    """The norm at a path; None for no path. tensors: by parameter path, as they are stored."""
    if path is None:
        return None
    gain = tensors[f"{path}.weight"].to(device, torch.float32) + norms.offset
    bias = tensors.get(f"{path}.bias")
    return StreamNorm(norms, gain, None if bias is None else bias.to(device, torch.float32))


def by_path(block: BlockSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A block's tensors by the paths of its parameters."""
    return {path: tensors[name] for name, path in block.modules if name in tensors}


def unscaled(config: Mapping[str, Any], spec: DecoderSpec, stream: float) -> Mapping[str, Any]:
    """config.json of a model that computes the same on the stream before that is multiplied by
    `stream`: norms with the eps that goes with it."""
    if stream == 1:
        return config
    key, default = FORWARDS[spec.family].eps
    text = config_at(config, spec.text_config)
    eps = float(text.get(key, default)) / stream**2
    return with_config_at(config, spec.text_config, {**text, key: eps})


def outside_factors(spec: DecoderSpec, stream: float) -> dict[str, float]:
    """What tensors outside of the blocks are multiplied by for a stream that is multiplied by
    `stream`. An embedding that is the head too is undone in the norm before the head."""
    if stream == 1:
        return {}
    factors = {spec.embedding: stream}
    if spec.tied:
        assert spec.final_norm is not None, "a model of the tables has a final norm"
        factors[spec.final_norm] = 1 / stream
    return factors
