"""What vLLM 0.32, and transformers 5.23 with gptqmodel 7.6, take of GPTQ's and AWQ's formats.

On CPU it was tried on tiny models (tests/peers repeats it); what concerns GPUs was read in vLLM's
source (quantization/auto_gptq.py and auto_awq.py).
"""

from collections.abc import Iterator

from compress.formats.runtimes.verdicts import ResultFacts, differing, indivisible
from compress.formats.runtimes.vllm_rules import CPU_HEADS
from compress.quant.scheme import QuantScheme

# Those of vLLM's Marlin kernel, by which its GPTQ loader goes on a CPU too.
_GROUPS = (32, 64, 128)


def gptq_on_gpu(result: ResultFacts) -> Iterator[str]:
    """What stands in the way, most important first; so in all of these."""
    yield from _gptq_in_vllm(result)


def gptq_on_cpu(result: ResultFacts) -> Iterator[str]:
    yield from _gptq_in_vllm(result)
    yield from _on_cpu(result)


def awq_on_gpu(result: ResultFacts) -> Iterator[str]:
    yield from _fused(result)
    yield from _tied(result)


def awq_on_cpu(result: ResultFacts) -> Iterator[str]:
    yield from _fused(result)
    yield from _tied(result)
    yield from _on_cpu(result)


def gptq_in_transformers(result: ResultFacts) -> Iterator[str]:
    yield from _experts(result)
    inside = [(linear, scheme) for linear, scheme in result.linears if linear.role not in _OUTSIDE]
    if len({scheme for _, scheme in inside}) > 1:
        yield (
            "optimum, by which it loads GPTQ, gives all linears of the blocks one scheme:"
            f" {differing(inside)}"
        )
    yield from _head(result, "optimum replaces linears of blocks only")


def awq_in_transformers(result: ResultFacts) -> Iterator[str]:
    yield from _experts(result)
    for linear, _ in result.quantized():
        if linear.transposed:
            yield f"{linear.name} is a Conv1D, and its loader replaces torch.nn.Linear only"
    yield from _head(result, "its loader leaves output heads as they are")


_OUTSIDE = ("router", "head", "embedding")


def _gptq_in_vllm(result: ResultFacts) -> Iterator[str]:
    if result.g_idx:
        yield "act_order 'group' (desc_act) was dropped by vLLM 0.32; use act_order 'static'"
    for scheme in result.schemes():
        if scheme.bits not in (4, 8) or not scheme.symmetric:
            yield (
                f"its GPTQ loader takes symmetric weights of 4 or 8 bits, not {scheme.describe()}"
            )
        if scheme.granularity == "group" and scheme.group_size not in _GROUPS:
            yield (
                "its GPTQ loader takes groups of 32, 64 or 128, or one per channel, not of"
                f" {scheme.group_size}"
            )
    for linear, scheme in result.quantized():
        if linear.shape[1] % scheme.columns_per_scale(linear.shape[1]):
            yield indivisible(linear, scheme.group_size)
    yield from _fused(result)
    yield from _tied(result)


def _on_cpu(result: ResultFacts) -> Iterator[str]:
    for width in result.spec.head_widths:
        if width and width not in CPU_HEADS:
            yield f"no attention kernel for head_dim {width} on CPU"
    for linear, scheme in result.quantized():
        if linear.expert is not None:
            yield "it has no kernels for quantized experts on CPU"
        if scheme.bits != 4:
            yield f"its CPU kernels take 4-bit weights only, not {scheme.describe()}"
        if linear.shape[0] % 32 or linear.shape[1] % 32:
            yield f"{linear.name}: its CPU kernel takes multiples of 32, not {linear.shape}"


def _fused(result: ResultFacts) -> Iterator[str]:
    """It multiplies with q/k/v, and with gate/up, as one matrix."""
    seen: dict[tuple[str, str], QuantScheme | None] = {}
    for linear, scheme in result.linears:
        if linear.fused is None:
            continue
        key = (linear.name.rpartition(".")[0], linear.fused)
        if seen.setdefault(key, scheme) != scheme:
            yield f"{linear.name} and the linears it is fused with have different schemes"


def _tied(result: ResultFacts) -> Iterator[str]:
    for linear, _ in result.quantized():
        if linear.role == "head" and result.spec.tied:
            yield f"{linear.name} is tied to the embedding, which it does not look up quantized"


def _experts(result: ResultFacts) -> Iterator[str]:
    """transformers puts modules with codes in the place of linears; its experts are none."""
    for linear, _ in result.quantized():
        if linear.expert is not None:
            yield f"{linear.name}: experts are one parameter in transformers 5, not linears"


def _head(result: ResultFacts, reason: str) -> Iterator[str]:
    for linear, _ in result.quantized():
        if linear.role == "head":
            yield f"{linear.name} is quantized, and {reason}"
