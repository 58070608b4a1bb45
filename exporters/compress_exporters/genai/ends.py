"""Both ends of a decoder; a quantized embedding is looked up in its codes, and a tied head
multiplies by the same ones."""

import numpy as np
import onnx_ir as ir
import torch

from compress.arch.spec import LinearSpec
from compress_exporters.genai.coded import MatMulCodes, coded
from compress_exporters.genai.product import CONTRIB, Stack, initializers, linear, multiplied
from compress_exporters.onnx.graph import ends
from compress_exporters.onnx.graph.build import Build


def embedding(build: Build) -> ir.Value:
    """[B, S, hidden], scaled, learned positions added."""
    spec = build.spec.embedding_linear()
    how = coded(build, spec)
    if how is None:
        return ends.embedding(build)
    graph, (_, hidden) = build.graph, spec.shape
    codes, scales, zeros = initializers(build, _stack(build), how, flat=True)
    rows = graph.op(
        spec.name,
        "GatherBlockQuantized",
        *(codes, build.input("input_ids"), scales, *(() if zeros is None else (zeros,))),
        domain=CONTRIB,
        bits=how.layout.bits,
        block_size=how.layout.size,
        gather_axis=0,
        quantize_axis=1,
    )
    if hidden % how.layout.size:
        axis = graph.ints(2)
        rows = graph.op(spec.name, "Slice", rows, graph.ints(0), graph.ints(hidden), axis)
    return ends.placed(build, rows)


def head(build: Build, x: ir.Value) -> ir.Value:
    """Logits, fp32 [B, S, rows of the head]."""
    own, how = build.spec.head_linear(), coded(build, build.spec.embedding_linear())
    if how is not None and (own is None or _is_embedding(build, own, how)):
        return ends.capped(build, _tied(build, how, x))
    return ends.head(build, x) if own is None else ends.capped(build, linear(build, own, x))


def _is_embedding(build: Build, own: LinearSpec, how: MatMulCodes) -> bool:
    """Whether a head of its own has the embedding's codes: as it does where both were tied, and
    were rounded alike."""
    mine = coded(build, own)
    if mine is None or not mine.is_like(how):
        return False
    checkpoint, parts = build.weights.checkpoint, []
    for name in (own.name, build.spec.embedding_linear().name):
        parts.append(
            {x.removeprefix(name): x for x in checkpoint.tensors if x.startswith(f"{name}.")}
        )
    return parts[0].keys() == parts[1].keys() and all(
        torch.equal(checkpoint.read(tensor), checkpoint.read(parts[1][part]))
        for part, tensor in parts[0].items()
    )


def _tied(build: Build, how: MatMulCodes, x: ir.Value) -> ir.Value:
    """With the embedding's codes in another shape, which ONNX Runtime gives them once."""
    stack = _stack(build)
    codes, scales, zeros = initializers(build, stack, how, flat=True)
    n, k = stack.shape
    count = how.layout.count(k)
    shape = np.array([n, count, how.layout.width(k) // count], np.int64)
    codes = build.graph.op("head", "Reshape", codes, build.graph.constant(shape))
    return multiplied(build, stack, how, (x, codes, scales, zeros, None))


def _stack(build: Build) -> Stack:
    spec = build.spec.embedding_linear()
    return Stack(spec.name, (spec,))
