"""Stages with a target: their layers, what each may cost, and the ordinary stages that come of it.

A recipe with a target is settled before the run: once the sensitivities are known, each such stage
has one of the schemes that were chosen and overrides for the layers of the others. All that
follows, the result's recipe.yaml too, sees an ordinary recipe.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.layout import nbytes
from compress.edits import reads_calibration
from compress.errors import RecipeError
from compress.formats import FORMATS
from compress.formats.storage import WeightStorage
from compress.methods import METHODS
from compress.methods.budget import Option, bytes_for, choose
from compress.methods.budget import Unit as Choosable
from compress.plan.output_format import choose_format
from compress.plan.whole.choosable import choosable, with_types
from compress.plan.whole.file import whole_stage
from compress.quant.ggml_kinds import KINDS, Kind
from compress.quant.scheme import QuantScheme, Signs
from compress.recipe import Recipe, Stage
from compress.recipe.matching import select
from compress.recipe.schema import Claim

UNITS_OF_LOSS = {"kl": "nats a token", "output_error": "of the energy of blocks' outputs"}


# How layers may be stored: a scheme, or a type of llama.cpp's blocks.
Candidate = QuantScheme | Kind


def waits_for_prune(recipe: Recipe) -> bool:
    """Whether a stage and a prune in front of it have yet to share the bytes of a budget."""
    return any(x.target is not None and x.target.of is not None for x in recipe.stages)


@dataclass(frozen=True, slots=True)
class BudgetUnit:
    """Layers of a block that are stored alike. stage: of the recipe as given. schemes: those of its
    candidates that fit the layers; sizes: bytes of all layers under each. signs: of the stage.

    Of a file that is rounded whole the schemes are types of blocks, and one unit has no layers:
    what the file holds besides, which a target in bytes is for as well.
    """

    name: str
    stage: int
    block: int
    linears: tuple[LinearSpec, ...]
    schemes: tuple[Candidate, ...]
    sizes: tuple[int, ...]
    sensitivity: str
    signs: Signs

    @property
    def weights(self) -> int:
        return sum(x.shape[0] * x.shape[1] for x in self.linears)

    @property
    def coarsest(self) -> Candidate:
        """The scheme of fewest bits; the first of them."""
        return min(self.schemes, key=lambda scheme: scheme.bits)


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """A layer's loss under a scheme is its share times its error under that scheme.

    shares: by layer name. errors: by layer name, then by the scheme's `describe()`.
    """

    shares: Mapping[str, float]
    errors: Mapping[str, Mapping[str, float]]

    def loss(self, unit: BudgetUnit, scheme: Candidate) -> float:
        label = scheme.describe()
        return sum(self.shares[x.name] * self.errors[x.name][label] for x in unit.linears)


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """What was chosen by the targets of a recipe.

    targets: in words. sensitivity: what the losses are. predicted: their sum; None while nothing is
    measured, when every layer stands at its smallest scheme. shares: by layer, what a layer's error
    in the report counts for. low, high: bytes of the layers, from the smallest schemes to the
    targets. open_layers: whose scheme waits for a measurement. notes: candidates that some
    layers cannot take.
    """

    targets: tuple[str, ...]
    sensitivity: str
    predicted: float | None
    shares: Mapping[str, float]
    low: int
    high: int
    open_layers: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the choice waits for a measurement."""
        return self.predicted is None

    def to_json(self) -> dict[str, Any]:
        return {
            "targets": list(self.targets),
            "sensitivity": self.sensitivity,
            "predicted_loss": self.predicted,
            "layer_bytes": [self.low, self.high],
        }


def budget_units(
    recipe: Recipe, model: Outline, given: Outline | None = None
) -> tuple[BudgetUnit, ...]:
    """The units of all stages with a target, in the order of the blocks; none without such stages.
    model: whose layers the stages round. given: the run's source; without it a stage that rounds
    the whole model has none yet.

    RecipeError for a layer that no candidate fits.
    """
    if all(stage.target is None for stage in recipe.stages):
        return ()
    if (whole := whole_stage(recipe)) is not None:
        return () if given is None else tuple(_of_file(recipe, whole, model, given))
    spec = model.spec
    fmt = choose_format(replace(recipe, stages=tuple(one_by_one(recipe.stages))))
    blocks = {x.name: block.index for block in spec.blocks for x in block.linears}
    units = []
    for stage in recipe.stages:
        if stage.target is not None:
            names = set(select(stage, spec.all_linears())[0])
            taken = [x for x in spec.all_linears() if x.name in names]
            _refuse_split(stage, names, spec)
            for members in _alike(stage, taken, blocks):
                units.append(_unit(stage, members, blocks, model, fmt))
    return tuple(units)


