"""Linears as a plan sees them: to be quantized, or left with a reason."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from compress.arch.spec import LinearSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtype_codes import PLAIN_DTYPES
from compress.checkpoint.shards.layout import Entry, nbytes
from compress.edits.latent.stock import may_be_landed
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS
from compress.formats.storage import WeightStorage
from compress.methods import METHODS
from compress.quant.scheme import QuantScheme
from compress.recipe import Recipe
from compress.recipe.matching import assign
from compress.recipe.placing import placed

LATENT_MAKERS = ("kv_a", "q_a")
TOO_SMALL = (
    "by config.json mla may have made it, and rows that make a latent are then of 1e-9, which this"
    " scheme or format stores as 0"
)


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One linear that will be quantized, by which stage of the recipe, and its bytes on disk.

    folds: stages that scale its channels before.
    """

    linear: LinearSpec
    block: int | None
    stage: int
    method: str
    scheme: QuantScheme
    g_idx: bool
    bytes_before: int
    bytes_after: int
    folds: tuple[int, ...] = ()

    @property
    def how(self) -> str:
        """How it is stored, in words."""
        return self.scheme.describe()

    def storage(self, dtype: str) -> WeightStorage:
        """How its weight will be stored. dtype: code of the source's."""
        return WeightStorage.of_linear(self.linear, self.scheme, dtype, act_order=self.g_idx)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A linear that stays as it is, and why."""

    linear: LinearSpec
    block: int | None
    reason: str


def calibrated_head(recipe: Recipe, modules: Iterable[ModulePlan]) -> ModulePlan | None:
    """The output head, where a stage quantizes it by what it reads."""
    head = next((m for m in modules if m.linear.role == "head"), None)
    if head is None:
        return None
    stage = recipe.stages[head.stage]
    calibrated = METHODS[stage.method].needs_calibration(stage.config, stage.scheme)
    return head if calibrated or head.folds else None


def assign_layers(
    recipe: Recipe, model: Outline, fmt: str
) -> tuple[list[ModulePlan], list[Skipped]]:
    """Every linear of the decoder: with the stage that takes it, or with why none does."""
    spec = model.spec
    assigned = assign(recipe.stages, spec.all_linears())
    blocks = {linear.name: block.index for block in spec.blocks for linear in block.linears}
    modules, skipped, small = [], [], may_be_landed(model)
    for linear in spec.all_linears():
        stage, block = assigned.stage_of.get(linear.name), blocks.get(linear.name)
        if stage is None:
            skipped.append(Skipped(linear, block, assigned.reason_of[linear.name]))
        elif small and _is_too_small(linear, recipe.stages[stage].scheme, fmt):
            skipped.append(Skipped(linear, block, TOO_SMALL))
        else:
            module = _module(recipe, stage, linear, block, model, fmt)
            modules.append(replace(module, folds=assigned.folds_of.get(linear.name, ())))
    return modules, skipped


def _is_too_small(linear: LinearSpec, scheme: QuantScheme | None, fmt: str) -> bool:
    """Whether rows as small as those that make a latent (compress/blocks/landed.py) would be 0: in
    fp16, below one scale that larger rows share, or below a scale that is itself rounded."""
    if linear.role not in LATENT_MAKERS or scheme is None:
        return False
    shared = scheme.granularity in ("tensor", "block") or scheme.is_fp4
    return shared or FORMATS[fmt].scale_dtype == "F16" or fmt == "bitsandbytes"


def _module(
    recipe: Recipe,
    stage: int,
    linear: LinearSpec,
    block: int | None,
    model: Outline,
    fmt: str,
) -> ModulePlan:
    chosen = recipe.stages[stage]
    method, config, scheme = chosen.method, chosen.config, chosen.scheme
    assert scheme is not None, "matching.assign gives a layer to a stage that says how it is stored"
    g_idx = METHODS[method].needs(config).g_idx
    if g_idx and scheme.granularity != "group":
        raise RecipeError(
            f"{chosen.at('act_order')}: 'group' needs granularity 'group', not"
            f" {scheme.granularity!r}; use 'static'"
        )
    info = model.tensors[linear.tensor]
    if info.dtype not in PLAIN_DTYPES:
        raise CheckpointError(
            f"tensor {linear.tensor} is stored as {info.dtype}; {', '.join(PLAIN_DTYPES)} can be"
            " quantized, so convert it or add the layer to ignore"
        )
    with placed(recipe, "output.format"):
        how = WeightStorage.of_linear(linear, scheme, info.dtype, act_order=g_idx)
        size = sum(nbytes(entry) for entry in FORMATS[fmt].layout(how))
    return ModulePlan(linear, block, stage, method, scheme, g_idx, info.nbytes, size)


def output_tensors(
    model: Outline, modules: Iterable[ModulePlan], fmt: str
) -> dict[str, tuple[Entry, ...]]:
    """For every tensor of the model the entries that it becomes."""
    planned = {m.linear.tensor: m for m in modules}
    out: dict[str, tuple[Entry, ...]] = {}
    for name, info in model.tensors.items():
        m = planned.get(name)
        if m is None:
            out[name] = ((name, info.dtype, info.shape),)
        else:
            out[name] = tuple(FORMATS[fmt].layout(m.storage(info.dtype)))
    written = Counter(t[0] for group in out.values() for t in group)
    clash = [name for name, n in written.items() if n > 1]
    if clash:
        raise CheckpointError(f"tensor {clash[0]} already exists in the source; cannot write it")
    return out
