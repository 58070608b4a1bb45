"""Which runtimes will take a result, known before any work: facts about loaders, as data.

Found by trying tiny models of every family in transformers 5.23 with compressed-tensors 0.20 and
in vLLM 0.32 on CPU (tests/interop and tests/peers repeat it); what concerns vLLM's GPU kernels was
read in its source and is called "expected" for that. Decoders in no table were not tried: of them
transformers is "expected" where their class was opened, anything else "unknown". Loaders change:
a "no" is a statement about these versions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from compress.arch.spec import DecoderSpec
from compress.formats import dense
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.compressed_tensors.encode import is_packed
from compress.formats.runtimes import (
    bitsandbytes_runtimes,
    other_runtimes,
    transformers_rules,
    vllm_rules,
)
from compress.formats.runtimes.verdicts import (
    TRIED,
    TRIED_IN_TRANSFORMERS,
    ResultFacts,
    Verdict,
    of_unlisted,
)
from compress.quant.scheme import ActivationScheme, QuantScheme


def runtimes(
    fmt: str,
    schemes: Mapping[str, QuantScheme],
    spec: DecoderSpec,
    *,
    g_idx: bool = False,
    kv_cache: ActivationScheme | None = None,
) -> list[Verdict]:
    """A verdict per runtime on a result, with the first thing that stands in the way.

    fmt: a key of FORMATS. schemes: of every quantized tensor, by name. g_idx: act-order "group".
    kv_cache: of the key/value cache whose scales are stored.
    """
    if fmt == dense.NAME or not (schemes or kv_cache):
        reason = _dense_reason(schemes.values())
        return [Verdict(name, "yes", reason) for name in _RUNTIMES]
    found = _of_format(fmt, schemes, spec, g_idx=g_idx, kv_cache=kv_cache)
    return [of_unlisted(verdict, spec) for verdict in found]


def _of_format(
    fmt: str,
    schemes: Mapping[str, QuantScheme],
    spec: DecoderSpec,
    *,
    g_idx: bool,
    kv_cache: ActivationScheme | None,
) -> list[Verdict]:
    if fmt == bitsandbytes.NAME and schemes:
        return [Verdict(*found) for found in bitsandbytes_runtimes.verdicts(spec, schemes)]
    linears = tuple((linear, schemes.get(linear.tensor)) for linear in spec.all_linears())
    result = ResultFacts(linears, spec, g_idx, kv_cache)
    if fmt in other_runtimes.FORMATS and schemes:
        return [Verdict(*found) for found in other_runtimes.verdicts(fmt, result)]
    return [_judge(name, result) for name in _RUNTIMES]


def _judge(name: str, result: ResultFacts) -> Verdict:
    obstacles, confirmed, note = _RUNTIMES[name]
    found = next(obstacles(result), None)
    if found is not None:
        return Verdict(name, "no", found)
    # In vLLM a quantized head was tried with packed weights only.
    heads = [scheme for x, scheme in result.quantized() if x.role == "head"]
    tried = name == "transformers" or all(is_packed(scheme) for scheme in heads)
    families = TRIED_IN_TRANSFORMERS if name == "transformers" else TRIED
    known = confirmed and tried and result.spec.family in families
    load = transformers_rules.load_option(result) if name == "transformers" else ""
    return Verdict(name, "yes" if known else "expected", note(result), load)


def _dense_reason(schemes: Iterable[QuantScheme]) -> str:
    dropped = any(scheme.activation for scheme in schemes)
    note = "; activations are not quantized in this format" if dropped else ""
    return f"plain weights, as every loader of the model takes{note}"


_Runtime = tuple[Callable[[ResultFacts], Iterator[str]], bool, Callable[[ResultFacts], str]]

# Name -> (what stands in the way, whether a yes was tried, note on a yes).
_RUNTIMES: Mapping[str, _Runtime] = MappingProxyType(
    {
        "vLLM on GPU": (vllm_rules.on_gpu, False, vllm_rules.note),
        "vLLM on CPU": (vllm_rules.on_cpu, True, vllm_rules.note),
        "transformers": (transformers_rules.obstacles, True, transformers_rules.note),
    }
)
