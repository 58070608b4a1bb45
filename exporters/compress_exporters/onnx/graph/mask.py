"""Which keys a query sees, as one explicit mask: causal, padding on either side, windows.

Not `is_causal`: runtimes disagree on what it means with keys of the past.
"""

import numpy as np
import onnx_ir as ir

from compress_exporters.onnx.graph.build import Build

AT = "mask"


def mask(build: Build, window: int | None) -> ir.Value:
    """bool [B, 1, S, total]; one for all layers of a window.

    A token's place is how many real tokens there are up to it, so that neither padding nor gaps
    count to a window. Queries that are padding see everything: a softmax over nothing is not a
    number.
    """
    return build.once(f"mask {window}", lambda: _mask(build, window))


def _mask(build: Build, window: int | None) -> ir.Value:
    graph = build.graph
    keys, queries, real, padding = build.once("places", lambda: _places(build))
    seen = graph.op(AT, "And", graph.op(AT, "LessOrEqual", keys, queries), real)
    if window is not None:
        first = graph.op(AT, "Sub", queries, graph.constant(np.array(window, np.float32)))
        seen = graph.op(AT, "And", seen, graph.op(AT, "Greater", keys, first))
    return graph.op(AT, "Or", seen, padding)


def _places(build: Build) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Places of keys [B, 1, 1, total] and of queries [B, 1, S, 1]; which keys are real, and which
    queries are padding, in the same shapes."""
    graph, given = build.graph, build.input("attention_mask")
    # In fp32, exact up to 2^24 tokens: TensorRT adds up no integers.
    ones = graph.op(AT, "Cast", given, to=int(ir.DataType.FLOAT))
    places = graph.op(AT, "CumSum", ones, graph.constant(np.array(1, np.int64)))
    real = graph.op(AT, "Cast", given, to=int(ir.DataType.BOOL))
    length = graph.op(AT, "Shape", build.input("input_ids"), start=1, end=2)
    # Not Neg, which is none of the layers that TensorRT computes shapes with.
    start = graph.op(AT, "Sub", graph.ints(0), length)
    ends = graph.ints(np.iinfo(np.int64).max)
    last = [graph.op(AT, "Slice", x, start, ends, graph.ints(1)) for x in (places, given)]
    padding = graph.op(AT, "Equal", last[1], graph.constant(np.array(0, np.int64)))
    as_key, as_query = graph.ints(1, 2), graph.ints(1, 3)
    return (
        graph.op(AT, "Unsqueeze", places, as_key),
        graph.op(AT, "Unsqueeze", last[0], as_query),
        graph.op(AT, "Unsqueeze", real, as_key),
        graph.op(AT, "Unsqueeze", padding, as_query),
    )