def _of_file(recipe: Recipe, stage: Stage, model: Outline, given: Outline) -> Iterator[BudgetUnit]:
    found = choosable(recipe, stage, model, given)
    if not found.tensors:
        raise RecipeError(
            f"{stage.at('candidates')}: no linear of a block is left to choose a type for; take"
            " types out, or candidates and target"
        )
    how = stage.sensitivity, stage.signs
    for x in found.tensors:
        name = x.linears[0].name
        yield BudgetUnit(name, stage.index, x.block, x.linears, x.kinds, x.sizes, *how)
    whole = (KINDS["F32"],)
    yield BudgetUnit("the rest of the file", stage.index, -1, (), whole, (found.rest,), *how)


def _refuse_split(stage: Stage, names: Collection[str], spec: DecoderSpec) -> None:
    """RecipeError where the target chooses for some of what runtimes merge: the others' scheme
    would be another one, or the same by chance."""
    for block in spec.blocks:
        taken = {(x.fused, x.expert): x.name for x in block.linears if x.name in names}
        for x in block.linears:
            if x.fused and x.name not in names and (x.fused, x.expert) in taken:
                raise RecipeError(
                    f"{stage.at('targets')}: {taken[x.fused, x.expert]} gets its scheme by the"
                    f" target and {x.name} does not; runtimes merge the two into one matrix, so"
                    " leave both to the target, or neither"
                )


def one_by_one(stages: Sequence[Stage]) -> Iterator[Stage]:
    """A stage for each candidate."""
    for stage in stages:
        schemes = stage.candidates or (stage.scheme,)
        yield from (replace(stage, scheme=scheme) for scheme in schemes)


def _alike(
    stage: Stage, linears: Sequence[LinearSpec], blocks: Mapping[str, int]
) -> list[tuple[LinearSpec, ...]]:
    """Layers that runtimes want stored alike: merged ones, and all experts of a block."""
    groups: dict[tuple[int, str], list[LinearSpec]] = {}
    for x in linears:
        if x.name not in blocks:
            raise RecipeError(
                f"{stage.at('targets')}: {x.name} is the output head, whose loss is not measured;"
                " give it a stage of its own with a scheme"
            )
        key = x.name if x.fused is None else f"fused {x.fused}"
        groups.setdefault((blocks[x.name], "experts" if x.expert is not None else key), []).append(
            x
        )
    return [tuple(members) for members in groups.values()]


def _unit(
    stage: Stage,
    linears: tuple[LinearSpec, ...],
    blocks: Mapping[str, int],
    model: Outline,
    fmt: str,
) -> BudgetUnit:
    fitting = [s for s in stage.candidates if all(_fits(s, x) for x in linears)]
    if not fitting:
        widths = ", ".join(map(str, sorted({x.shape[1] for x in linears})))
        raise RecipeError(
            f"{stage.at('candidates')}: {linears[0].name} has {widths} input columns, which the"
            " groups of no candidate divide; add one with granularity: channel"
        )
    g_idx = METHODS[stage.method].needs(stage.config).g_idx
    sizes = [
        sum(
            nbytes(entry)
            for x in linears
            for entry in FORMATS[fmt].layout(
                WeightStorage.of_linear(x, scheme, model.tensors[x.tensor].dtype, act_order=g_idx)
            )
        )
        for scheme in fitting
    ]
    return BudgetUnit(
        name=linears[0].name,
        stage=stage.index,
        block=blocks[linears[0].name],
        linears=linears,
        schemes=tuple(fitting),
        sizes=tuple(sizes),
        sensitivity=stage.sensitivity,
        signs=stage.signs,
    )


def _fits(scheme: QuantScheme, linear: LinearSpec) -> bool:
    return linear.shape[1] % scheme.columns_per_scale(linear.shape[1]) == 0


def with_choice(
    recipe: Recipe, units: Sequence[BudgetUnit], found: Sensitivities | None
) -> tuple[Recipe, BudgetChoice]:
    """The recipe with ordinary stages alone, and the choice. found: None before measuring.

    RecipeError for a target below what the smallest schemes take.
    """
    stages: list[Stage] = []
    predicted, low, high, targets = 0.0, 0, 0, []
    for stage in recipe.stages:
        if stage.target is None:
            stages.append(stage)
        else:
            mine = [unit for unit in units if unit.stage == stage.index]
            chosen, loss, limit = _choose(stage, mine, found)
            predicted, high = predicted + loss, high + limit
            low += sum(min(unit.sizes) for unit in mine)
            targets.append(stage.target.describe())
            stages += _stages_of(stage, mine, chosen)
    sensitivity = " and ".join(dict.fromkeys(unit.sensitivity for unit in units))
    budget = BudgetChoice(
        tuple(targets),
        sensitivity,
        None if found is None else predicted,
        {} if found is None else found.shares,
        low,
        high,
        frozenset(x.name for unit in units for x in unit.linears if found is None),
        tuple(_notes(recipe, units)),
    )
    return _rebuilt(recipe, stages, budget), budget


