"""What is tried: every kind of result that a recipe makes, and who opens it in each format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TRANSFORMERS, GPTQMODEL, VLLM = "transformers", "gptqmodel", "vLLM"

# Format -> who opens it here. The first is in the first table, vLLM after another in the second.
LOADERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "compressed-tensors": (TRANSFORMERS, VLLM),
        "gptq": (GPTQMODEL, VLLM),
        "gptq_v2": (GPTQMODEL, VLLM),
        "awq": (GPTQMODEL, VLLM),
        "fp8": (TRANSFORMERS, VLLM),
        "modelopt": (VLLM,),
        "bitsandbytes": (TRANSFORMERS,),
        "dense": (TRANSFORMERS,),
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """name: in the table. stages, rest: of the recipe. calibrated: whether it looks at data."""

    name: str
    stages: tuple[Mapping[str, Any], ...]
    calibrated: bool = False
    rest: Mapping[str, Any] = field(default_factory=dict)

    def own_stages(self) -> list[dict[str, Any]]:
        """Each with dicts of its own, since recipes take no YAML aliases."""
        return [json.loads(json.dumps(stage)) for stage in self.stages]


def _stage(method: str, scheme: Any = None, **options: Any) -> Mapping[str, Any]:
    return {"method": method, **({} if scheme is None else {"scheme": scheme}), **options}


def _group(bits: int, *, symmetric: bool = True) -> Mapping[str, Any]:
    return {"bits": bits, "symmetric": symmetric, "granularity": "group", "group_size": 32}


_G4, _CHANNEL = _group(4), {"bits": 4, "granularity": "channel"}
_GPTQ = _stage("gptq", _G4)
# Of the tiny model's inputs some reach 2.5, none the usual 6.
_OUTLIERS = {"outliers": "calibrated", "threshold": 2.5}
_CALIBRATED = {"bits": 8, "granularity": "channel", "activation": _OUTLIERS}
_MIXED = {
    "candidates": [_group(3), _group(8)],
    "target": {"bits_per_weight": 5.5},  # scales included: 3.5 and 8.5 to choose from
}
_SKIPS = [{"targets": ["down_proj"], "bits": 8}, {"targets": ["o_proj"], "skip": True}]
_EVERYWHERE = ["*", "lm_head", "embedding"]

ROWS = (
    Row("rtn, 4 bits", (_stage("rtn", _G4),)),
    Row("rtn, 4 bits, zero points", (_stage("rtn", _group(4, symmetric=False)),)),
    Row("rtn, 5 bits", (_stage("rtn", _group(5)),)),
    Row("rtn, 8 bits, a scale a row", (_stage("rtn", "W8A16"),)),
    Row("rtn, W8A8", (_stage("rtn", "W8A8"),)),
    Row("gptq, 4 bits", (_GPTQ,), True),
    Row("gptq, 4 bits, a scale a row", (_stage("gptq", _CHANNEL),), True),
    Row("gptq, 4 bits, act_order static", (_stage("gptq", _G4, act_order="static"),), True),
    Row("gptq, 4 bits, act_order group", (_stage("gptq", _G4, act_order="group"),), True),
    Row("gptq, 3 bits", (_stage("gptq", _group(3)),), True),
    Row("gptq, 2 bits, zero points", (_stage("gptq", _group(2, symmetric=False)),), True),
    Row("gptq, 3 or 8 bits by a target", (_stage("gptq", **_MIXED),), True),
    Row("gptq, 4 and 8 bits, o unquantized", (_stage("gptq", _G4, overrides=_SKIPS),), True),
    Row("gptq, 4 bits, the head too", (_GPTQ, {**_GPTQ, "targets": ["lm_head"]}), True),
    Row("rtn, 4 bits, head and embedding too", (_stage("rtn", _G4, targets=_EVERYWHERE),)),
    Row("gptq, 4 bits, INT8 cache", (_GPTQ,), True, {"kv_cache": "int8"}),
    Row("awq, 4 bits, zero points", (_stage("awq", _group(4, symmetric=False)),), True),
    Row("awq + gptq, 4 bits", (_stage("awq"), _GPTQ), True),
    Row("smoothquant + gptq, W8A8", (_stage("smoothquant"), _stage("gptq", "W8A8")), True),
    Row(
        "smoothquant + gptq, W8A8 static",
        (_stage("smoothquant"), _stage("gptq", "W8A8_STATIC")),
        True,
    ),
    Row("fp8, FP8 (static)", (_stage("fp8", "FP8"),), True),
    Row("fp8, FP8_DYNAMIC", (_stage("fp8", "FP8_DYNAMIC"),)),
    Row("fp8, FP8_DYNAMIC, FP8 cache", (_stage("fp8", "FP8_DYNAMIC"),), True, {"kv_cache": "fp8"}),
    Row("fp8, FP8_BLOCK", (_stage("fp8", "FP8_BLOCK"),)),
    Row("nvfp4, NVFP4A16", (_stage("nvfp4", "NVFP4A16"),)),
    Row("llm_int8, LLM_INT8", (_stage("llm_int8", "LLM_INT8"),)),
    Row("llm_int8, calibrated outliers", (_stage("llm_int8", _CALIBRATED),), True),
)
