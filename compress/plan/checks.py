"""Whether a recipe's choices fit a decoder: what cannot work is refused before any work."""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.ties import shares_bytes
from compress.edits.distill import why_not_tuned
from compress.errors import RecipeError
from compress.formats import FORMATS
from compress.formats.compressed_tensors.encode import is_packed
from compress.formats.runtimes.verdicts import packs_zero_points
from compress.methods import METHODS
from compress.plan.fold_pairs import check_pairs
from compress.plan.fused import check_fused
from compress.plan.layers import ModulePlan, Skipped, assign_layers
from compress.plan.output_format import check_experts
from compress.quant.packing import WORD_BITS
from compress.recipe import Recipe

LARGEST_GROUP = 256  # of those a message proposes
SHOWN = 6


def checked_layers(
    recipe: Recipe, model: Outline, fmt: str
) -> tuple[list[ModulePlan], list[Skipped]]:
    """`assign_layers`; RecipeError for layers that cannot be rounded, or stored together, as the
    stages have it."""
    modules, skipped = assign_layers(recipe, model, fmt)
    check_embedding(recipe, model.spec, modules)
    check_groups(recipe, modules)
    check_fused(recipe, modules, skipped)
    check_pairs(recipe, model.spec, modules)
    check_experts(recipe, modules, fmt)
    return modules, skipped


def check_embedding(recipe: Recipe, spec: DecoderSpec, modules: Iterable[ModulePlan]) -> None:
    """RecipeError for an embedding that cannot be stored as asked, or not without the head.

    Its rows are looked up: there are no inputs to quantize or to calibrate on.
    """
    found = next((m for m in modules if m.linear.role == "embedding"), None)
    if found is None:
        return
    stage, name = recipe.stages[found.stage], found.linear.name
    if spec.tied:
        raise RecipeError(
            f"{stage.at('targets')}: {name} is also the output head (they are tied); add 'lm_head'"
            " to the targets of a stage, and each of the two is stored by itself"
        )
    if METHODS[stage.method].needs_calibration(stage.config, stage.scheme) or found.folds:
        raise RecipeError(
            f"{stage.at('method')}: {stage.method} looks at inputs, and {name} is looked up by"
            " token; give it a stage of its own with method rtn and a weight-only scheme"
        )
    alone = found.scheme.granularity in ("channel", "group") and not found.scheme.is_fp4
    if found.scheme.activation is not None or not alone:
        raise RecipeError(
            f"{stage.at('scheme')}: {found.scheme.describe()} is not for {name}, whose rows are"
            " looked up: it takes weight-only schemes with a scale a row or a group; use W8A16 or"
            " W4A16 with method rtn"
        )


def check_tuning(recipe: Recipe, modules: Iterable[ModulePlan], fmt: str) -> None:
    """RecipeError for a training behind the stages that round whose linears it cannot train."""
    if not recipe.tuning:
        return
    place = recipe.tuning[0].at("train")
    inside = [m for m in modules if m.block is not None and m.linear.role != "router"]
    if not inside:
        raise RecipeError(f"{place}: no linear of a block is rounded, so nothing is left to train")
    for module in inside:
        reason = why_not_tuned(module.scheme, FORMATS[fmt].coded)
        if reason is not None:
            raise RecipeError(f"{place}: {module.linear.name}: {reason}; take the stage out")
    moving = next((x for x in recipe.tuning if x.config.moves_codes), None)
    folding = next((x for x in recipe.stages if METHODS[x.method].fold is not None), None)
    if moving is not None and folding is not None:
        raise RecipeError(
            f"{moving.at('train')}: rounding is trained from the weights as they were, and"
            f" {folding.label} ({folding.method}) scales them before they are rounded; take either"
            " out"
        )


def check_groups(recipe: Recipe, modules: Iterable[ModulePlan]) -> None:
    """RecipeError when a layer's width is no multiple of its group, with sizes that would do."""
    modules = list(modules)
    bad = [m for m in modules if _broken_group(m)]
    if not bad:
        return
    first = bad[0]
    size = _broken_group(first)
    widths = [m.linear.shape[1] for m in modules if m.stage == first.stage]
    fitting = [g for g in range(2, LARGEST_GROUP + 1) if gcd(*widths) % g == 0]
    near = sorted(sorted(fitting, key=lambda g: abs(g - size))[:3])
    remedy = f"use group_size {', '.join(map(str, near))} or " if near else "use "
    remedy += _one_scale_a_row(recipe, first.stage)
    if first.scheme.type == "float":
        remedy = "ignore it or use method fp8 with scheme FP8_DYNAMIC"
    more = {1: "", 2: " (nor has 1 more layer)"}.get(
        len(bad), f" (nor have {len(bad) - 1} more layers)"
    )
    raise RecipeError(
        f"{recipe.stages[first.stage].at('group_size')}: {first.linear.name} has"
        f" {first.linear.shape[1]} input columns, not a multiple of {size}{more};"
        f" {remedy}"
    )


def _one_scale_a_row(recipe: Recipe, stage: int) -> str:
    """How to do without groups: to be copied where nothing else has to be taken out for it."""
    table, key = recipe.stages[stage].places.table, recipe.stages[stage].label
    if not table or {f"{key}.group_size", f"{key}.scheme.bits"} & table.keys():
        return "granularity: channel without group_size"
    return f"--set '{key}.granularity=channel'"


