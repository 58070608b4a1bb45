"""Which tensor of a GGUF file is which of the model's, by its config.json: nothing is left over, on
either side."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from compress.arch.describe import describe
from compress.arch.expected import ExpectedTensors, expected_tensors
from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.spec import DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.header import TensorInfo
from compress.checkpoint.ties import tied_config
from compress.errors import CheckpointError
from compress.formats.gguf.arches import ARCHES, Arch
from compress.formats.gguf.layout import ENDS, Piece, pieces

# What rotations are divided by, which config.json says as well.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_OTHERS = "take file and config.json of one model"


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of the original in a file: it is source `place` of a piece, which lies at `info`.
    shape: of the original."""

    info: TensorInfo
    piece: Piece
    place: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its share, where a piece holds several experts."""
        return self.info.nbytes // len(self.piece.sources)


@dataclass(frozen=True, slots=True)
class Matched:
    """config: config.json, as the file makes it. spec: of its decoder. held: where each tensor of
    the original lies, in the order of the file."""

    config: dict[str, Any]
    spec: DecoderSpec
    held: Mapping[str, HeldTensor]


def match(checkpoint: Checkpoint) -> Matched:
    """CheckpointError for an architecture that is not config.json's, for a tensor that is missing,
    and for one that the model has not or has in another shape."""
    config, stored = checkpoint.config, checkpoint.tensors
    expected = expected_tensors(config)
    shapes = dict(expected.must)
    if ENDS[1] in stored:
        shapes[expected.head[0]] = expected.head[1]
    elif _tied_by_arch(checkpoint):
        config = tied_config(config, tied=True)
    laid = _laid(checkpoint, config, shapes)
    biases = dict(_biases(expected, laid.pieces, stored))
    if biases:
        shapes |= biases
        laid = _laid(checkpoint, config, shapes)
    _check_tensors(checkpoint, laid.pieces)
    _check_settings(checkpoint, laid)
    held = {
        source: HeldTensor(stored[piece.name], piece, place, shapes[source])
        for piece in laid.pieces
        for place, source in enumerate(piece.sources)
    }
    return Matched(config, laid.spec, held)


@dataclass(frozen=True, slots=True)
class _Laid:
    spec: DecoderSpec
    how: ForwardSpec
    arch: Arch
    pieces: list[Piece]


def _laid(
    checkpoint: Checkpoint, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> _Laid:
    """What a file with those tensors holds."""
    spec = describe(config, shapes)
    arch = ARCHES.get(spec.family)
    if arch is None:
        raise CheckpointError(
            f"{checkpoint.path}: model type {spec.model_type!r} has no architecture in GGUF that is"
            f" known here; known are {', '.join(ARCHES)}"
        )
    said = (checkpoint.gguf or {}).get("general.architecture")
    if said != arch.name:
        raise CheckpointError(
            f"{_file(checkpoint)} is of architecture {said!r}, and config.json beside it of a"
            f" {spec.model_type}, which is {arch.name!r} there; {_OTHERS}"
        )
    how = describe_forward(config, spec)
    return _Laid(spec, how, arch, pieces(spec, shapes, how, arch, ()))


def _tied_by_arch(checkpoint: Checkpoint) -> bool:
    """Whether the architecture has no head but the embedding, whatever config.json says."""
    said = (checkpoint.gguf or {}).get("general.architecture")
    return any(arch.name == said and arch.head == "tied" for arch in ARCHES.values())


def _biases(
    expected: ExpectedTensors, laid: list[Piece], stored: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those that need not be there, and are."""
    for piece in laid:
        found = expected.may.get(piece.sources[0]) if len(piece.sources) == 1 else None
        if found is not None and f"{piece.name.removesuffix('weight')}bias" in stored:
            yield found


def _check_tensors(checkpoint: Checkpoint, laid: list[Piece]) -> None:
    stored, file = checkpoint.tensors, _file(checkpoint)
    wanted = {piece.name: piece for piece in laid}
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise CheckpointError(
            f"{file} lacks tensor {missing[0]!r}{_more(missing)}, which the model of config.json"
            f" has; {_OTHERS}"
        )
    unknown = [name for name in stored if name not in wanted and name not in FACTORS]
    if unknown:
        raise CheckpointError(
            f"{file} has tensor {unknown[0]!r}{_more(unknown)}, which the model of config.json has"
            f" not; {_OTHERS}"
        )
    for name, piece in wanted.items():
        if _wide(stored[name].shape) != _wide(piece.shape):
            raise CheckpointError(
                f"tensor {name!r} in {file} has shape {list(stored[name].shape)}, config.json asks"
                f" for {list(piece.shape)}; {_OTHERS}"
            )


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the ones that it begins with, as ggml leaves them out."""
    return _wide(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_settings(checkpoint: Checkpoint, laid: _Laid) -> None:
    """CheckpointError where the file says another number than config.json, of those that no shape
    tells."""
    fields, how, name = checkpoint.gguf or {}, laid.how, laid.arch.name
    heads = how.grouped(0)
    turned = [x.rope for x in how.layers if not (laid.arch.local_rope and x.window is not None)]
    theta = next((rope.theta for rope in turned if rope is not None), None)
    norm = "layer_norm_rms_epsilon" if how.norm == "rms" else "layer_norm_epsilon"
    wanted: tuple[tuple[str, float | None], ...] = (
        ("block_count", len(laid.spec.blocks)),
        ("attention.head_count", heads.heads),
        ("attention.head_count_kv", heads.kv_heads),
        (f"attention.{norm}", how.eps),
        ("rope.freq_base", theta),
        ("expert_used_count", how.experts_per_token or None),
    )
    for key, want in wanted:
        said = fields.get(f"{name}.{key}")
        if want is None or not isinstance(said, int | float):
            continue
        if not isclose(said, want, rel_tol=1e-6):  # fp32 there
            raise CheckpointError(
                f"{_file(checkpoint)}: {name}.{key} is {said:.7g}, and config.json says"
                f" {want:.7g}; {_OTHERS}"
            )


def _file(checkpoint: Checkpoint) -> str:
    return str(checkpoint.path / checkpoint.files[0])
