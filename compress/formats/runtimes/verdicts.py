"""What is said about a result and a runtime, and what the rules about runtimes look at."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.formats.compressed_tensors.encode import is_packed
from compress.quant.scheme import ActivationScheme, QuantScheme

# An option without which transformers fails on a result: CompressedTensorsConfig(dequantize=True),
# dtype bfloat16, or the name of a GGUF file.
LoadOption = Literal["", "dequantize", "bfloat16", "gguf"]


# Families of which tiny models were tried in every loader; of others in the tables a yes is only
# expected, and of decoders in no table nothing is known but what their class showed.
TRIED = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe"),
)
# Families tried in transformers, where it needs no other project's quantizer.
TRIED_IN_TRANSFORMERS = TRIED.union(
    ("gemma2", "gemma3_text", "gpt_neox", "opt", "olmo2", "smollm3"),
    ("ministral", "cwm", "deepseek_v3"),
)


class Verdict(NamedTuple):
    """yes: tried. expected: by the runtime's source, or by trying the class of a decoder in no
    table without its weights. no: refused or computed wrongly. unknown: neither tried nor read.

    load: the option that it needs to load the result; "" for none.
    """

    runtime: str
    verdict: Literal["yes", "expected", "no", "unknown"]
    reason: str
    load: LoadOption = ""


def of_unlisted(found: Verdict, spec: DecoderSpec) -> Verdict:
    """What of a verdict holds for a decoder that is in no table; others keep theirs."""
    if spec.family != "generic" or found.verdict == "no":
        return found
    if found.runtime == "transformers" and spec.unnamed is not None:
        shown = (
            f"not loaded with {spec.model_type} yet: its class was opened without weights, and a"
            " block of each kind was run"
        )
        reason = f"{found.reason}; {shown}" if found.reason else shown
        return found._replace(verdict="expected", reason=reason)
    return found._replace(
        verdict="unknown", reason=f"not tried with {spec.model_type}, which is in no table"
    )


@dataclass(frozen=True, slots=True)
class ResultFacts:
    """What a runtime will be given: every linear with its scheme, None for one that stays dense.

    g_idx: some linear has act-order "group". cache: of the key/value cache, None for an
    unquantized one.
    """

    linears: tuple[tuple[LinearSpec, QuantScheme | None], ...]
    spec: DecoderSpec
    g_idx: bool
    cache: ActivationScheme | None

    def quantized(self) -> Iterator[tuple[LinearSpec, QuantScheme]]:
        return ((linear, scheme) for linear, scheme in self.linears if scheme is not None)

    def schemes(self) -> set[QuantScheme]:
        return {scheme for _, scheme in self.quantized()}

    def experts(self) -> set[QuantScheme | None]:
        return {scheme for linear, scheme in self.linears if linear.expert is not None}

    def packs_zero_points(self) -> bool:
        return any(map(packs_zero_points, self.schemes()))


def packs_zero_points(scheme: QuantScheme) -> bool:
    """Whether zero points are packed like the codes; one of a tensor is a number."""
    return not scheme.symmetric and is_packed(scheme) and scheme.granularity != "tensor"


def everywhere(result: ResultFacts) -> Iterator[str]:
    """What no runtime takes."""
    if result.g_idx:
        yield (
            "act_order 'group' was dropped by compressed-tensors 0.19 and vLLM 0.32;"
            " use act_order 'static'"
        )


def differing(
    linears: Iterable[tuple[LinearSpec, QuantScheme | None]], first: LinearSpec | None = None
) -> str:
    """Two linears whose schemes differ, in words; the one is `first`, where that is given."""
    (a, one), *others = sorted(linears, key=lambda pair: first is not None and pair[0] != first)
    b, two = next((x, scheme) for x, scheme in others if scheme != one)
    words = ["unquantized" if scheme is None else scheme.describe() for scheme in (one, two)]
    return f"{a.name} is {words[0]}, {b.name} {words[1]}"


def indivisible(linear: LinearSpec, size: int, what: str = "group") -> str:
    return f"{linear.name}: its {linear.shape[1]} columns divide by no {what} of {size}"
