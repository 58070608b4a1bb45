"""Which runtimes will take a result, known before any work: facts about loaders, as data.

Found by trying tiny models of every family in transformers 5.23 with compressed-tensors 0.20 and
in vLLM 0.32 on CPU (tests/interop and tests/peers repeat it); what concerns vLLM's GPU kernels was
read in its source and is called "expected" for that. Loaders change: a "no" is a statement about
these versions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.formats import bitsandbytes, bitsandbytes_runtimes, dense
from compress.formats.compressed_tensors import is_packed
from compress.quant.scheme import QuantScheme


class Verdict(NamedTuple):
    """yes: tried. expected: by the runtime's source. no: refused or computed wrongly."""

    runtime: str
    verdict: Literal["yes", "expected", "no"]
    reason: str


@dataclass(frozen=True, slots=True)
class _Result:
    """What a runtime will be given."""

    linears: tuple[tuple[LinearSpec, QuantScheme | None], ...]
    spec: DecoderSpec
    g_idx: bool

    def quantized(self) -> Iterator[tuple[LinearSpec, QuantScheme]]:
        return ((linear, scheme) for linear, scheme in self.linears if scheme is not None)

    def schemes(self) -> set[QuantScheme]:
        return {scheme for _, scheme in self.quantized()}

    def experts(self) -> set[QuantScheme | None]:
        return {scheme for linear, scheme in self.linears if linear.expert is not None}


# Groups that vLLM's Marlin kernel takes; one scale a channel is fine too.
_MARLIN_GROUPS = (32, 64, 128)
# Weights that vLLM multiplies with integer activations.
_WITH_ACTIVATIONS = ((8, "channel"), (8, "tensor"), (4, "channel"), (4, "group"))
# Head sizes for which vLLM has an attention kernel on CPU.
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def runtimes(
    fmt: str, schemes: Mapping[str, QuantScheme], spec: DecoderSpec, *, g_idx: bool = False
) -> list[Verdict]:
    """A verdict per runtime on a result, with the first thing that stands in the way.

    fmt: a key of FORMATS. schemes: of every quantized tensor, by name. g_idx: act-order "group".
    """
    if fmt == bitsandbytes.NAME and schemes:
        return [Verdict(*found) for found in bitsandbytes_runtimes.verdicts(spec, schemes)]
    linears = tuple((linear, schemes.get(linear.tensor)) for linear in spec.all_linears())
    result = _Result(linears, spec, g_idx)
    if fmt == dense.NAME or not schemes:
        return [Verdict(name, "yes", _dense_reason(result)) for name in _RUNTIMES]
    return [_judge(name, result) for name in _RUNTIMES]


def _judge(name: str, result: _Result) -> Verdict:
    obstacles, confirmed, remark = _RUNTIMES[name]
    found = next(obstacles(result), None)
    if found is not None:
        return Verdict(name, "no", found)
    # A quantized head was tried in transformers only.
    tried = name == "transformers" or all(x.role != "head" for x, _ in result.quantized())
    known = confirmed and tried and result.spec.family != "generic"
    return Verdict(name, "yes" if known else "expected", remark(result))


def _dense_reason(result: _Result) -> str:
    dropped = any(s.activation for s in result.schemes())
    note = "; activations are not quantized in this format" if dropped else ""
    return f"plain weights of the source's size{note}"


def _transformers(result: _Result) -> Iterator[str]:
    yield from _everywhere(result)
    for linear, scheme in result.quantized():
        if linear.transposed:
            yield (
                f"{linear.name} is a Conv1D, and its loader quantizes torch.nn.Linear only: the"
                " weights would be left random; use format 'dense'"
            )
        if linear.shape[1] % scheme.columns_per_scale(linear.shape[1]):
            yield _indivisible(linear, scheme)
    experts = result.experts()
    if len(experts) > 1:
        yield "its experts are one fused parameter and must all have one scheme"
    for expert in experts:
        if expert is None:
            yield "its loader fails on experts that are not quantized beside layers that are"
        elif not expert.symmetric or not is_packed(expert):
            yield f"its experts take symmetric weight-only schemes, not {expert.describe()}"
    if _asymmetric(result) and len(result.schemes()) > 1:
        yield "asymmetric schemes load with dequantize=True only, and that takes one scheme a model"


def _transformers_remark(result: _Result) -> str:
    if _asymmetric(result):
        return (
            "with CompressedTensorsConfig(dequantize=True): compressed-tensors 0.20 cannot allocate"
            " packed zero points"
        )
    if len(result.schemes()) > 1:
        return "not with dequantize=True, which applies one scheme to all layers"
    return "dequantized at the first forward"


