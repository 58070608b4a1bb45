"""What stands against an export, and which formats take all of a checkpoint that one refuses."""

from collections.abc import Iterator, Sequence

from compress.arch.spec import LinearSpec
from compress.convert.scales import ScaleChange, scale_change, why_not_scales
from compress.convert.source import ExportLayer, Held
from compress.errors import RecipeError
from compress.formats import CODECS, Format
from compress.formats.validate import GLOBAL_SCALES
from compress.report.units import counted

ROUND = "--round-scales"
SHOWN = 8  # layers that a message names


def check(held: Held, target: Format, *, round_scales: bool) -> ScaleChange:
    """What the target does to scales.

    RecipeError for the first thing that it has no place for, with the formats and flags that take
    the whole checkpoint; CheckpointError for damaged scales.
    """
    found = ScaleChange()
    reason = next(_obstacles(held, target), None)
    if reason is None:
        found = scale_change(held, target)
        reason = why_not_scales(found, target, round_scales=round_scales)
    if reason is None:
        return found
    rounding = f"add {ROUND} to round them, or take one of the " if _rounds(found) else ""
    raise RecipeError(
        f"{reason}; {rounding}formats that take all of this checkpoint: {_takers(held, target)}"
    )


def _takers(held: Held, refused: Format) -> str:
    """Formats into which an export of the source goes, with the flag that one needs; dense always
    is one."""
    found = []
    for fmt in CODECS.values():
        same = fmt.name in (held.weights.format.name, refused.name)
        if same or next(_obstacles(held, fmt), None) is not None:
            continue
        scales = scale_change(held, fmt)
        if why_not_scales(scales, fmt, round_scales=True) is None:
            found.append(f"{fmt.name} (with {ROUND})" if _rounds(scales) else fmt.name)
    return ", ".join(found)


def _rounds(found: ScaleChange) -> bool:
    """Whether the flag that rounds scales is all that an export needs."""
    return bool(found.change.changed) and not found.change.lost


def _obstacles(held: Held, target: Format) -> Iterator[str]:
    """Reasons without a remedy, scales left aside."""
    if target.method is not None:
        if held.others:
            yield (
                f"{held.others[0]} is quantized but is no linear of the decoder, and only those are"
                " converted"
            )
        yield from _unfit(held, target)
        yield from _unconverted(held, target)
        yield from _unlike(held)
        yield from _cache_lost(held, target)
    yield from _together(held, target)


def _cache_lost(held: Held, target: Format) -> Iterator[str]:
    if held.kv_cache is not None and target.cache is None:
        yield (
            f"{held.weights.checkpoint.path} has scales of a key/value cache"
            f" ({held.kv_cache.describe()}), which {target.name} has no place for"
        )


def _unfit(held: Held, target: Format) -> Iterator[str]:
    """Layers that the target cannot hold, for whatever reason."""
    found = {x.linear.name: why for x in held.layers.values() if (why := _why_not(x, target))}
    if found:
        name, reason = next(iter(found.items()))
        yield f"{name} does not fit into {target.name}{_and_more(len(found) - 1)}: {reason}"


def _and_more(n: int) -> str:
    return f" (nor {'does' if n == 1 else 'do'} {counted(n, 'more layer')})" if n else ""


def _why_not(layer: ExportLayer, target: Format) -> str | None:
    found = target.why_not(layer.scheme, layer.linear.shape, g_idx=layer.reordered)
    return None if found is None else _without_remedy(found)


def _without_remedy(reason: str) -> str:
    """Codecs end with what helps in a recipe; an export has formats and flags only."""
    return reason.rpartition("; ")[0] or reason


def _unconverted(held: Held, target: Format) -> Iterator[str]:
    """What a weight has beside codes and scales, or how it lies, that the target cannot say."""
    for layer in held.layers.values():
        name = layer.linear.name
        if layer.linear.transposed != held.weights.transposed(name):
            yield f"{name} holds codes in the order [in, out], which no other format has"
        if layer.factor:
            yield (
                f"{name}: its inputs are multiplied by {name}.pre_quant_scale, which"
                f" {target.name} has no place for"
            )
    found = [x for x in held.layers.values() if target.name in x.homeless]
    if found:
        shown = [f"{x.linear.name} ({x.homeless[target.name]} of {x.zeros})" for x in found]
        more = f" and {counted(len(shown) - SHOWN, 'more layer')}" if len(shown) > SHOWN else ""
        yield (
            f"{target.name} has no place for zero points of 0 (version 1 stores -1, which loaders"
            f" read differently), and there are some in {', '.join(shown[:SHOWN])}{more}"
        )


def _unlike(held: Held) -> Iterator[str]:
    """Linears that runtimes merge into one matrix (q/k/v; gate/up) and that the source stores in
    different ways, or with different global scales or orders of columns."""
    for block in held.weights.spec.blocks:
        members: dict[tuple[str, int | None], list[LinearSpec]] = {}
        for linear in block.linears:
            if linear.fused is not None:
                members.setdefault((linear.fused, linear.expert), []).append(linear)
        for found in members.values():
            yield from _unlike_ways(held, found)
            yield from _unlike_orders(held, found)


def _unlike_ways(held: Held, merged: Sequence[LinearSpec]) -> Iterator[str]:
    ways = {x.name: _stored(held, x, held.layers.get(x.tensor)) for x in merged}
    if len(set(ways.values())) > 1:
        shown = ", ".join(f"{name} {stored}" for name, stored in ways.items())
        yield f"{shown}: runtimes merge these into one matrix, so they need one scheme"


def _unlike_orders(held: Held, merged: Sequence[LinearSpec]) -> Iterator[str]:
    orders = {x.name: held.layers[x.tensor].order for x in merged if x.tensor in held.layers}
    first, *others = orders or [""]
    other = next((name for name in others if orders[name] != orders[first]), None)
    if other is not None:
        part = held.weights.reader.g_idx
        yield (
            f"{first}.{part} and {other}.{part} give columns different orders, and runtimes merge"
            f" {', '.join(orders)} into one matrix with one order"
        )


def _stored(held: Held, linear: LinearSpec, layer: ExportLayer | None) -> str:
    if layer is None:
        return "unquantized"
    words = layer.scheme.describe()
    checkpoint = held.weights.checkpoint
    for part in held.weights.reader.scales if layer.scheme.is_fp4 else ():
        name = f"{linear.name}.{part}"
        if part in GLOBAL_SCALES and name in checkpoint.tensors:
            words += f" with a global scale of {checkpoint.read(name).flatten().tolist()}"
    return words


def _together(held: Held, target: Format) -> Iterator[str]:
    """Layers that the target holds one by one, but not in one checkpoint."""
    if target.method is None:
        return
    try:
        target.config(
            held.weights.spec,
            held.shapes,
            held.schemes,
            with_g_idx=held.with_g_idx,
            kv_cache=held.kv_cache,
        )
    except RecipeError as error:
        yield _without_remedy(str(error))
