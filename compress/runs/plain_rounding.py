"""The source with its layers plainly rounded: what a recipe that looks at data is measured beside.

Nothing of it is written: a weight is rounded when an evaluation reads it, and forgotten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.formats import Weights
from compress.formats.weights import DenseWeights
from compress.methods import METHODS, plain
from compress.methods.plain import PlainOptions
from compress.methods.rtn import RtnConfig
from compress.plan.layers import ModulePlan
from compress.plan.output_format import scale_dtype
from compress.plan.plan import Plan
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization
from compress.runs.whole.plain_blocks import PlainBlocks

NOT_ASKED = "the recipe has evaluation.plain false"
EDITED = "edits changed the model before its layers were rounded"
ITSELF = "the result is plainly rounded itself"
FOLDED = "inputs have scales from calibration, which are those of scaled channels"
OUTLIERS = "its outlier columns are those that calibration found"

# Numbers that are rounded at once, 16 MB in fp32: beside a block in fp32 a search of scales takes a
# few times as much. Runs of all of a 7B model's widest matrix would take 0.7 GB there.
AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class PlainRounding(DenseWeights):
    """A dense checkpoint whose planned layers read as round-to-nearest leaves them.

    Scales are searched for the least squared error of the weights, without data. Inputs, keys and
    values are rounded as in the result. modules: by tensor; options: of each of the plan's stages.
    """

    result: Weights
    modules: Mapping[str, ModulePlan]
    options: tuple[PlainOptions, ...]
    fmt: str

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        module = self.modules.get(tensor)
        if module is None:
            return self.checkpoint.read(tensor, check_finite=check_finite)
        weight = self._source(module)  # [N, K]
        rounded = self._in_runs(module, weight)
        return rounded.t().contiguous() if module.linear.transposed else rounded

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        if tensor in self.modules:
            return self.read(tensor, check_finite=check_finite)[start:stop]
        return self.checkpoint.read_rows(tensor, start, stop, check_finite=check_finite)

    def activation(self, linear: str) -> InputQuantization | None:
        return self.result.activation(linear)

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        return self.result.cache(block)

    def _source(self, module: ModulePlan) -> Tensor:
        weight = self.checkpoint.read(module.linear.tensor, check_finite=True)
        return weight.t() if module.linear.transposed else weight

    def _in_runs(self, module: ModulePlan, weight: Tensor) -> Tensor:
        """Rounded weight [N, K] in `plain_dtype`; what shares one number with others, beside
        them."""
        if module.scheme.spans_merged:
            others = [m for m in self._merged(module) if m is not module]
            return self._rounded(module, [weight, *map(self._source, others)])
        rounded = torch.empty(weight.shape, dtype=self.plain_dtype)
        for start in range(0, len(weight), _rows(module)):
            run = slice(start, start + _rows(module))
            rounded[run] = self._rounded(module, [weight[run]])
        return rounded

    def _rounded(self, module: ModulePlan, weights: Sequence[Tensor]) -> Tensor:
        """The first of weights [n_i, K] that are rounded together."""
        outcomes = plain.quantize(
            [weight.float() for weight in weights],
            module.scheme,
            self.options[module.stage],
            scale_dtype=scale_dtype(self.fmt, weights[0].dtype),
        )
        return outcomes[0].quantized.dequantize(self.plain_dtype)

    def _merged(self, module: ModulePlan) -> list[ModulePlan]:
        """Linears that runtimes merge into one matrix with it."""
        if module.linear.fused is None:
            return [module]
        return [m for m in self.modules.values() if _merges(m) == _merges(module)]


def _rows(module: ModulePlan) -> int:
    """Of a weight that are rounded at once; those that share a scale stay together."""
    (n, k), shared = module.linear.shape, module.scheme.rows_per_scale(module.linear.shape[0])
    return min(n, max(1, AT_ONCE // k // shared) * shared)


def _merges(module: ModulePlan) -> tuple[int | None, str | None, int | None]:
    return module.block, module.linear.fused, module.linear.expert


def plainly_rounded(plan: Plan, source: Weights, result: Weights) -> DenseWeights | None:
    """The source as round-to-nearest with the plan's schemes, or types of blocks, leaves it; None
    as `why_not` says."""
    if not plan.compressed or why_not(plan) is not None:
        return None
    assert isinstance(source, DenseWeights), "a run rounds dense weights"
    if plan.file is not None:
        types = {m.linear.tensor: m for m in plan.file.modules}
        return PlainBlocks(source.checkpoint, source.spec, types)
    options = tuple(
        RtnConfig("mse", getattr(stage.config, "signs", "auto")) for stage in plan.recipe.stages
    )
    modules = {m.linear.tensor: m for m in plan.modules}
    return PlainRounding(source.checkpoint, source.spec, result, modules, options, plan.format)


def why_not(plan: Plan) -> str | None:
    """Why a result is not measured beside plain rounding; None where it is, and where nothing is
    rounded."""
    if not plan.compressed:
        return None
    if plan.recipe.evaluation is not None and not plan.recipe.evaluation.plain:
        return NOT_ASKED
    if plan.edits:
        return EDITED
    trained = any(planned.tunes for planned in plan.passes)
    methods = [(METHODS[stage.method], stage.config) for stage in plan.recipe.stages]
    folded = any(method.fold is not None for method, _ in methods)
    if not trained and not any(method.needs(config).data for method, config in methods):
        return ITSELF
    found = (_unfit(m.scheme, folded=folded) for m in plan.modules)
    return next((reason for reason in found if reason is not None), None)


def _unfit(scheme: QuantScheme, *, folded: bool) -> str | None:
    """Why no plain rounding under a scheme is measured: it would lack what calibration gave."""
    inputs = scheme.activation
    if inputs is not None and inputs.outliers == "calibrated":
        return OUTLIERS
    if inputs is not None and not inputs.dynamic and folded:
        return FOLDED
    return plain.why_not(scheme)
