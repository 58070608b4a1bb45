"""Time of rows times packed codes, beside what the machine can do and other programs' products.

    python benchmarks/kernels/packed.py --output benchmarks/results/kernel_packed.json

Int4 in groups of 128 by each math. `ceiling read` is torch's product of a matrix of as many bytes
as the codes and a vector. torch int4pack reads bf16 inputs, ONNX Runtime's MatMulNBits has
accuracy_level 4 (8-bit inputs); each is left out where it is not there. Sides take turns, on copies
of the weight that caches do not hold.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

import timing
import torch
from torch import Tensor

from compress_kernels.ops.packed import layout_for, packed_linear
from compress_kernels.panels import Math, Panels, by_panel, lay_out

MATHS: tuple[Math, ...] = ("int8", "int16", "exact")
SHAPES = [(rows, n, k) for n, k in ((1024, 1024), (4096, 4096)) for rows in (1, 8, 64)]
GROUP, COLD = 128, 128 << 20


def cases(math: Math, rows: int, outputs: int, columns: int) -> timing.Cases:
    x = torch.randn(rows, columns)
    codes = torch.randint(-8, 8, (outputs, columns), dtype=torch.int8)
    scales = (torch.rand(outputs, columns // GROUP) * 0.01).bfloat16()
    copies = max(1, COLD // (outputs * columns // 2))
    one = Panels(
        lay_out(codes, 4, layout_for(math)), by_panel(scales), None, None, (outputs, columns), 4,
        GROUP, layout_for(math), torch.bfloat16,
    )  # fmt: skip
    whole = one.codes.expand(copies, *one.codes.shape).contiguous()
    ours = cycle([_with(one, part) for part in whole])
    read = cycle(torch.randn(copies, outputs * columns // 2 // 4 // 1024, 1024))
    vector = torch.randn(1024)
    found: dict[str, Callable[[], object]] = {
        math: lambda: packed_linear(x, next(ours), None, math),
        "ceiling read": lambda: torch.mv(next(read), vector),
    }
    found.update(_int4pack(x, codes, copies))
    found.update(_onnxruntime(x, outputs, copies))
    return found


def _with(panels: Panels, codes: Tensor) -> Panels:

    return replace(panels, codes=codes)


def _int4pack(x: Tensor, codes: Tensor, copies: int) -> dict[str, Callable[[], object]]:
    """torch's, with bf16 inputs."""
    n, k = codes.shape
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes + 8).int(), 1)
    scales = torch.full((k // GROUP, n, 2), 0.01, dtype=torch.bfloat16)
    turn = cycle([packed.clone() for _ in range(copies)])
    half = x.bfloat16()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return {"torch int4pack": lambda: product(half, next(turn), GROUP, scales)}


def _onnxruntime(x: Tensor, outputs: int, copies: int) -> dict[str, Callable[[], object]]:
    """MatMulNBits with accuracy_level 4, on as many threads as torch has."""
    try:
        import numpy as np
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return {}
    k = x.shape[1]
    shape = [outputs, k // GROUP, GROUP // 2]
    weight = helper.make_tensor("w", TensorProto.UINT8, shape, bytes(outputs * k // 2), raw=True)
    scale = np.full(outputs * k // GROUP, 0.01, dtype=np.float32)
    scales = helper.make_tensor("s", TensorProto.FLOAT, scale.shape, scale.tobytes(), raw=True)
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
        K=k, N=outputs, bits=4, block_size=GROUP, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [x.shape[0], outputs])],
        [weight, scales],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    data = model.SerializeToString()
    turn = cycle([onnxruntime.InferenceSession(data, options) for _ in range(copies)])
    rows = x.numpy()
    return {"onnxruntime": lambda: next(turn).run(None, {"x": rows})}


if __name__ == "__main__":
    timing.kernel_main(
        __doc__ or "",
        {f"{math} {m} x {n} x {k}": partial(cases, math, m, n, k)
         for math in MATHS for m, n, k in SHAPES},
    )  # fmt: skip
