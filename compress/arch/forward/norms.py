"""What norms of the residual stream compute, and where they stand; `Norms` has their names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compress.arch.forward.table import FORWARDS, Norms
from compress.arch.forward.values import number
from compress.arch.spec import DecoderSpec
from compress.arch.text_config import config_at


@dataclass(frozen=True, slots=True)
class StreamNorms:
    """kind, eps, offset: as in ForwardSpec. at: where in a block they are. embedding_scale: what
    embeddings are multiplied by before the first of them."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float
    at: Norms
    embedding_scale: float

    @property
    def pass_rotations(self) -> bool:
        """Whether what they give turns with the stream once gains are in what reads them: RMS norms
        before attention and MLP alone."""
        before = self.at.attention_in and self.at.mlp_in
        behind = self.at.attention_out or self.at.mlp_out
        return self.kind == "rms" and bool(before) and not behind


def stream_norms(config: Mapping[str, Any], spec: DecoderSpec) -> StreamNorms:
    """Of a decoder in the tables. config: config.json. CheckpointError for an eps that is none."""
    row = FORWARDS[spec.family]
    eps = number(config_at(config, spec.text_config), *row.eps)
    scale = spec.hidden**0.5 if row.scaled_embedding else 1.0
    return StreamNorms(row.norm, eps, row.norm_offset, row.norms, scale)
