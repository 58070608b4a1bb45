"""What a linear's codes are for MatMulNBits, before any of them is read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.quant.scheme import QuantScheme
from compress_exporters.genai.nbits import Layout, layout
from compress_exporters.onnx.graph.build import Build


@dataclass(frozen=True, slots=True, eq=False)
class MatMulCodes:
    """order: int64 [K] of act-order: the columns, group after group; None as they are. factor: [K],
    what inputs are multiplied by. columns: int64 [O], inputs whose weights are kept dense."""

    layout: Layout
    order: Tensor | None
    factor: Tensor | None
    columns: Tensor | None

    def is_like(self, other: "MatMulCodes") -> bool:
        """Whether both can be one matrix."""
        return self.layout == other.layout and all(
            _equal(getattr(self, name), getattr(other, name))
            for name in ("order", "factor", "columns")
        )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def coded(build: Build, spec: LinearSpec) -> MatMulCodes | None:
    """None for a dense weight; RecipeError for codes that have no place."""
    return build.once(f"coded {spec.tensor}", lambda: _coded(build, spec))


def _coded(build: Build, spec: LinearSpec) -> MatMulCodes | None:
    weights = build.weights
    scheme = weights.scheme(spec.name)
    if scheme is None:
        return None
    # Rows of an embedding are looked up by an operator that has no 2 bits on every device.
    least = 4 if spec.role == "embedding" else 2
    how = layout(scheme, spec.shape[1], spec.name, least)
    beside = weights.beside(spec.name)
    outliers = weights.outliers(spec.tensor)
    _tell(build, scheme, how)
    # Readers hold groups to one number of columns, so in this order they are blocks.
    order = None if beside.g_idx is None else beside.g_idx.long().argsort(stable=True)
    if order is not None:
        build.note("columns in act-order lie group after group, and inputs are put in that order")
    columns = None if outliers is None or not len(outliers.columns) else outliers.columns
    if columns is not None:
        build.note("outlier columns are a dense product beside the codes")
    return MatMulCodes(how, order, beside.input_factor, columns)


def _tell(build: Build, scheme: QuantScheme, how: Layout) -> None:
    if how.bits != scheme.bits:
        build.note(f"codes of {scheme.bits} bits are stored in {how.bits}, and mean what they did")
    act = scheme.activation
    if act is None:
        return
    level = build.options.accuracy_level
    build.note(
        f"inputs are not rounded as the checkpoint says ({act.describe()}):"
        + (" the kernel rounds them to int8 in blocks" if level == 4 else " they stay as they are")
    )
