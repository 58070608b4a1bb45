"""Which runtimes take GPTQ, AWQ, FP8 and ModelOpt results: facts about loaders, as data.

GPTQ with 4 bits was opened in vLLM 0.32 on CPU. The rest was read in the sources of vLLM and of
transformers 5, and is called "expected" for that.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from compress.formats.verdicts import Result
from compress.formats.vllm_rules import CPU_HEADS

Found = tuple[str, Literal["yes", "expected", "no"], str]
_Rule = Callable[[Result], Iterator[str]]


def verdicts(fmt: str, result: Result) -> list[Found]:
    """(runtime, verdict, reason) of each, with the first thing that stands in the way."""
    found: list[Found] = []
    for runtime, rule, known, remark in _RULES[fmt]:
        against = next(rule(result), None)
        if against is not None:
            found.append((runtime, "no", against))
        else:
            usual = result.spec.family != "generic" and not result.g_idx
            found.append((runtime, known if usual else "expected", remark))
    return found


def _gpu(result: Result) -> Iterator[str]:
    for linear, scheme in result.quantized():
        if linear.role == "head" and result.spec.tied:
            yield f"{linear.name} is tied to the embedding, which it does not look up quantized"
        if linear.expert is not None and scheme.bits not in (4, 8):
            yield f"its kernels for experts take 4 and 8 bits, not {scheme.bits}"


def _cpu(result: Result) -> Iterator[str]:
    if result.spec.head_dim not in CPU_HEADS:
        yield f"no attention kernel for head_dim {result.spec.head_dim} on CPU"
    for linear, scheme in result.quantized():
        if linear.expert is not None:
            yield "it has no kernels for quantized experts on CPU"
        if scheme.bits != 4:
            yield f"its CPU kernels take 4-bit weights only, not {scheme.describe()}"
        if linear.shape[0] % 32 or linear.shape[1] % 32:
            yield f"{linear.name}: its CPU kernel takes multiples of 32, not {linear.shape}"


def _modules(result: Result) -> Iterator[str]:
    """transformers puts modules with codes in the place of linears; its experts are none."""
    for linear, _ in result.quantized():
        if linear.expert is not None:
            yield f"{linear.name}: experts are one parameter in transformers 5, not linears"


def _blocks_on_gpu(result: Result) -> Iterator[str]:
    for linear, scheme in result.quantized():
        if scheme.granularity == "block" and linear.shape[1] % scheme.group_size:
            yield f"{linear.name}: its columns divide by no block of {scheme.group_size}"


def _blocks_in_transformers(result: Result) -> Iterator[str]:
    for linear, scheme in result.quantized():
        if linear.transposed:
            yield f"{linear.name} is a Conv1D, which it does not replace"
        if scheme.activation is not None and not scheme.activation.dynamic:
            yield "it takes dynamic inputs only"


def _nothing(result: Result) -> Iterator[str]:
    return iter(())


def _because(reason: str) -> _Rule:
    return lambda result: iter((reason,))


_Row = tuple[str, _Rule, Literal["yes", "expected"], str]
_GPTQMODEL = "with gptqmodel and optimum"
_NO_FP8_ON_CPU = _because("it rounds inputs to FP8 on GPUs, and on CPUs with AMX")


def _words(on_cpu: Literal["yes", "expected"]) -> tuple[_Row, ...]:
    return (
        ("vLLM on GPU", _gpu, "expected", "with --dtype half"),
        ("vLLM on CPU", _cpu, on_cpu, "with --dtype half"),
        ("transformers", _modules, "expected", _GPTQMODEL),
    )


_RULES: Mapping[str, tuple[_Row, ...]] = MappingProxyType(
    {
        "gptq": _words("yes"),
        "gptq_v2": _words("expected"),
        "awq": _words("expected"),
        "fp8": (
            ("vLLM on GPU", _blocks_on_gpu, "expected", ""),
            ("vLLM on CPU", _NO_FP8_ON_CPU, "expected", ""),
            ("transformers", _blocks_in_transformers, "expected", "on a GPU, or dequantized"),
        ),
        "modelopt": (
            ("vLLM on GPU", _nothing, "expected", ""),
            ("vLLM on CPU", _because("its config refuses ModelOpt checkpoints"), "expected", ""),
            ("transformers", _because("it has no loader for ModelOpt"), "expected", ""),
        ),
    }
)
FORMATS = tuple(_RULES)
