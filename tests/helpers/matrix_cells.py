"""One calibrated result in every format, and what a loader makes of it beside our own reading."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.matrix.rows import Row
from compress.checkpoint import Checkpoint
from compress.errors import CompressError
from compress.formats import CODECS, Verdict, Weights, open_weights
from compress.formats.runtimes.judge import runtimes
from compress.plan import sensitivity_cache
from compress.quant.activations import fake_quantize
from compress.quant.tensor import InputQuantization
from compress.verbs import export, run
from helpers import tiny_models
from helpers.greedy import greedy
from helpers.in_transformers import load
from helpers.short_runs import recipe, text_source

# Blocks and groups of 128 divide all layers, k and v too; vLLM on CPU takes this head size.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Two prompts of 24 tokens, and so many greedy ones behind each.
PROMPTS = torch.arange(1, 49).view(2, 24)
NEW = 16


@dataclass(frozen=True, slots=True)
class Exported:
    """folder: None where the export was refused, for `reason`."""

    folder: Path | None
    reason: str
    verdicts: tuple[Verdict, ...]

    def of(self, runtime: str) -> Verdict:
        return next(v for v in self.verdicts if v.runtime == runtime)


@dataclass(frozen=True, slots=True)
class Made:
    """What a row's recipe made of `source`: `origin`, and that in every format."""

    source: Path
    origin: Path
    formats: dict[str, Exported]


MakeRow = Callable[[Row], Made]
Round = Callable[[Tensor, InputQuantization], Tensor]


@dataclass(frozen=True, slots=True)
class Outputs:
    """logits: fp32 [2, 24, vocab]. tokens: [2, NEW], greedy."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Reference:
    """Ours in fp32; steps [2, NEW, vocab]: the logits that its tokens are the largest of."""

    outputs: Outputs
    steps: Tensor


def maker(folder: Path) -> MakeRow:
    """Makes each row at its first call."""
    source = tiny_models.make("llama", folder / "source", **SIZES)
    made: dict[str, Made] = {}

    def make_once(row: Row) -> Made:
        if row.name not in made:
            place = folder / str(len(made))
            place.mkdir()
            data = text_source(place) if row.calibrated else None
            made[row.name] = make(row, source, place, data)
        return made[row.name]

    return make_once


def make(
    row: Row,
    source: Path,
    folder: Path,
    data: dict[str, Any] | None,
    formats: Iterable[str] = CODECS,
) -> Made:
    """Run the row's recipe once, with `data` to calibrate on, and export what it made."""
    calibration = {} if data is None else {"calibration": data}
    origin = folder / "origin"
    with pytest.MonkeyPatch.context() as patch:  # sensitivities are measured, not found
        patch.setattr(sensitivity_cache, "cache_folder", lambda: folder / "cache")
        run(recipe(*row.own_stages(), **row.rest, **calibration), source, origin)
    weights = opened(origin)
    own = weights.format.name
    others = {name: _export(origin, name, folder) for name in formats if name != own}
    return Made(source, origin, {own: Exported(origin, "", _verdicts(weights)), **others})


def _export(origin: Path, fmt: str, folder: Path) -> Exported:
    try:
        report = export(origin, fmt, folder / fmt)
    except CompressError as refusal:
        return Exported(None, str(refusal).replace(str(origin), "the source"), ())
    return Exported(folder / fmt, "", tuple(report.runtimes))


def opened(folder: Path) -> Weights:
    weights = open_weights(Checkpoint.open(folder))
    assert weights.format.coded
    return weights


def _verdicts(weights: Weights) -> tuple[Verdict, ...]:
    found = {x.tensor: weights.scheme(x.name) for x in weights.spec.all_linears()}
    schemes = {name: scheme for name, scheme in found.items() if scheme is not None}
    tensors = (weights.quantized(name) for name in schemes)
    ordered = any(t is not None and t.g_idx is not None for t in tensors)
    return tuple(
        runtimes(
            weights.format.name, schemes, weights.spec, g_idx=ordered, kv_cache=weights.kv_cache
        )
    )


