"""Products of int4 weights by other programs, on copies in turn that caches do not hold."""

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

Call = Callable[[], object]


def torch_int4pack(x: Tensor, codes: Tensor, group: int, copies: int) -> Call:
    """torch's, with bf16 inputs. x: [M, K]. codes: int8 [N, K], -8 to 7."""
    n, k = codes.shape
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes + 8).int(), 1)
    scales = torch.full((k // group, n, 2), 0.01, dtype=torch.bfloat16)
    turn, half = cycle([packed.clone() for _ in range(copies)]), x.bfloat16()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda: product(half, next(turn), group, scales)


def torch_bf16(x: Tensor, outputs: int, copies: int) -> Call:
    """torch's linear, inputs and weights in bf16."""
    weights = torch.randn(copies, outputs, x.shape[1]).bfloat16()
    turn, half = cycle(weights), x.bfloat16()
    return lambda: torch.nn.functional.linear(half, next(turn))


def onnxruntime_nbits(x: Tensor, outputs: int, group: int, copies: int, level: int) -> Call | None:
    """MatMulNBits by accuracy_level: 1 takes inputs in fp32, 4 rounds them to 8 bits. On as many
    threads as torch has; None where ONNX Runtime is not there."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # A session has threads of its own, which would spin on the cores of the next side: with two
    # threads 64 rows of int8 took 7.7 ms beside it in place of 1.8.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    data = _graph(x.shape[0], outputs, x.shape[1], group, level)
    turn = cycle([onnxruntime.InferenceSession(data, options) for _ in range(copies)])
    rows = x.numpy()
    return lambda: next(turn).run(None, {"x": rows})


def _graph(rows: int, n: int, k: int, group: int, level: int) -> bytes:
    import numpy as np
    from onnx import TensorProto, helper

    shape = [n, k // group, group // 2]
    weight = helper.make_tensor("w", TensorProto.UINT8, shape, bytes(n * k // 2), raw=True)
    scale = np.full(n * k // group, 0.01, dtype=np.float32)
    scales = helper.make_tensor("s", TensorProto.FLOAT, scale.shape, scale.tobytes(), raw=True)
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
        K=k, N=n, bits=4, block_size=group, accuracy_level=level,
    )  # fmt: skip
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, width])
        for name, width in (("x", k), ("y", n))
    ]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], [weight, scales])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(model.SerializeToString())
