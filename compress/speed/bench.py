"""`compress-model bench`: how fast the engine runs a checkpoint, beside what was expected."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.output.report_folder import report_folder
from compress.errors import CheckpointError, RequestError
from compress.events import Progress, note, silent
from compress.formats import Weights
from compress.machine.device import settle
from compress.machine.other_work import read_processor
from compress.report.units import duration
from compress.runtime.decoder.kv import KVCache, cache_bytes
from compress.runtime.engine.engine import Engine, EngineStats
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading.math import taken_maths
from compress.runtime.loading.open_engine import CACHE_SHARE, UNKNOWN_CONTEXT, Opening, open_engine
from compress.speed.by_math import by_math
from compress.speed.forecast import BLOCK, LoadShape, predicted_speed
from compress.speed.load import Speed, even_load, play, speed_of
from compress.speed.rates import Calibrated
from compress.speed.setting import (
    SpeedSetting,
    SpeedTexts,
    add_disturbance,
    asked_of,
    begin,
    begin_facts,
    math_of,
    open_checkpoint,
    path_of,
    predicted,
    speed_report,
    threads,
    write_report,
)
from compress.speed.timer import free_bytes
from compress.speed.workload import Workload
from compress_kernels.panels import Math

# A batch that nobody asked for is left out when it is expected to take longer.
PATIENCE_SECONDS = 60.0


def measure_speed(
    checkpoint: str | Path,
    texts: SpeedTexts | None = None,
    *,
    place: SpeedSetting | None = None,
    every_math: bool = False,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """How fast the engine runs a checkpoint, beside what was expected; as `predict_speed`.

    Batches that nobody asked for and that are expected to take over a minute are left out. A
    decoder that transformers computes is measured only. every_math: that the checkpoint takes is
    measured, one engine after the other; what is expected is of the first, that of `place`.
    """
    given = place or SpeedSetting()
    place, started = begin(given)
    texts = texts or SpeedTexts()
    with report_folder(out) as folder, threads(place):
        weights = open_checkpoint(checkpoint, sealed=folder is not None)
        math_of(weights, place)  # refused before anything is measured
        processor = read_processor()
        asked, explicit = asked_of(weights, texts), bool(texts.batches)
        if explicit:  # a batch that cannot be is refused before anything is measured
            _room(weights, asked, place)
        settle(given.device, progress)
        facts, here = begin_facts(place, asked, progress)
        found: Calibrated | None = None
        try:
            facts["checkpoint"], found = predicted(weights, asked, place, here, progress)
        except CheckpointError as error:
            facts["checkpoint"] = {
                "path": path_of(weights),
                "math": math_of(weights, place),
                "not_predicted": str(error),
            }
        chosen, left = _patient(found, asked, explicit=explicit)
        facts["left_out"] = left
        maths: list[dict[str, Any]] = []
        for math in _maths(weights, place, every=every_math):
            own = replace(place, math=math)
            first = not maths
            rows, notices = _measured(weights, found if first else None, chosen, own, progress)
            if first:
                facts["measured"], facts["checkpoint"]["notices"] = rows, notices
            maths += by_math(weights, own, chosen, rows, here)
        facts["maths"] = maths
        add_disturbance(facts, processor)
        if folder is not None:
            report = speed_report("bench", facts, weights, weights, place, started)
            write_report(report, folder)
        return facts


def _maths(weights: Weights, place: SpeedSetting, *, every: bool) -> Sequence[Math]:
    """That engines are opened with, the asked one or the usual one first."""
    own = math_of(weights, place)
    others = taken_maths(weights, place.arithmetic, place.device) if every else ()
    return list(dict.fromkeys((own, *others)))


def _patient(
    found: Calibrated | None, asked: LoadShape, *, explicit: bool
) -> tuple[LoadShape, dict[str, float]]:
    """What to measure, and the batches left out with the seconds that they are expected to take."""
    if explicit or found is None:
        return asked, {}
    seconds = {batch: predicted_speed(found, asked, batch).seconds for batch in asked.batches}
    left = {str(b): round(s, 1) for b, s in seconds.items() if s > PATIENCE_SECONDS}
    # One is measured in any case.
    left.pop(str(asked.batches[0]), None)
    kept = tuple(batch for batch in asked.batches if str(batch) not in left)
    return replace(asked, batches=kept), left


def _measured(
    weights: Weights,
    found: Calibrated | None,
    asked: LoadShape,
    place: SpeedSetting,
    progress: Progress,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Of each batch what came, and what was expected; notices of the engine."""
    how = Opening(
        dtype=place.arithmetic,
        kv_dtype=place.stored,
        math=math_of(weights, place),
        device=place.device,
        cache_tokens=_room(weights, asked, place),
        reuse=False,
    )
    engine, notices = open_engine(weights, how)
    vocabulary = weights.spec.vocab
    play(engine, even_load(1, asked.prompt, min(4, asked.output), vocabulary))
    rows = []
    for batch in asked.batches:
        predicted = None if found is None else predicted_speed(found, asked, batch)
        about = "" if predicted is None else f", about {duration(predicted.seconds)}"
        texts = "text" if batch == 1 else "texts"
        said = f"{how.math}: " if found is None else ""
        progress(
            note("measure", f"{said}{batch} {texts} of {asked.prompt} + {asked.output}{about}")
        )
        engine.stats = EngineStats()
        got = speed_of(play(engine, even_load(batch, asked.prompt, asked.output, vocabulary)))
        held = _held(engine, None if found is None else found.work, asked, batch)
        rows.append({"batch": batch, **_beside(got, predicted), **held})
    return rows, list(notices)