def reference(
    made: Made,
    *,
    inputs: Round | None = fake_quantize,
    cache: Round | None = fake_quantize,
    rounded: bool = False,
    side: bool = True,
) -> Reference:
    """transformers' model of the source in fp32 with the origin's weights as we dequantize them,
    and with inputs and cache rounded as the origin says.

    inputs, cache: how to round; None for as they are. rounded: weights to the source's
    dtype. side: False is without LLM.int8()'s calibrated columns, whose file only we know.
    """
    weights = opened(made.origin)
    weights = weights if side else replace(weights, side=None)
    with reading(made.source, weights, inputs=inputs, cache=cache, rounded=rounded) as model:
        return Reference(*outputs(model))


@contextmanager
def reading(
    source: Path,
    weights: Weights,
    *,
    inputs: Round | None = fake_quantize,
    cache: Round | None = fake_quantize,
    rounded: bool = False,
) -> Iterator[Any]:
    """transformers' model of the source in fp32 with these weights, rounding as `reference` says
    while the context is open."""
    model = _model(source, weights, rounded=rounded)
    if inputs is not None:
        for linear in weights.spec.all_linears():
            if (how := weights.activation(linear.name)) is not None:
                _round_inputs(model.get_submodule(linear.name), inputs, how)
    with _rounded_cache(weights, cache):
        yield model


def _round_inputs(module: Any, inputs: Round, how: InputQuantization) -> None:
    module.register_forward_pre_hook(lambda _, given: (inputs(given[0], how), *given[1:]))


def _model(source: Path, weights: Weights, *, rounded: bool) -> Any:
    """A head of its own also where it is tied, since stages may have untied it."""
    model, dtype = load(source, tie_word_embeddings=False), weights.plain_dtype
    state = {}
    for name in model.state_dict():
        tied = name == "lm_head.weight" and weights.spec.head is None
        stored = weights.spec.embedding if tied else name
        quantized = weights.quantized(stored)
        weight = weights.read(stored) if quantized is None else quantized.dequantize()
        state[name] = weight.to(dtype).float() if rounded else weight.float()
    model.load_state_dict(state)
    return model


@contextmanager
def _rounded_cache(weights: Weights, cache_as: Round | None) -> Iterator[None]:
    """transformers' cache, rounding keys and values by the weights' own scales, if any."""
    from transformers.cache_utils import DynamicCache

    update = DynamicCache.update
    scales = [weights.cache(block) for block in weights.spec.blocks]

    def rounded(cache: Any, k: Tensor, v: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        if cache_as is not None and (pair := scales[layer]) is not None:
            k, v = cache_as(k, pair[0]), cache_as(v, pair[1])
        return update(cache, k, v, layer, *rest, **named)

    DynamicCache.update = rounded
    try:
        yield
    finally:
        DynamicCache.update = update


def outputs(model: Any) -> tuple[Outputs, Tensor]:
    """Of a transformers model, with the logits of its greedy steps."""
    with torch.no_grad():
        logits = model(PROMPTS).logits.float()
    tokens, steps = greedy(model, PROMPTS, NEW)
    return Outputs(logits, tokens), steps


def difference(expected: Reference, found: Outputs) -> float:
    """The largest of a logit."""
    return float((expected.outputs.logits - found.logits).abs().max())


def facts(expected: Reference, logits: float, tokens: Tensor, bound: float) -> dict[str, Any]:
    """Of a cell that a loader opened: whether it is right.

    logits: their largest difference. tokens [2, NEW]: the loader's greedy ones; counted up to the
    first of a prompt that is not ours. That may differ where the loader's difference, at most
    `bound`, can turn two of our logits around: `gap` is how far they are apart, None where all
    tokens are equal.
    """
    equal, gap = 0, None
    for ours, theirs, steps in zip(expected.outputs.tokens, tokens, expected.steps, strict=True):
        unlike = (ours != theirs).nonzero()
        first = int(unlike[0]) if len(unlike) else len(ours)
        equal += first
        if first < len(ours):
            gap = max(gap or 0.0, float(steps[first, ours[first]] - steps[first, theirs[first]]))
    right = logits <= bound and (gap is None or gap <= 2 * bound)
    return {
        "outcome": "yes" if right else "wrong",
        "logits": logits,
        "bound": bound,
        "tokens": [equal, tokens.numel()],
        "gap": gap,
    }


def failure(problem: Exception) -> str:
    """A loader's own words, on one line."""
    return " ".join(f"{type(problem).__name__}: {problem}".split())
