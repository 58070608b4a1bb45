"""What a plan says of the types that it chose: what they take, what they cost, what is smaller."""

from collections.abc import Iterable, Iterator, Sequence

from compress.formats.gguf.layout import ENDS
from compress.formats.weights import Weights
from compress.quant.ggml_kinds import KINDS
from compress.quant.ggml_mixtures import MIXTURES
from compress.report.units import two_sizes
from compress_exporters.gguf.types.choice import TypeChoice, TypeChooser, all_scales

_SHOWN = 3
GROWN = 1.1  # of the checkpoint's bytes: from here on a type's cost is told
# The mixture for codes of so many bits that have no type of their own.
SMALLER = {2: "Q2_K", 3: "Q3_K_S", 4: "IQ4_XS", 5: "Q5_K_S", 6: "Q6_K"}
# Those that are built-in recipes, as gguf-q4_k_m is.
WITH_RECIPE = frozenset({"Q3_K_S", "Q4_K_M", "Q5_K_M", "Q6_K"})


def told(chooser: TypeChooser, choices: Sequence[TypeChoice]) -> Iterator[str]:
    """A line each."""
    yield from _ends(chooser, choices)
    yield from _mixed(chooser, choices)
    yield from _fallbacks(choices)
    yield from _became_dense(chooser.source, choices)
    yield from _grown(chooser.source, choices)
    scales = all_scales(choices)
    if scales.changed:
        yield (
            f"{scales.changed} of {scales.total} scales and offsets are rounded to fp16, the"
            f" largest change is {scales.largest:.2g} of the value"
        )
    yield from _inputs(chooser, choices)


def _ends(chooser: TypeChooser, choices: Sequence[TypeChoice]) -> Iterator[str]:
    """Embedding and head, where they are rounded without a mixture."""
    ends = [x for x in choices if x.piece.name in ENDS and x.fresh]
    if not ends or chooser.mixture is not None:
        return
    whole = sum(2 * x.piece.numel for x in ends)
    takes, would = two_sizes(sum(_bytes(x) for x in ends), whole)
    what = "embedding and head are" if len(ends) > 1 else f"{ends[0].piece.name} is"
    if not any(x.piece.name == ENDS[1] for x in choices):
        what = "the embedding, which is the head too, is"
    kept = "" if chooser.options.embedding else " (--embedding f16 keeps them)"
    yield f"{what} rounded to {ends[0].kind}: {takes} in place of {would} in 16 bits{kept}"


def _mixed(chooser: TypeChooser, choices: Sequence[TypeChoice]) -> Iterator[str]:
    if chooser.mixture is None:
        return
    counts: dict[str, int] = {}
    for choice in choices:
        if choice.fresh:
            counts[choice.kind] = counts.get(choice.kind, 0) + 1
    parts = ", ".join(f"{count} in {kind}" for kind, count in counts.items())
    how = "" if chooser.mixture.pure else " as llama.cpp mixes it"
    changed = sum(any(name in chooser.types for name in x.piece.sources) for x in choices)
    own = f", but for {changed} tensors with types of their own" if changed else ""
    yield f"{chooser.mixture.name}{how}{own}: {parts}"


def _fallbacks(choices: Sequence[TypeChoice]) -> Iterator[str]:
    found: dict[tuple[str, str, int], list[str]] = {}
    for x in choices:
        if x.wanted is not None:
            found.setdefault((x.wanted, x.kind, x.piece.shape[-1]), []).append(x.piece.name)
    for (wanted, kind, columns), names in found.items():
        yield (
            f"{len(names)} tensors take {kind} in place of {wanted}, as rows of {columns} numbers"
            f" are no whole blocks of {KINDS[wanted].block}: {shown(names)}"
        )


