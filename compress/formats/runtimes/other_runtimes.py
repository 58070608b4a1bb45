"""Which runtimes take GPTQ, AWQ, FP8 and ModelOpt results: facts about loaders, as data.

A table of rules that lie in packed_rules, float_runtimes and vllm_rules, each with how its loader
was asked: "yes" where a "yes" was tried, "expected" where it was read in the loader's source.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from compress.formats.runtimes import float_runtimes, packed_rules, vllm_rules
from compress.formats.runtimes.verdicts import TRIED, TRIED_IN_TRANSFORMERS, ResultFacts

Found = tuple[str, Literal["yes", "expected", "no"], str]
_Rule = Callable[[ResultFacts], Iterator[str]]


def verdicts(fmt: str, result: ResultFacts) -> list[Found]:
    """(runtime, verdict, reason) of each, with the first thing that stands in the way."""
    found: list[Found] = []
    for runtime, rule, known, note in _RULES[fmt]:
        obstacle = next(rule(result), None)
        if obstacle is not None:
            found.append((runtime, "no", obstacle))
        else:
            own = (fmt, runtime) == ("fp8", "transformers")
            families = TRIED_IN_TRANSFORMERS if own else TRIED
            usual = result.spec.family in families and not result.g_idx
            found.append((runtime, known if usual else "expected", note))
    return found


def _because(reason: str) -> _Rule:
    return lambda result: iter((reason,))


_Row = tuple[str, _Rule, Literal["yes", "expected"], str]
_HALF = "with --dtype half, the dtype of its scales"
_VLLM = "by the rules of vLLM 0.32"


_GPTQ: tuple[_Row, ...] = (
    ("vLLM on GPU", packed_rules.gptq_on_gpu, "expected", _HALF),
    ("vLLM on CPU", packed_rules.gptq_on_cpu, "yes", _HALF),
    ("transformers", packed_rules.gptq_in_transformers, "yes", "with gptqmodel and optimum"),
)
_AWQ: tuple[_Row, ...] = (
    ("vLLM on GPU", packed_rules.awq_on_gpu, "expected", _HALF),
    ("vLLM on CPU", packed_rules.awq_on_cpu, "yes", _HALF),
    ("transformers", packed_rules.awq_in_transformers, "yes", "with gptqmodel"),
)

_RULES: Mapping[str, tuple[_Row, ...]] = MappingProxyType(
    {
        "gptq": _GPTQ,
        "gptq_v2": _GPTQ,
        "awq": _AWQ,
        "fp8": (
            ("vLLM on GPU", vllm_rules.on_gpu, "expected", _VLLM),
            ("vLLM on CPU", vllm_rules.on_cpu, "expected", _VLLM),
            (
                "transformers",
                float_runtimes.fp8_in_transformers,
                "yes",
                "dequantized on a CPU, in the dtype of the checkpoint and in no other",
            ),
        ),
        "modelopt": (
            ("vLLM on GPU", float_runtimes.modelopt_on_gpu, "expected", _VLLM),
            ("vLLM on CPU", float_runtimes.modelopt_on_cpu, "yes", _VLLM),
            (
                "transformers",
                _because("it does not know ModelOpt's format and takes its codes for weights"),
                "expected",
                "",
            ),
        ),
    }
)
FORMATS = tuple(_RULES)
