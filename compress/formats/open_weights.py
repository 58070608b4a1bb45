"""A checkpoint's weights are opened: in which format they are, and whether that can be read."""

from collections.abc import Callable

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.detect import detect
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.bitsandbytes import config_read as bitsandbytes_config
from compress.formats.coded_weights import CodedWeights, logical_shapes
from compress.formats.gguf_weights import GgufWeights
from compress.formats.misfits import is_quantized, refuse_misfits
from compress.formats.table import by_method, readable
from compress.formats.weights import DenseWeights, Weights


def open_weights(checkpoint: Checkpoint, spec: DecoderSpec | None = None) -> Weights:
    """Weights of a checkpoint in a format that can be read; `spec` is derived when not given.

    CheckpointError for any other quantization format, which is named, and for a malformed one.
    """
    if checkpoint.gguf is not None:
        return GgufWeights.of(checkpoint)
    coded = open_coded(checkpoint, spec)
    if coded is not None:
        return coded
    return DenseWeights(checkpoint, spec or describe(checkpoint.config, checkpoint.shapes))


def open_coded(checkpoint: Checkpoint, spec: DecoderSpec | None = None) -> CodedWeights | None:
    """As `open_weights`, for those who ask how codes are stored; None for a dense checkpoint.
    CheckpointError for a GGUF file, too, whose blocks are no codes of a scheme."""
    refuse_gguf(checkpoint)
    method = detect(checkpoint.config, checkpoint.tensors)
    if method is None:
        return None
    found = by_method(method)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.path} is quantized in the format {method!r}; {readable()} checkpoints can"
            " be read, so take the original"
        )
    fmt, reader = found
    schemes = reader.schemes(checkpoint.config)
    turned = reader.transposed(checkpoint.config)
    refuse_misfits(checkpoint, reader, schemes)
    if spec is None:
        shapes = logical_shapes(checkpoint, reader, schemes, turned)
        spec = describe(checkpoint.config, shapes)
        _refuse_turned(spec, turned, lambda x: is_quantized(x, checkpoint.tensors, reader))
    side = bitsandbytes_config.open_side(checkpoint) if method == bitsandbytes.NAME else None
    return CodedWeights(checkpoint, spec, fmt, reader, schemes, turned, side)


def refuse_gguf(checkpoint: Checkpoint) -> None:
    """CheckpointError for a GGUF file, where something is to be made of weights."""
    if checkpoint.gguf is not None:
        raise CheckpointError(
            f"{checkpoint.path / checkpoint.files[0]} is a GGUF file, of which nothing is made;"
            " take the checkpoint that it was made of"
        )


def _refuse_turned(
    spec: DecoderSpec, turned: Callable[[str], bool], is_coded: Callable[[str], bool]
) -> None:
    """Square weights fit either way, so that shapes do not tell. Without any list it is another
    tool's, whose codes lie as the original's weights."""
    place = "config.json: quantization_config.transposed"
    linears = spec.all_linears()
    named = [x for x in linears if turned(x.name)]
    for linear in named:
        if not linear.transposed:
            raise CheckpointError(
                f"{place} has {linear.name}, which is no Conv1D in a {spec.model_type} model; take"
                " it out of the list"
            )
    coded = (x for x in linears if x.transposed and is_coded(x.name))
    if named and (lost := next((x.name for x in coded if not turned(x.name)), None)):
        raise CheckpointError(
            f"{place} lacks {lost}, which is a Conv1D as those that it has; add it to the list"
        )
