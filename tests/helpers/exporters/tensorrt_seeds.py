"""Which fault each rule of TensorRT's lint must find."""

import ml_dtypes
import numpy as np
from onnx import TensorProto

from helpers.exporters import tensorrt_faults as fault
from helpers.exporters.tensorrt_faults import Seed, attribute, between, to, values

_DOUBLE = int(TensorProto.DOUBLE)
_HALF = int(TensorProto.FLOAT16)
_FLOAT = int(TensorProto.FLOAT)
_INT4 = int(TensorProto.INT4)

SEEDS: dict[str, Seed] = {
    "opset 25": Seed("opset", "dense", "reads 9 to 24", fault.imported("", 25)),
    "opset 8": Seed("opset", "dense", "it is 8", fault.imported("", 8)),
    "a foreign domain": Seed(
        "opset", "dense", "no operators of com.microsoft", fault.imported("com.microsoft", 1)
    ),
    "a function": Seed("opset", "dense", "a function hides", fault.a_function),
    "a foreign operator": Seed(
        "operator", "dense", "no operator of ai.onnx", to("MatMul", "MatMulNBits", "com.microsoft")
    ),
    "an unsupported operator": Seed(
        "operator", "dense", "TensorRT has no MatMulInteger", to("MatMul", "MatMulInteger")
    ),
    "an unlisted operator": Seed(
        "operator", "dense", "Hardmax is none of the operators", to("Sigmoid", "Hardmax")
    ),
    "a soft cap": Seed("restriction", "dense", "softcap", attribute("Attention", "softcap", 30.0)),
    "is_causal": Seed("restriction", "dense", "is_causal", attribute("Attention", "is_causal", 1)),
    "a mode of attention": Seed(
        "restriction", "dense", "output_mode", attribute("Attention", "qk_matmul_output_mode", 1)
    ),
    "a past in attention": Seed(
        "restriction",
        "dense",
        "takes no input 4",
        fault.extra("Attention", 4, "past_key_values.0.key"),
    ),
    "a present of attention": Seed("restriction", "dense", "gives 1 output", fault.second_output),
    "attention in 3 dimensions": Seed(
        "restriction", "dense", "has 3 dimensions", fault.three_dimensions
    ),
    "TopK unsorted": Seed("restriction", "experts", "sorted", attribute("TopK", "sorted", 0)),
    "TopK of 4000": Seed(
        "restriction", "experts", "K is 4000", values("constant/int64[1]/2", lambda x: x * 2000)
    ),
    "computed axes": Seed(
        "constant-input", "dense", "computed when the engine runs", fault.computed("Unsqueeze", 1)
    ),
    "a shape that is negated": Seed(
        "shape-arithmetic", "dense", "is computed by Neg", between("Slice", 1, "Neg")
    ),
    "a shape that is given in": Seed(
        "shape-arithmetic", "dense", "depends on what goes", fault.given_shape
    ),
    "a sum of integers": Seed("input-type", "dense", "is INT64, not FLOAT", fault.drop_cast),
    "a scale of another type": Seed(
        "strong-typing",
        "dense",
        "is FLOAT",
        between("RMSNormalization", 1, "Cast", to=_FLOAT),
    ),
    "a mask of another type": Seed(
        "strong-typing",
        "dense",
        "the mask is FLOAT",
        between("Attention", 3, "Cast", to=_FLOAT),
    ),
    "attention in 32 bits": Seed(
        "attention-kernel", "dense", "Attention is of FLOAT,", fault.attention(_FLOAT, 16)
    ),
    "heads of 12": Seed("attention-kernel", "dense", "heads have 12", fault.attention(_HALF, 12)),
    "a double": Seed(
        "type", "dense", "Cast makes DOUBLE", between("MatMul", 0, "Cast", to=_DOUBLE)
    ),
    "a constant of bytes": Seed(
        "type", "dense", "it is UINT8", values("constant/int64[1]/1", lambda x: x, np.uint8)
    ),
    "an infinity": Seed("finite", "capped", "not finite", values("e+38", lambda x: x * np.inf)),
    "a turned weight": Seed(
        "quantized-constant",
        "int4",
        "Transpose (seeded) reads",
        between("DequantizeLinear", 0, "Transpose"),
    ),
    "a weight read twice": Seed("quantized-constant", "int4", "2 nodes read", fault.second_reader),
    "a weight unread": Seed("quantized-constant", "dense", "0 nodes read", fault.unread),
    "quantized values given out": Seed(
        "quantized-value", "w8a8", "is an output", fault.quantized_output
    ),
    "quantized values read": Seed("quantized-value", "w8a8", "Identity", fault.reads_codes),
    "a pair with two scales": Seed("quantized-value", "w8a8", "another scale", fault.other_scale),
    "quantized values made": Seed(
        "quantized-value", "int4", "Transpose makes", between("DequantizeLinear", 0, "Transpose")
    ),
    "codes given in": Seed("dq-input", "int4", "comes from no Quant", fault.given_codes),
    "a decoded weight turned": Seed(
        "dq-output",
        "int4",
        "Transpose (seeded) reads the decoded",
        between("MatMul", 1, "Transpose", perm=[1, 0]),
    ),
    "a scale of 0": Seed("scale", "int4", "not above 0", values("weight_scale", fault.first(0))),
    "a scale below 0": Seed("scale", "int4", "not above", values("weight_scale", fault.first(-1))),
    "a scale that is none": Seed(
        "scale", "int4", "and finite", values("weight_scale", fault.first(np.nan))
    ),
    "a second scale of 0": Seed(
        "scale", "nvfp4", "not above 0", values("q_proj.weight_scale", fault.first(0))
    ),
    "a computed scale": Seed(
        "scale", "int4", "computed when", between("DequantizeLinear", 1, "Neg")
    ),
    "another type than the scale's": Seed(
        "scale", "int4", "it makes FLOAT16", attribute("DequantizeLinear", "output_dtype", _HALF)
    ),
    "a zero point of weights": Seed(
        "zero-point", "int4", "is not 0", fault.zero_point("DequantizeLinear", ml_dtypes.int4)
    ),
    "a zero point of values": Seed(
        "zero-point", "w8a8", "is not 0", fault.zero_point("QuantizeLinear", np.int8)
    ),
    "blocks of 32": Seed("granularity", "int4", "blocks of 32", fault.blocks(lambda k: k // 32)),
    "blocks that do not divide": Seed(
        "granularity", "int4", "do not divide", fault.blocks(lambda k: 3)
    ),
    "a wrong axis": Seed(
        "granularity", "int4", "say otherwise", attribute("DequantizeLinear", "axis", 1)
    ),
    "a wrong block size": Seed(
        "granularity", "int4", "say otherwise", attribute("DequantizeLinear", "block_size", 128)
    ),
    "a wrong axis of rows": Seed(
        "granularity",
        "int8",
        "scales on axis 0",
        attribute("DequantizeLinear", "axis", 0, "k_proj"),
    ),
    "values by channel": Seed("granularity", "w8a8", "give values one scale", fault.by_channel),
    "an odd number of codes": Seed("four-bits", "int4", "an odd number", fault.odd_codes),
    "values of 4 bits": Seed(
        "four-bits",
        "w8a8",
        "rounds values to INT4",
        attribute("QuantizeLinear", "output_dtype", _INT4),
    ),
    "shapes that do not fit": Seed("shape", "dense", "ShapeInferenceError", fault.misfit),
    "a rank that nobody knows": Seed("shape", "dense", "does not know seeded", fault.given_shape),
    "a nameless dimension": Seed("shape", "dense", "it has shape", fault.nameless),
    "heads without a number": Seed("past", "dense", "it has shape", fault.free_heads),
    "a state that is lost": Seed("past", "dense", "no output present.1.value", fault.lost_state),
    "new keys before the past": Seed(
        "past", "dense", "not its concatenation", fault.before_the_past
    ),
    "weights elsewhere": Seed("external-data", "dense", "not beside the model", fault.moved),
    "weights in two files": Seed(
        "external-data", "dense", "in several files", fault.entry("location", "other.data")
    ),
    "weights cut off": Seed("external-data", "dense", "bytes end at", fault.cut_off),
    "weights of another length": Seed(
        "external-data", "dense", "its shape and type need", fault.entry("length", "4")
    ),
    "no weights": Seed("external-data", "dense", "is not there", fault.absent),
}
