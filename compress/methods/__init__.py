"""The methods a recipe stage can name: one paper, one file, one row here."""

from collections.abc import Mapping
from types import MappingProxyType

from compress.methods import (
    awq,
    fp8,
    gptq,
    k_quants,
    llm_int8,
    nvfp4,
    plain,
    rtn,
    smoothquant,
)
from compress.methods.awq import AwqConfig
from compress.methods.fp8 import Fp8Config
from compress.methods.gptq import GptqConfig
from compress.methods.k_quants import KQuantsStageConfig
from compress.methods.llm_int8 import LlmInt8Config
from compress.methods.method import Method, row, whole_row
from compress.methods.nvfp4 import Nvfp4Config
from compress.methods.rtn import RtnConfig
from compress.methods.smoothquant import SmoothQuantConfig

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "rtn": row(
            RtnConfig,
            rtn.quantize,
            "round to nearest with a scale search; needs no data",
            why_not=rtn.why_not,
            needs=rtn.needs,
        ),
        "gptq": row(
            GptqConfig,
            gptq.quantize,
            "error-compensated rounding after one Hessian a shared input",
            why_not=rtn.why_not,
            needs=gptq.needs,
        ),
        "fp8": row(
            Fp8Config,
            fp8.quantize,
            "8-bit floats (E4M3) with scales a tensor, a row, a group or a block",
            why_not=fp8.why_not,
            needs=fp8.needs,
        ),
        "nvfp4": row(
            Nvfp4Config,
            nvfp4.quantize,
            "4-bit floats (E2M1) in groups of 16 with E4M3 scales",
            why_not=nvfp4.why_not,
            needs=nvfp4.needs,
        ),
        "awq": row(
            AwqConfig,
            plain.quantize,
            "scales channels by their activations before this or a later stage rounds",
            why_not=plain.why_not,
            needs=awq.needs,
            fold=awq.search,
        ),
        "smoothquant": row(
            SmoothQuantConfig,
            plain.quantize,
            "moves outliers of the inputs into the weights before both are rounded",
            why_not=plain.why_not,
            needs=smoothquant.needs,
            fold=smoothquant.search,
        ),
        "llm_int8": row(
            LlmInt8Config,
            llm_int8.quantize,
            "8-bit weights and inputs, 16 bit for the input columns that are outliers",
            why_not=llm_int8.why_not,
            needs=llm_int8.needs,
        ),
        "k_quants": whole_row(
            KQuantsStageConfig,
            "llama.cpp's blocks, in a GGUF file: types mixed by role and layer, compensated",
            needs=k_quants.needs,
        ),
    }
)
