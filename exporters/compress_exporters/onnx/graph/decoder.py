"""A decoder's graph from its ForwardSpec, in the words of a target's Lowering."""

from dataclasses import dataclass

import onnx_ir as ir

from compress.arch.forward.forward import describe_forward
from compress.arch.spec import BlockSpec
from compress.formats.weights import Weights
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.attention import PAST, PRESENT, kept
from compress_exporters.onnx.graph.build import Build, Lowering
from compress_exporters.onnx.graph.graph import Graph

DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}
BATCH, SEQUENCE, PAST_LENGTH, TOTAL = (
    "batch_size",
    "sequence_length",
    "past_sequence_length",
    "total_sequence_length",
)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The residual, and what is to be added to it still: so that an addition and the norm behind
    it can be one operator."""

    total: ir.Value
    added: ir.Value | None = None


def build_decoder(source: Weights, options: Options, lowering: Lowering) -> Build:
    """The whole graph. CheckpointError for a decoder that is in no table of forwards."""
    how = describe_forward(source.checkpoint.config, source.spec)
    graph = Graph(DTYPES[options.computed], dict(lowering.opsets))
    build = Build(graph, source, how, options, lowering)
    _say_what_is_left(build)
    _inputs(build)
    stream = Stream(lowering.embedding(build))
    for block in source.spec.blocks:
        stream = _block(build, block, stream)
    final = source.spec.final_norm
    path = None if final is None else final.removesuffix(".weight")
    stream, hidden = _read(build, "final", path, stream)
    _outputs(build, lowering.head(build, hidden))
    return build


def _say_what_is_left(build: Build) -> None:
    cache = build.weights.kv_cache
    if cache is not None:
        how = cache.describe()
        build.note(f"keys and values are kept as they are, the source's scales ({how}) left out")


def _inputs(build: Build) -> None:
    graph, how = build.graph, build.how
    graph.input("input_ids", ir.DataType.INT64, (BATCH, SEQUENCE))
    graph.input("attention_mask", ir.DataType.INT64, (BATCH, TOTAL))
    if build.lowering.positions and uses_positions(build):
        graph.input("position_ids", ir.DataType.INT64, (BATCH, SEQUENCE))
    for index in range(len(how.layers)):
        for name, (heads, width) in kept(how, index):
            shape = (BATCH, heads, PAST_LENGTH, width)
            graph.input(PAST.format(index, name), graph.dtype, shape)


def uses_positions(build: Build) -> bool:
    """Whether anything asks where a token stands."""
    how = build.how
    return how.positions is not None or bool(how.ropes)


def _outputs(build: Build, logits: ir.Value) -> None:
    graph, how, spec = build.graph, build.how, build.spec
    rows = (spec.head_shape or spec.embedding_shape)[0]
    graph.output("logits", logits, ir.DataType.FLOAT, (BATCH, SEQUENCE, rows))
    for index in range(len(how.layers)):
        for name, (heads, width) in kept(how, index):
            key = PRESENT.format(index, name)
            graph.output(key, build.states[key], graph.dtype, (BATCH, heads, TOTAL, width))


def _block(build: Build, block: BlockSpec, stream: Stream) -> Stream:
    names, lowering = build.how.norms, build.lowering
    at = block.prefix
    stream, x = _read(build, at, _path(block, names.attention_in), stream)
    seen = lowering.attention(build, block, x)
    seen = _behind(build, _path(block, names.attention_out), seen)
    if build.how.parallel:
        _, x = _read(build, at, _path(block, names.mlp_in), stream)
        made = lowering.mlp(build, block, x)
        return Stream(stream.total, build.graph.op(at, "Add", made, seen))
    stream = Stream(stream.total, seen)
    stream, x = _read(build, at, _path(block, names.mlp_in), stream)
    made = lowering.mlp(build, block, x)
    return Stream(stream.total, _behind(build, _path(block, names.mlp_out), made))


def _path(block: BlockSpec, name: str | None) -> str | None:
    return None if name is None else f"{block.prefix}.{name}"


def _behind(build: Build, path: str | None, x: ir.Value) -> ir.Value:
    return x if path is None else build.lowering.norm(build, path, x)


def _read(build: Build, at: str, path: str | None, stream: Stream) -> tuple[Stream, ir.Value]:
    """The residual with everything added, and the same behind a norm, if there is one."""
    total, added = stream.total, stream.added
    if path is None:
        total = total if added is None else build.graph.op(at, "Add", total, added)
        return Stream(total), total
    if added is None:
        return stream, build.lowering.norm(build, path, total)
    total, normed = build.lowering.add_norm(build, path, total, added)
    return Stream(total), normed