def _vllm(result: _Result) -> Iterator[str]:
    """What holds on every device."""
    yield from _everywhere(result)
    fused: dict[tuple[str, str], QuantScheme | None] = {}
    for linear, scheme in result.linears:
        if linear.fused is None:
            continue
        layer = linear.name.rsplit(".", 1)[0]
        if fused.setdefault((layer, linear.fused), scheme) != scheme:
            yield f"{linear.name} and the linears it is fused with have different schemes"
    for linear, scheme in result.quantized():
        if is_packed(scheme) and scheme.granularity == "tensor":
            yield f"weight-only schemes need one scale a channel or group, not {scheme.describe()}"
        if linear.shape[1] % scheme.columns_per_scale(linear.shape[1]):
            yield _indivisible(linear, scheme)
        if linear.transposed and not is_packed(scheme):
            yield f"{linear.name} is a Conv1D: its loader would transpose the int8 codes"
        if scheme.activation is not None:
            yield from _integer_activations(scheme)
    if len(result.experts()) > 1:
        yield "the experts of a layer must all have one scheme"


def _integer_activations(scheme: QuantScheme) -> Iterator[str]:
    """W8A8 with one scale a channel or tensor, and W4A8 with one a channel or group."""
    if not scheme.symmetric:
        yield f"integer activations need symmetric weights, not {scheme.describe()}"
    if (scheme.bits, scheme.granularity) not in _WITH_ACTIVATIONS:
        yield f"integer activations go with no weights that are {scheme.describe()}"


def _vllm_gpu(result: _Result) -> Iterator[str]:
    yield from _vllm(result)
    for scheme in result.schemes():
        if scheme.activation is not None:
            if scheme.bits != 8:
                yield f"{scheme.describe()}: integer activations go with 8-bit weights on GPU"
            continue
        if scheme.bits not in (4, 8):
            yield f"{scheme.describe()}: only the optional Humming kernels take {scheme.bits} bits"
        if scheme.bits == 8 and not scheme.symmetric:
            yield f"{scheme.describe()}: Marlin takes zero points with 4 bits only"
        if scheme.granularity == "group" and scheme.group_size not in _MARLIN_GROUPS:
            yield f"{scheme.describe()}: Marlin takes groups of 32, 64 or 128, or one per channel"


def _vllm_cpu(result: _Result) -> Iterator[str]:
    yield from _vllm(result)
    if result.spec.head_dim not in _CPU_HEADS:
        yield f"no attention kernel for head_dim {result.spec.head_dim} on CPU"
    for linear, scheme in result.quantized():
        if linear.expert is not None:
            yield "it has no kernels for quantized experts on CPU"
        if scheme.activation is not None:
            continue
        if scheme.bits != 4:
            yield f"its CPU kernels take 4-bit weights only, not {scheme.describe()}"
        if scheme.granularity == "group" and scheme.group_size % 2:
            yield f"its CPU kernel takes even groups, not {scheme.group_size}"
        if linear.shape[0] % 32 or linear.shape[1] % 32:
            yield f"{linear.name}: its CPU kernel takes multiples of 32, not {linear.shape}"


def _everywhere(result: _Result) -> Iterator[str]:
    if result.g_idx:
        yield (
            "act_order 'group' was dropped by compressed-tensors 0.19 and vLLM 0.32;"
            " use act_order 'static'"
        )


def _indivisible(linear: LinearSpec, scheme: QuantScheme) -> str:
    return f"{linear.name}: its {linear.shape[1]} columns divide by no group of {scheme.group_size}"


def _asymmetric(result: _Result) -> bool:
    return any(
        not s.symmetric and is_packed(s) and s.granularity != "tensor" for s in result.schemes()
    )


def _no_remark(result: _Result) -> str:
    return "by the rules of vLLM 0.32"


_Runtime = tuple[Callable[[_Result], Iterator[str]], bool, Callable[[_Result], str]]

# Name -> (what stands in the way, whether a yes was tried, remark on a yes).
_RUNTIMES: Mapping[str, _Runtime] = MappingProxyType(
    {
        "vLLM on GPU": (_vllm_gpu, False, _no_remark),
        "vLLM on CPU": (_vllm_cpu, True, _no_remark),
        "transformers": (_transformers, True, _transformers_remark),
    }
)
