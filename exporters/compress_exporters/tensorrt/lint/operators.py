"""TensorRT's published operators, as data.

Source: docs/operators.md of onnx/onnx-tensorrt as of TensorRT 10.15 ("opset 9 to opset 24", the
same rows in 11.2), narrowed by what the parser's importers assert where the table says nothing.
Listed are the operators that a decoder's graph can have, and those that exporters like to emit and
the table refuses. Types are ONNX's names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

VERSION = "10.15"
OPSETS = (9, 24)  # first and last that the parser reads
DOMAINS = ("", "ai.onnx")

FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")
INTS = ("INT32", "INT64")
NUMBERS = (*FLOATS, *INTS)
ANY = (*NUMBERS, "BOOL")
# Only between QuantizeLinear and DequantizeLinear, or from an initializer to the latter.
QUANTIZED = ("INT8", "FLOAT8E4M3FN", "INT4", "FLOAT4E2M1")
SIZES = ("INT64",)

Types = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """A row of the table.

    types: of the inputs that are not in `other`; in one node they are all of one type, as strong
        typing converts nothing.
    other: input -> its types. constant: inputs that are known when the engine is built. sizes:
        inputs that say shapes, or places in one.
    absent: inputs that must not be there. ranks: input -> its dimensions.
    outputs: how many may be used. fixed: attribute -> the one value it may have; None for none.
    """

    types: Types
    other: Mapping[int, Types] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    ranks: Mapping[int, int] = field(default_factory=dict)
    outputs: int = 1
    fixed: Mapping[str, object] = field(default_factory=dict)


_SHAPE = MappingProxyType({1: SIZES})
_INDEX = MappingProxyType({1: INTS})
_AXES = Operator(NUMBERS, other=_SHAPE, constant=(1,))
_UNSQUEEZE = Operator(ANY, other=_SHAPE, constant=(1,))
_FLOAT = Operator(FLOATS)
_NUMBER = Operator(NUMBERS)
_LOGIC = Operator(("BOOL",))

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "Add": _NUMBER,
        "And": _LOGIC,
        "Attention": Operator(
            FLOATS,
            other=MappingProxyType({3: (*FLOATS, "BOOL")}),
            absent=(4, 5, 6),
            ranks=MappingProxyType({0: 4, 1: 4, 2: 4, 3: 4}),
            fixed=MappingProxyType(
                # Upper left or lower right: runtimes disagree on what is_causal means with a past.
                {"softcap": 0.0, "qk_matmul_output_mode": None, "softmax_precision": None}
                | {"q_num_heads": None, "kv_num_heads": None, "is_causal": 0}
            ),
        ),
        "Cast": Operator((*ANY, "UINT8")),
        "Concat": Operator(ANY),
        "Constant": Operator(ANY),
        "ConstantOfShape": Operator(SIZES, sizes=(0,)),
        "Cos": _FLOAT,
        "CumSum": Operator(FLOATS, other=_INDEX, constant=(1,)),
        "DequantizeLinear": Operator(
            QUANTIZED, other=MappingProxyType({1: FLOATS, 2: QUANTIZED}), constant=(2,)
        ),
        "Div": _NUMBER,
        "Equal": _NUMBER,
        "Erf": _FLOAT,
        "Exp": _FLOAT,
        "Expand": Operator(ANY, other=_SHAPE, sizes=(1,)),
        "Gather": Operator(ANY, other=_INDEX),
        "GatherElements": Operator(ANY, other=_INDEX),
        "Gelu": _FLOAT,
        "Gemm": _FLOAT,
        "Greater": _NUMBER,
        "GreaterOrEqual": _NUMBER,
        "Identity": Operator(ANY),
        "LayerNormalization": _FLOAT,
        "Less": _NUMBER,
        "LessOrEqual": _NUMBER,
        "Log": _FLOAT,
        "MatMul": _FLOAT,
        "Max": _NUMBER,
        "Min": _NUMBER,
        "Mul": _NUMBER,
        "Neg": _NUMBER,
        "Not": _LOGIC,
        "Or": _LOGIC,
        "Pow": _NUMBER,
        "QuantizeLinear": Operator(FLOATS, other=MappingProxyType({2: QUANTIZED}), constant=(1, 2)),
        "RMSNormalization": _FLOAT,
        "Range": _NUMBER,
        "Reciprocal": _FLOAT,
        "ReduceMax": _AXES,
        "ReduceMean": _AXES,
        "ReduceSum": _AXES,
        "Relu": _NUMBER,
        "Reshape": Operator(ANY, other=_SHAPE, sizes=(1,)),
        "RotaryEmbedding": Operator(FLOATS, other=MappingProxyType({3: SIZES})),
        "ScatterElements": Operator(NUMBERS, other=_INDEX),
        "ScatterND": Operator(NUMBERS, other=_INDEX, fixed=MappingProxyType({"reduction": "none"})),
        "Shape": Operator(ANY),
        "Sigmoid": _FLOAT,
        "Sin": _FLOAT,
        "Slice": Operator(
            ANY, other=MappingProxyType(dict.fromkeys(range(1, 5), INTS)), sizes=(1, 2, 3, 4)
        ),
        "Softmax": _FLOAT,
        "Split": Operator(ANY, other=_SHAPE, sizes=(1,), outputs=1 << 16),
        "Sqrt": _FLOAT,
        "Squeeze": _UNSQUEEZE,
        "Sub": _NUMBER,
        "Sum": _NUMBER,
        "Tanh": _FLOAT,
        "TensorScatter": Operator(
            (*FLOATS, "INT32"),
            other=MappingProxyType({2: INTS}),
            ranks=MappingProxyType({0: 4, 1: 4}),
            fixed=MappingProxyType({"axis": -2, "mode": "linear"}),
        ),
        "Tile": Operator(ANY, other=_SHAPE, sizes=(1,)),
        "TopK": Operator(
            NUMBERS,
            other=_SHAPE,
            constant=(1,),
            outputs=2,
            fixed=MappingProxyType({"sorted": 1}),
        ),
        "Transpose": Operator(ANY),
        "Trilu": Operator(ANY, other=_SHAPE),
        "Unsqueeze": _UNSQUEEZE,
        "Where": Operator(ANY, other=MappingProxyType({0: ("BOOL",)})),
        "Xor": _LOGIC,
    }
)
# What a single kernel does attention for, so that a builder takes it; found with TensorRT for RTX
# 1.7, which refuses to build all others.
FUSED_TYPES = ("FLOAT16", "BFLOAT16")
FUSED_HEADS = range(16, 257, 8)  # head_dim
TOPK_BELOW = 3840  # "K input must be less than 3840"

# What shapes may be computed with: "IConcatenationLayer, IElementWiseLayer, IGatherLayer,
# IIdentityLayer, and IReduceLayer" and IShapeLayer (TensorRT 10.16, Dynamic Shapes: Advanced
# Topics), and the slices and shuffles that the parser itself adds.
SHAPE_OPERATORS = (
    *("Add", "Sub", "Mul", "Div", "Min", "Max", "Cast", "Concat", "Gather", "Identity", "Shape"),
    *("ReduceMax", "ReduceMean", "ReduceSum", "Reshape", "Slice", "Squeeze", "Unsqueeze"),
)

# What the table says "N" of, and what does the same there.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "Bernoulli": "sample outside of the graph",
        "BitShift": "keep codes in types of 4 and 8 bits",
        "BitwiseAnd": "keep codes in types of 4 and 8 bits",
        "BitwiseNot": "keep codes in types of 4 and 8 bits",
        "BitwiseOr": "keep codes in types of 4 and 8 bits",
        "BitwiseXor": "keep codes in types of 4 and 8 bits",
        "Compress": "use Gather",
        "ConcatFromSequence": "use Concat",
        "ConvInteger": "use QuantizeLinear, DequantizeLinear and Conv",
        "DynamicQuantizeLinear": "calibrate the scale and use QuantizeLinear",
        "MatMulInteger": "use QuantizeLinear, DequantizeLinear and MatMul",
        "Multinomial": "sample outside of the graph",
        "Optional": "make it two graphs",
        "OptionalGetElement": "make it two graphs",
        "OptionalHasElement": "make it two graphs",
        "QLinearConv": "use QuantizeLinear, DequantizeLinear and Conv",
        "QLinearMatMul": "use QuantizeLinear, DequantizeLinear and MatMul",
        "SequenceAt": "use Gather",
        "SequenceConstruct": "use Concat",
        "SequenceEmpty": "use Concat",
        "SequenceInsert": "use Concat",
        "SplitToSequence": "use Split",
        "StringConcat": "work on text outside of the graph",
        "StringNormalizer": "work on text outside of the graph",
        "StringSplit": "work on text outside of the graph",
        "Unique": "use TopK",
    }
)