def _held(
    engine: Engine, work: Workload | None, asked: LoadShape, batch: int
) -> dict[str, dict[str, int | None]]:
    """Bytes of the blocks that texts held at once at most, beside those of whole texts of which
    layers with a window keep what they see; nothing where transformers keeps them."""
    cache = engine.runner.cache if isinstance(engine.runner, LocalRunner) else None
    if not isinstance(cache, KVCache):
        return {}
    count = min(batch, engine.stats.running)
    expected = None if work is None else count * work.kv_bytes(asked.whole)
    return {"cache_bytes": {"measured": cache.nbytes(engine.stats.held), "expected": expected}}


def _room(weights: Weights, asked: LoadShape, place: SpeedSetting) -> int:
    """Positions of the cache: for the largest batch, and for a whole context where that costs
    little. RequestError where the memory does not do."""
    spec = weights.spec
    needed = max(asked.batches) * (-(-(asked.prompt + asked.output) // BLOCK) + 1) * BLOCK
    free = free_bytes(torch.device(place.device))
    token = cache_bytes((block.sizes.cache() for block in spec.blocks), place.stored)
    if free is None:
        return needed
    if needed * token > free:
        raise RequestError(
            f"keys and values of {needed} tokens take {needed * token / 1e9:.1f} GB,"
            f" {free / 1e9:.1f} GB are free; take a smaller --batch"
        )
    context = spec.context or UNKNOWN_CONTEXT
    return max(needed, context) if context * token < CACHE_SHARE * free else needed


_FIGURES = {
    "tokens_per_second": ("tokens_per_second", 1),
    "first_token_p50_ms": ("first_p50", 1000),
    "first_token_p99_ms": ("first_p99", 1000),
    "between_tokens_p50_ms": ("between_p50", 1000),
    "between_tokens_p99_ms": ("between_p99", 1000),
}


def _beside(got: Speed, predicted: Speed | None) -> dict[str, Any]:
    """Figure -> measured, expected."""
    return {
        name: {
            "measured": _figure(got, key, unit),
            "expected": None if predicted is None else _figure(predicted, key, unit),
        }
        for name, (key, unit) in _FIGURES.items()
    }


def _figure(speed: Speed, key: str, unit: int) -> float | None:
    value: float | None = getattr(speed, key)
    return None if value is None else float(f"{unit * value:.4g}")
