"""What a bench says of each math: its speed, and what share of the bandwidth its weights take."""

from collections.abc import Sequence
from typing import Any

from compress.errors import CheckpointError
from compress.formats import Weights
from compress.speed.forecast import LoadShape
from compress.speed.products import workload_of
from compress.speed.roofline import Hardware, weights_read
from compress.speed.setting import SpeedSetting, math_of
from compress.speed.workload import Workload, decode_load


def by_math(
    weights: Weights,
    place: SpeedSetting,
    asked: LoadShape,
    measured: Sequence[dict[str, Any]],
    here: Hardware,
) -> list[dict[str, Any]]:
    """A row a batch of those that were measured with the math of `place`.

    weight_bytes: that a step reads in which every text gets a token. of_bandwidth: these bytes by
    the time from token to token, as a share of the bandwidth that was measured in this process;
    above 1 where caches hold the weights. None where texts have one token, and of what transformers
    computes.
    """
    work, math = _work(weights, place), math_of(weights, place)
    rows = []
    for found in measured:
        batch, between = found["batch"], found["between_tokens_p50_ms"]["measured"]
        read = None
        if work is not None:
            read = weights_read(work, decode_load(work, batch, asked.length))
        share = None
        if read is not None and between:
            share = float(f"{read / (between / 1000) / here.bandwidth:.3g}")
        rows.append(
            {
                "math": math,
                "batch": batch,
                "tokens_per_second": found["tokens_per_second"]["measured"],
                "weight_bytes": None if read is None else round(read),
                "of_bandwidth": share,
            }
        )
    return rows


def _work(weights: Weights, place: SpeedSetting) -> Workload | None:
    try:
        return workload_of(
            weights,
            dtype=place.arithmetic,
            kv_dtype=place.stored,
            device=place.device,
            math=math_of(weights, place),
        )
    except CheckpointError:
        return None
