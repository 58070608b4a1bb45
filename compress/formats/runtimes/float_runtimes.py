"""Which runtimes take block FP8 and ModelOpt results: facts about loaders, as data.

Tried on tiny models in transformers 5.23 and in vLLM 0.32 on CPU (tests/interop and tests/peers
repeat it); what concerns vLLM on GPU was read in its source (quantization/fp8.py and modelopt.py)
and is called "expected" for that. Its kernels are those for compressed-tensors.
"""

from collections.abc import Iterator

from compress.formats.modelopt.config import algorithm
from compress.formats.runtimes import vllm_rules
from compress.formats.runtimes.verdicts import ResultFacts

# ModelOpt's algorithms that vLLM knows, and those that it has for experts.
_IN_VLLM = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W4A16_NVFP4")
_FOR_EXPERTS = ("FP8", "W4A16_NVFP4")


def fp8_in_transformers(result: ResultFacts) -> Iterator[str]:
    """What stands in the way of block FP8 where it is dequantized, on a CPU."""
    for linear, scheme in result.quantized():
        if linear.transposed:
            yield f"{linear.name} is a Conv1D, whose weight it expects in the source's order"
        if scheme.granularity == "tensor":
            yield (
                "it looks for the scale of a whole weight under another name than vLLM does; use"
                " format compressed-tensors"
            )
        elif any(size > scheme.group_size and size % scheme.group_size for size in linear.shape):
            yield (
                f"{linear.name}: it takes all blocks of {linear.shape} for equally large, and those"
                f" of {scheme.group_size} at the edge are not; use format compressed-tensors"
            )


def modelopt_on_gpu(result: ResultFacts) -> Iterator[str]:
    """What stands in vLLM's way on a GPU, most important first."""
    yield from _algorithms(result)
    yield from vllm_rules.on_gpu(result)


def modelopt_on_cpu(result: ResultFacts) -> Iterator[str]:
    """The same on a CPU."""
    yield from _algorithms(result)
    yield from vllm_rules.on_cpu(result)


def _algorithms(result: ResultFacts) -> Iterator[str]:
    for linear, scheme in result.quantized():
        name = algorithm(scheme)
        if linear.transposed:
            yield f"{linear.name} is a Conv1D: its loader would transpose the codes"
        if name not in _IN_VLLM:
            yield f"it takes ModelOpt's FP8 and FP4 algorithms, not {name}; use compressed-tensors"
        if linear.expert is not None and name not in _FOR_EXPERTS:
            yield f"its experts in ModelOpt's format are FP8 or W4A16_NVFP4, not {name}"