def _choose(
    stage: Stage, units: Sequence[BudgetUnit], found: Sensitivities | None
) -> tuple[tuple[Candidate, ...], float, int]:
    """A scheme for each unit, the summed loss, and the bytes there are for them."""
    assert stage.target is not None
    weights = sum(unit.weights for unit in units)
    bits = stage.target.bits_per_weight
    # Bits are of the layers, whatever lies beside them in a file.
    beside = sum(unit.sizes[0] for unit in units if not unit.linears)
    limit = stage.target.bytes if bits is None else bytes_for(bits, weights) + beside
    if limit is None:  # prune has not said yet what is left
        assert found is None, "what the layers may take is known before they are measured"
        limit = sum(max(unit.sizes) for unit in units)
    asked = [
        Choosable(
            unit.name,
            tuple(
                Option(s.describe(), size, 0.0 if found is None else found.loss(unit, s))
                for s, size in zip(unit.schemes, unit.sizes, strict=True)
            ),
        )
        for unit in units
    ]
    try:
        choice = choose(asked, limit, weights=weights)
    except RecipeError as error:
        message = str(error).removeprefix("target: ")
        raise RecipeError(f"{stage.at('target')}: {message}") from None
    picked = zip(units, choice.picked, strict=True)
    most = sum(max(unit.sizes) for unit in units)
    return tuple(unit.schemes[i] for unit, i in picked), choice.loss, min(limit, most)


def _stages_of(
    stage: Stage, units: Sequence[BudgetUnit], chosen: Sequence[Candidate]
) -> Iterator[Stage]:
    """The stage with one of the schemes that were chosen, and overrides of it with the others.

    Overrides of its own come behind them and win, as they did over the target.
    """
    if METHODS[stage.method].whole:
        picked = zip(units, chosen, strict=True)
        by_layer = {x.name: kind.describe() for unit, kind in picked for x in unit.linears}
        yield with_types(stage, by_layer)
        return
    names: dict[QuantScheme, tuple[str, ...]] = {}
    for scheme in stage.candidates:
        pairs = [unit for unit, own in zip(units, chosen, strict=True) if own == scheme]
        names[scheme] = tuple(x.name for unit in pairs for x in unit.linears)
    first, *others = [scheme for scheme in stage.candidates if names[scheme]]
    claims = [Claim(names[scheme], stage.ignore, path=stage.label) for scheme in others]
    claims += stage.claims
    plain = replace(stage, candidates=(), target=None, sensitivity="output_error")
    yield replace(plain, scheme=first, claims=tuple(claims))
    for i, scheme in enumerate(others, start=1):
        part = replace(plain, scheme=scheme, targets=names[scheme])
        yield replace(part, within=stage.targets, claims=tuple(claims[i:]))


def _rebuilt(recipe: Recipe, stages: Sequence[Stage], budget: BudgetChoice) -> Recipe:
    """The recipe with these stages; messages keep calling each by its place as given."""
    numbered = [replace(stage, index=i, path=stage.label) for i, stage in enumerate(stages)]
    seeing = recipe.kv_cache is not None or any(
        METHODS[s.method].needs_calibration(s.config, s.scheme) for s in numbered
    )
    seeing = seeing or any(reads_calibration(x.method, x.config) for x in recipe.edits)
    return replace(
        recipe,
        stages=tuple(numbered),
        description=_described(recipe.description, budget),
        calibration=recipe.calibration if seeing else None,
    )


def _described(description: str, budget: BudgetChoice) -> str:
    """What a reader of recipe.yaml cannot see there: why the layers have these schemes."""
    chosen = f"schemes chosen for {' and '.join(budget.targets)}"
    if budget.predicted is not None:
        units = UNITS_OF_LOSS.get(budget.sensitivity, budget.sensitivity)
        chosen += f", predicted loss {budget.predicted:.4g} {units}"
    return f"{description} ({chosen})" if description else chosen


def _notes(recipe: Recipe, units: Sequence[BudgetUnit]) -> Iterator[str]:
    """Which candidates were not offered to which layers."""
    for stage in recipe.stages:
        for scheme in stage.candidates:
            without = [u for u in units if u.stage == stage.index and scheme not in u.schemes]
            if without:
                names = [x.name for unit in without for x in unit.linears]
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                yield (
                    f"{scheme.describe()} was not open to {names[0]}{more}: its groups do not"
                    " divide their input columns"
                )