def _became_dense(source: Weights, choices: Sequence[TypeChoice]) -> Iterator[str]:
    found: dict[tuple[str, str], list[TypeChoice]] = {}
    for x in choices:
        if x.reason is not None:
            found.setdefault((x.reason, x.kind), []).append(x)
    for (reason, kind), those in found.items():
        names = shown([x.piece.name for x in those])
        yield f"{len(those)} quantized weights become {kind}, as {reason}: {names}"
    if found:
        all_of_them = [x for those in found.values() for x in those]
        takes, had = two_sizes(*_sizes(source, all_of_them))
        yield (
            f"what became dense takes {takes}, and {had} in the checkpoint;"
            f" {_advice(_smaller(source, all_of_them, 16))}"
        )


def _grown(source: Weights, choices: Sequence[TypeChoice]) -> Iterator[str]:
    """Codes that a type holds without loss, and in more bits than they need."""
    found: dict[tuple[str, str], list[TypeChoice]] = {}
    for x in choices:
        if not x.fresh and KINDS[x.kind].block > 1:
            found.setdefault((x.kind, _scheme(source, x)), []).append(x)
    for (kind, scheme), those in found.items():
        takes, had = _sizes(source, those)
        if takes < GROWN * had:
            continue
        bits = 8 * KINDS[kind].size / KINDS[kind].block
        smaller = _smaller(source, those, bits)
        hint = f"; {_advice(smaller)}" if smaller else ""
        now, before = two_sizes(takes, had)
        yield (
            f"{len(those)} weights in {scheme} take {kind}, no code changes: {now}, and {before} in"
            f" the checkpoint{hint}"
        )


def _advice(mixture: str) -> str:
    """Which recipe of the dense checkpoint is smaller, and which export of it."""
    recipe = f"gguf-{mixture.lower()}"
    stage = f"a stage {{method: k_quants, type: {mixture}}}"
    first = f"the recipe {recipe}" if mixture in WITH_RECIPE else stage
    return f"smaller is {first}, or --type {mixture}, of the dense checkpoint"


def _smaller(source: Weights, choices: Sequence[TypeChoice], bits: float) -> str:
    """The mixture for codes of that many bits, where it takes fewer than `bits` a weight; nothing
    where there is none."""
    widths = [_width(source, x) for x in choices]
    found = MIXTURES.get(SMALLER.get(max(widths), "Q8_0"))
    assert found is not None
    return found.name if found.bits < bits else ""


def _width(source: Weights, choice: TypeChoice) -> int:
    """Bits of its codes."""
    found = (source.outlined(name) for name in choice.piece.sources)
    return max((x.scheme.bits for x in found if x is not None), default=8)


def _scheme(source: Weights, choice: TypeChoice) -> str:
    weight = source.outlined(choice.piece.sources[0])
    return "codes" if weight is None else weight.scheme.describe()


def _sizes(source: Weights, choices: Iterable[TypeChoice]) -> tuple[int, int]:
    """Bytes in the file, and in the checkpoint."""
    listed = list(choices)
    names = [name for x in listed for name in x.piece.sources]
    return sum(_bytes(x) for x in listed), sum(_stored(source, name) for name in names)


def _bytes(choice: TypeChoice) -> int:
    return KINDS[choice.kind].nbytes(choice.piece.numel)


def _stored(source: Weights, name: str) -> int:
    """Bytes of a weight and of what belongs to it in the checkpoint."""
    reader, module = source.format.reader, name.removesuffix(".weight")
    parts = ("weight",) if reader is None else ("weight", *reader.parts)
    found = source.checkpoint.tensors
    return sum(
        found[at].nbytes for part in dict.fromkeys(parts) if (at := f"{module}.{part}") in found
    )


def _inputs(chooser: TypeChooser, choices: Sequence[TypeChoice]) -> Iterator[str]:
    kept = sum(x.inputs for x in choices if x.reason is None)
    if kept:
        yield (
            f"{kept} linears have quantized inputs in the checkpoint; llama.cpp rounds inputs its"
            " own way"
        )
    lost = sum(x.inputs for x in choices if x.reason is not None)
    if lost:
        yield (
            f"{lost} linears that become {chooser.plain} have quantized inputs in the"
            " checkpoint; in the file theirs are not quantized"
        )


def shown(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
