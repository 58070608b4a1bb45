"""Rotary embeddings in GGUF's words: keys, and factors that frequencies are divided by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from types import MappingProxyType

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.rope import Rope
from compress.errors import CheckpointError
from compress.formats.gguf.arches import Arch
from compress.formats.gguf.fields import Field, Fields
from compress.formats.gguf.layout import Piece
from compress.runtime.decoder.rope import FREQUENCIES


@dataclass(frozen=True, slots=True)
class Rotations:
    """fields: below the architecture's name. factors: tensors. notes: a line each."""

    fields: Fields = ()
    factors: tuple[Piece, ...] = ()
    notes: tuple[str, ...] = ()


def rotations(how: ForwardSpec, arch: Arch) -> Rotations:
    """Raises CheckpointError for rotations that the architecture does not know."""
    full = [x.rope for x in how.layers if not (arch.local_rope and x.window is not None)]
    local = [x.rope for x in how.layers if arch.local_rope and x.window is not None]
    rope = _single(full or local, how, arch)
    if rope is None:
        return Rotations()
    _refuse_unknown(rope, how, arch)
    fields: Fields = (("rope.dimension_count", rope.dim), ("rope.freq_base", rope.theta))
    if local:
        fields += (("rope.freq_base_swa", _local(local, how, arch).theta),)
    made = SCALINGS[rope.kind](rope)
    return Rotations(fields + made.fields, made.factors, made.notes)


def _single(ropes: list[Rope | None], how: ForwardSpec, arch: Arch) -> Rope | None:
    """The rotation that all layers share, but for those that the architecture leaves out."""
    rotates = {
        i: arch.unrotated is None or (i + 1) % arch.unrotated > 0 for i in range(len(how.layers))
    }
    if not arch.local_rope:
        for i, layer in enumerate(how.layers):
            if (layer.rope is not None) != (rotates[i] and arch.ropes != ()):
                does = "rotates" if layer.rope is not None else "does not rotate"
                raise CheckpointError(
                    f"layer {i} {does} queries and keys; in GGUF's {arch.name} every layer rotates"
                    f"{f' but each {arch.unrotated}th' if arch.unrotated else ''}; take onnx"
                )
    distinct = {id(x): x for x in ropes if x is not None}.values()
    first = next(iter(distinct), None)
    if any(x != first for x in distinct):
        raise CheckpointError(
            f"layers rotate in different ways; GGUF's {arch.name} has one for all, take onnx"
        )
    return first


def _refuse_unknown(rope: Rope, how: ForwardSpec, arch: Arch) -> None:
    if rope.kind not in arch.ropes:
        raise CheckpointError(
            f"rope_type is {rope.kind!r}; GGUF's {arch.name} knows {', '.join(arch.ropes)}, take"
            " onnx, or write the model without it"
        )
    width = how.grouped(0).key_width
    if rope.dim % 2 or (rope.dim != width and not arch.part):
        raise CheckpointError(
            f"{rope.dim} of a head's {width} numbers are rotated; GGUF's {arch.name} rotates"
            " pairs, and whole heads unless it says otherwise; take onnx"
        )


def _local(ropes: list[Rope | None], how: ForwardSpec, arch: Arch) -> Rope:
    rope = _single(ropes, how, arch)
    if rope is None or rope.kind != "default" or rope.dim != how.grouped(0).key_width:
        raise CheckpointError(
            f"layers with a window rotate as {rope.kind if rope else 'none'!r}; GGUF's {arch.name}"
            " has plain rotations of whole heads there, take onnx"
        )
    return rope


def _default(rope: Rope) -> Rotations:
    return Rotations()


def _linear(rope: Rope) -> Rotations:
    return Rotations(
        (("rope.scaling.type", "linear"), ("rope.scaling.factor", rope.parameters["factor"]))
    )


def _yarn(rope: Rope) -> Rotations:
    """The reader computes sine and cosine times 1 + 0.1 log(factor), and whole borders only."""
    p = rope.parameters
    usual = 1.0 if p["factor"] <= 1 else 0.1 * log(p["factor"]) + 1.0
    if abs(p["attention_factor"] - usual) > 1e-6 or not p["truncate"]:
        raise CheckpointError(
            f"yarn's attention_factor is {p['attention_factor']:.6g} and truncate"
            f" {str(p['truncate']).lower()}; GGUF's readers compute with {usual:.6g} and true, take"
            " onnx"
        )
    fields: tuple[Field, ...] = (
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", p["factor"]),
        ("rope.scaling.original_context_length", p["original_max_position_embeddings"]),
        ("rope.scaling.yarn_beta_fast", p["beta_fast"]),
        ("rope.scaling.yarn_beta_slow", p["beta_slow"]),
    )
    return Rotations(fields)


def _llama3(rope: Rope) -> Rotations:
    """Factors of each pair: how much slower it turns than without scaling."""
    plain, _ = FREQUENCIES["default"](rope)
    slower, _ = FREQUENCIES["llama3"](rope)
    return Rotations(factors=(_factors("rope_freqs", tuple((plain / slower).tolist())),))


def _longrope(rope: Rope) -> Rotations:
    p = rope.parameters
    border = p["original_max_position_embeddings"]
    fields: Fields = (
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.original_context_length", border),
        ("rope.scaling.attn_factor", p["attention_factor"]),
    )
    factors = (
        _factors("rope_factors_long", p["long_factor"]),
        _factors("rope_factors_short", p["short_factor"]),
    )
    note = (
        f"longrope: llama.cpp takes the factors of long texts when it is opened for more than"
        f" {border} positions, transformers when a text is longer"
    )
    return Rotations(fields, factors, (note,))


def _factors(name: str, values: tuple[float, ...]) -> Piece:
    return Piece(f"{name}.weight", (), (len(values),), values=values)


SCALINGS: Mapping[str, Callable[[Rope], Rotations]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "yarn": _yarn,
        "llama3": _llama3,
        "longrope": _longrope,
    }
)
