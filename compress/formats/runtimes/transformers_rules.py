"""What transformers 5.23 and 5.24 with compressed-tensors 0.20 take of compressed-tensors' format.

All of it was tried on tiny models (tests/interop repeats it).
"""

from collections.abc import Iterator

from compress.arch.spec import LinearSpec
from compress.formats.compressed_tensors.encode import is_packed
from compress.formats.runtimes.verdicts import (
    LoadOption,
    ResultFacts,
    differing,
    everywhere,
    indivisible,
    packs_zero_points,
)
from compress.quant.scheme import QuantScheme

# Attention modules are known to it by the names of their key projections.
_KEYS = ("k_proj", "qkv_proj")
_CACHE = (
    "transformers 5.24 leaves the cache as it is: it has another name there, which"
    " compressed-tensors 0.20 does not know"
)


def obstacles(result: ResultFacts) -> Iterator[str]:
    """What stands in the way, most important first."""
    yield from everywhere(result)
    for linear, scheme in result.quantized():
        if linear.transposed:
            yield (
                f"{linear.name} is a Conv1D, and its loader quantizes torch.nn.Linear only: the"
                " weights would be left random; use format 'dense'"
            )
        yield from _widths(linear, scheme)
    yield from _experts(result)
    yield from _several_schemes(result)
    if result.cache is not None:
        yield from _cache(result)


def _widths(linear: LinearSpec, scheme: QuantScheme) -> Iterator[str]:
    columns = linear.shape[1]
    if scheme.granularity == "group" and columns % scheme.group_size:
        yield indivisible(linear, scheme.group_size)
    act = scheme.activation
    if act is not None and act.granularity == "group" and columns % act.group_size:
        yield indivisible(linear, act.group_size, "group of inputs")


def _experts(result: ResultFacts) -> Iterator[str]:
    experts = result.experts()
    if len(experts) > 1:
        unlike = differing((x, s) for x, s in result.linears if x.expert is not None)
        yield f"its experts are one fused parameter and must all have one scheme: {unlike}"
    for expert in experts:
        if expert is None:
            yield "its loader fails on experts that are not quantized beside layers that are"
        elif expert.is_fp4:
            yield "its loader leaves the global scale out of the weights of NVFP4 experts"
        elif expert.type == "float" and expert.granularity not in ("tensor", "channel"):
            yield f"its FP8 experts have one scale a tensor or channel, not {expert.describe()}"
        elif expert.type == "int" and (not expert.symmetric or not is_packed(expert)):
            yield f"its experts take symmetric weight-only schemes, not {expert.describe()}"


def _cache(result: ResultFacts) -> Iterator[str]:
    keys = [x for x, _ in result.linears if x.role in ("k", "qkv")]
    strange = next((x for x in keys if x.name.rpartition(".")[2] not in _KEYS), None)
    if strange is not None:
        yield (
            f"it finds no attention around {strange.name}: the scales of the cache would be"
            " left out"
        )
    for linear, what in _dequantized(result):
        yield (
            f"{linear.name}: {what} load with dequantize=True only, which leaves the cache"
            " unquantized"
        )


def load_option(result: ResultFacts) -> LoadOption:
    """What it has to be told to load a result that it takes."""
    if _needs_dequantize(result):
        return "dequantize"
    return "bfloat16" if any(s.is_fp4 for s in result.schemes()) else ""


def note(result: ResultFacts) -> str:
    """How a result that is taken is to be loaded, and what becomes of its cache."""
    loaded = _loaded(result)
    if result.cache is None:
        return loaded
    return f"{loaded}; {_CACHE}"


def _loaded(result: ResultFacts) -> str:
    option = load_option(result)
    if option == "dequantize" and result.packs_zero_points():
        return (
            "with CompressedTensorsConfig(dequantize=True): compressed-tensors 0.20 cannot allocate"
            " packed zero points"
        )
    if option == "dequantize" and _packs_embedding(result):
        return (
            "with CompressedTensorsConfig(dequantize=True): transformers 5.23 asks for the weight"
            " of an embedding that is packed"
        )
    if option == "dequantize":
        return (
            "with CompressedTensorsConfig(dequantize=True), inputs unquantized: compressed-tensors"
            " 0.20 cannot allocate packed integers that go with float inputs"
        )
    if option == "bfloat16":
        return "in bfloat16, to which compressed-tensors 0.20 rounds NVFP4's weights"
    if len(result.schemes()) > 1:
        return "not with dequantize=True, which applies one scheme to all layers"
    if any(s is not None and s.activation for s in result.experts()):
        return "dequantized at the first forward; inputs of experts are not quantized"
    return "dequantized at the first forward"


def _needs_dequantize(result: ResultFacts) -> bool:
    return next(_dequantized(result), None) is not None


def _dequantized(result: ResultFacts) -> Iterator[tuple[LinearSpec, str]]:
    """Every linear that loads with dequantize=True only, and what of it does."""
    for linear, scheme in result.quantized():
        if is_packed(scheme) and scheme.activation is not None:
            yield linear, "packed integers that go with float inputs"
        elif packs_zero_points(scheme):
            yield linear, "packed zero points"
        elif linear.role == "embedding" and is_packed(scheme):
            yield linear, "packed embeddings"


def _several_schemes(result: ResultFacts) -> Iterator[str]:
    if len(result.schemes()) > 1:
        for linear, what in _dequantized(result):
            yield (
                f"{linear.name}: {what} load with dequantize=True only, and that takes one scheme a"
                f" model: {differing(result.quantized(), linear)}"
            )


def _packs_embedding(result: ResultFacts) -> bool:
    return any(x.role == "embedding" and is_packed(scheme) for x, scheme in result.quantized())
