"""A decoder in no table: all that is known of it is what transformers' class shows when opened."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.formats import FORMATS


def opened(
    config: Mapping[str, Any],
    spec: DecoderSpec,
    packed: Sequence[LinearSpec],
    fmt: str,
    *,
    streamed: bool = False,
) -> DecoderSpec:
    """The spec with what transformers' class says; a decoder in a table as it is.

    config: config.json. packed: linears whose weights the result will hold as codes; they are
    weights again in a dense one. fmt: of the result, a key of FORMATS. streamed: whether the run
    itself reads blocks (calibration, evaluation).

    No weight is read. Raises CheckpointError for a class that cannot be built or run block by
    block, for one that reads a packed weight itself, and for one that is no decoder.
    """
    if spec.family != "generic":
        return spec
    # Late: a data-free run of a decoder in a table never loads transformers.
    from compress.blocks.rehearsal import rehearse
    from compress.blocks.skeleton import Skeleton

    skeleton = Skeleton(config, spec, dtype=torch.float32)
    coded = packed if FORMATS[fmt].coded else ()
    decoded = FORMATS[fmt].decoded_first
    unnamed = rehearse(skeleton, coded, decoded=decoded, streamed=streamed)
    return replace(spec, unnamed=unnamed)