def _broken_group(m: ModulePlan) -> int:
    """A number of columns with one scale, of weight or inputs, that cuts the width; 0 for none."""
    columns, inputs = m.linear.shape[1], m.scheme.activation
    steps = [m.scheme.columns_per_scale(columns)]
    if inputs is not None and inputs.granularity == "group":
        steps.append(inputs.group_size)
    return next((step for step in steps if columns % step), 0)


def why_not_parallel(
    n: int, spec: DecoderSpec, modules: Sequence[ModulePlan], fmt: str
) -> tuple[str, ...]:
    """Why the result cannot be split over n devices without padding; empty when it can.

    fmt: of the output; a dense one has no groups and no words that a cut could go through. By
    vLLM's rules: "o" and "down" are split along their columns, all others along their rows; key
    and value heads are split, or repeated where there are more devices than heads.
    """
    if (none := FORMATS[fmt].why_not_split) is not None:
        return (none,)
    reasons: dict[str, str] = {}
    for sizes in dict.fromkeys(block.sizes for block in spec.blocks):
        if sizes.heads % n:
            reasons.setdefault("heads", f"{sizes.heads} heads do not divide by {n}")
        if sizes.kv_heads % n and n % sizes.kv_heads:
            reasons.setdefault(
                "kv",
                f"{sizes.kv_heads} key/value heads can neither be split nor repeated {n} ways",
            )
    for m in modules:
        against = _why_not_columns if m.linear.role in ("o", "down") else _why_not_rows
        found = against(n, spec, m, fmt)
        if found is not None:
            reasons.setdefault(m.linear.role, f"{m.linear.role}: {found}")
    return tuple(reasons.values())


def _why_not_columns(n: int, spec: DecoderSpec, m: ModulePlan, fmt: str) -> str | None:
    rows, columns = m.linear.shape
    step = m.scheme.columns_per_scale(columns)
    if columns % n:
        return f"{columns} columns do not divide by {n}"
    if not FORMATS[fmt].coded:
        return None
    if m.scheme.granularity in ("group", "block") and (columns // n) % step:
        return f"{columns // n} columns a shard are no multiple of {step}"
    if is_packed(m.scheme) and columns // n * m.scheme.bits % WORD_BITS:
        return f"{columns // n} columns a shard fill no whole words of packed codes"
    return _why_not_shard(f"{columns // n} columns", m, (rows, columns // n), fmt)


def _why_not_rows(n: int, spec: DecoderSpec, m: ModulePlan, fmt: str) -> str | None:
    stored = FORMATS[fmt].coded
    packed = stored and packs_zero_points(m.scheme)
    step = m.scheme.group_size if stored and m.scheme.granularity == "block" else 1
    for rows, shards in _row_parts(n, spec, m.linear):
        if rows % shards:
            return f"{rows} rows do not divide by {shards}"
        if rows // shards % step:
            return f"{rows // shards} rows a shard are no multiple of {step}"
        if packed and rows // shards * m.scheme.bits % WORD_BITS:
            return f"{rows // shards} rows a shard fill no whole words of packed zero points"
        part = rows // shards, m.linear.shape[1]
        if (found := _why_not_shard(f"{part[0]} rows", m, part, fmt)) is not None:
            return found
    return None


def _why_not_shard(size: str, m: ModulePlan, shape: tuple[int, int], fmt: str) -> str | None:
    """Why a format that holds the whole weight does not hold a shard of it."""
    found = FORMATS[fmt].why_not(m.scheme, shape, g_idx=m.g_idx)
    return None if found is None else f"{size} a shard: {found.partition(';')[0]}"


def _row_parts(n: int, spec: DecoderSpec, linear: LinearSpec) -> list[tuple[int, int]]:
    """(rows, shards) of the matrices that are split each by itself."""
    rows = linear.shape[0]
    if linear.role in ("k", "v"):
        return [(rows, min(n, spec.sizes_of(linear).kv_heads))]
    if linear.role == "qkv":
        sizes = spec.sizes_of(linear)
        shards = min(n, sizes.kv_heads)
        return [(sizes.of("q"), n), (sizes.of("k"), shards), (sizes.of("v"), shards)]
    return [(rows // 2, n)] if linear.role == "gate_up" else [(rows, n)]


def warnings(model: Outline) -> Iterator[str]:
    """What a person should know about how the decoder was read."""
    spec = model.spec
    if shares_bytes(model.tensors, spec):
        yield (
            f"{spec.head} and {spec.embedding} are one tensor in the source; the result stores each"
            " by itself, as a stage quantizes the head"
        )
    if spec.family == "generic":
        yield (
            f"model type {spec.model_type!r} is in no architecture table: layers were found by"
            " name and shape"
        )
    unrecognised = [name for block in spec.blocks for name in block.unrecognised]
    if unrecognised:
        more = f" and {len(unrecognised) - SHOWN} more" if len(unrecognised) > SHOWN else ""
        yield f"copied as they are, not recognised: {', '.join(unrecognised[:SHOWN])}{more}"
