"""What vLLM 0.32 takes of compressed-tensors' format.

On CPU it was tried on tiny models (tests/peers repeats it); what concerns GPUs was read in its
source (quantization/compressed_tensors and kernels/linear).
"""

from collections.abc import Iterator

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.formats.compressed_tensors.encode import NVFP4, is_packed, storage
from compress.formats.runtimes.verdicts import ResultFacts, everywhere, indivisible
from compress.quant.scheme import ActivationScheme, QuantScheme

# Groups that its Marlin kernel takes; one scale a channel is fine too.
_MARLIN_GROUPS = (32, 64, 128)
# Integer weights that it multiplies with integer activations.
_WITH_TOKENS = ((8, "channel"), (8, "tensor"), (4, "channel"), (4, "group"))
_WITH_STATIC = ((8, "channel"), (8, "tensor"))
# FP8 experts: granularity of weights and of inputs, whether those are dynamic.
_FP8_EXPERTS = (
    ("tensor", "tensor", False),
    ("tensor", "tensor", True),
    ("channel", "token", True),
    ("block", "group", True),
    ("block", "token", True),
)
# Head sizes for which it has an attention kernel on CPU.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def on_gpu(result: ResultFacts) -> Iterator[str]:
    """What stands in the way on a GPU, most important first."""
    yield from _anywhere(result)
    for scheme in result.schemes():
        if scheme.type == "float":
            continue
        if scheme.activation is not None:
            if scheme.activation.type == "int" and scheme.bits != 8:
                yield f"{scheme.describe()}: integer activations go with 8-bit weights on GPU"
            continue
        if scheme.bits not in (4, 8):
            yield f"{scheme.describe()}: only the optional Humming kernels take {scheme.bits} bits"
        if scheme.bits == 8 and not scheme.symmetric:
            yield f"{scheme.describe()}: Marlin takes zero points with 4 bits only"
        if scheme.granularity == "group" and scheme.group_size not in _MARLIN_GROUPS:
            yield f"{scheme.describe()}: Marlin takes groups of 32, 64 or 128, or one per channel"


def on_cpu(result: ResultFacts) -> Iterator[str]:
    """What stands in the way on a CPU, most important first."""
    yield from _anywhere(result)
    for width in result.spec.head_widths:
        if width and width not in CPU_HEADS:
            yield f"no attention kernel for head_dim {width} on CPU"
        if result.cache is not None and width % 32:
            yield f"its fp8 cache takes head_dim in multiples of 32 on CPU, not {width}"
    for linear, scheme in result.quantized():
        if linear.role == "embedding":
            yield f"{linear.name}: its lookup in a quantized embedding is a Triton kernel for GPUs"
        if linear.expert is not None:
            yield "it has no kernels for quantized experts on CPU"
        if scheme.type == "float":
            yield from _floats_on_cpu(scheme)
        elif scheme.activation is None:
            yield from _words_on_cpu(linear, scheme)
        elif scheme.activation.type == "float":
            yield f"{scheme.describe()}: it has kernels for Hopper only"


def _words_on_cpu(linear: LinearSpec, scheme: QuantScheme) -> Iterator[str]:
    if scheme.bits != 4:
        yield f"its CPU kernels take 4-bit weights only, not {scheme.describe()}"
    if scheme.granularity == "group" and scheme.group_size % 2:
        yield f"its CPU kernel takes even groups, not {scheme.group_size}"
    if linear.shape[0] % 32 or linear.shape[1] % 32:
        yield f"{linear.name}: its CPU kernel takes multiples of 32, not {linear.shape}"


def _floats_on_cpu(scheme: QuantScheme) -> Iterator[str]:
    if scheme.is_fp4:
        yield "its NVFP4 kernels are for CUDA"
    elif scheme.activation is None:
        yield f"{scheme.describe()}: its CPU kernels take FP8 weights with FP8 inputs only"
    elif scheme.granularity == "tensor":
        yield f"{scheme.describe()}: it cannot round to FP8 with one scale a tensor on CPU"
    elif scheme.granularity == "block":
        yield f"{scheme.describe()}: its CPU kernels for blocks need a processor with AMX"


def _anywhere(result: ResultFacts) -> Iterator[str]:
    """What holds on every device."""
    yield from everywhere(result)
    yield from _fused(result)
    for linear, scheme in result.quantized():
        if scheme.granularity in ("group", "block") and linear.shape[1] % scheme.group_size:
            yield indivisible(linear, scheme.group_size, scheme.granularity)
        if linear.transposed and not is_packed(scheme) and storage(scheme) != NVFP4:
            yield f"{linear.name} is a Conv1D: its loader would transpose the codes"
        yield from _floats(scheme) if scheme.type == "float" else _integers(scheme)
        if linear.role == "embedding" and not _looks_up(scheme):
            yield f"{linear.name}: it looks up packed symmetric weights of 4 or 8 bits only"
    if len(result.experts()) > 1:
        yield "the experts of a layer must all have one scheme"
    for expert in result.experts():
        if expert is not None:
            yield from _experts(expert)
    if result.cache is not None:
        if result.cache.type != "float":
            yield f"its cache takes fp8, not {result.cache.describe()}"
        if result.spec.family == "gpt2":
            yield "its GPT-2 loader has no place for scales of the cache"


def _looks_up(scheme: QuantScheme) -> bool:
    return is_packed(scheme) and scheme.symmetric and scheme.bits in (4, 8)


def _fused(result: ResultFacts) -> Iterator[str]:
    """It multiplies with q/k/v, and with gate/up, as one matrix."""
    fused: dict[tuple[str, str], tuple[LinearSpec, QuantScheme | None]] = {}
    for linear, scheme in result.linears:
        yield from _split_blocks(result.spec, linear, scheme)
        if linear.fused is None:
            continue
        key = (linear.name.rsplit(".", 1)[0], linear.fused)
        before, other = fused.get(key, (linear, scheme))
        if other != scheme:
            yield f"{linear.name} and the linears it is fused with have different schemes"
        if before is not linear and _cuts(scheme, before.shape[0]):
            yield _cut(linear, before.shape[0], scheme)
        fused[key] = (linear, scheme)


def _split_blocks(
    spec: DecoderSpec, linear: LinearSpec, scheme: QuantScheme | None
) -> Iterator[str]:
    """The parts of a linear that the source has fused already, all but the last."""
    parts: tuple[int, ...] = ()
    if linear.role == "qkv":
        sizes = spec.sizes_of(linear)
        parts = (sizes.of("q"), sizes.of("k"))
    elif linear.role == "gate_up":
        parts = (linear.shape[0] // 2,)
    for rows in parts:
        if _cuts(scheme, rows):
            yield _cut(linear, rows, scheme)


def _cuts(scheme: QuantScheme | None, rows: int) -> bool:
    return scheme is not None and scheme.granularity == "block" and rows % scheme.group_size > 0


def _cut(linear: LinearSpec, rows: int, scheme: QuantScheme | None) -> str:
    size = 0 if scheme is None else scheme.group_size
    return (
        f"{linear.name}: a part of {rows} rows, no multiple of blocks of {size}, lies before the"
        " last one of the matrix it is fused into"
    )


def _integers(scheme: QuantScheme) -> Iterator[str]:
    act = scheme.activation
    if scheme.granularity == "block":
        yield f"it has no kernels for integers in blocks ({scheme.describe()})"
    if is_packed(scheme) and scheme.granularity == "tensor":
        yield f"weight-only schemes need one scale a channel or group, not {scheme.describe()}"
    if act is None:
        return
    if not scheme.symmetric:
        yield f"quantized activations need symmetric weights, not {scheme.describe()}"
    if act.type == "float":
        if (scheme.bits, scheme.granularity) != (4, "group") or not _by_token(act):
            yield f"FP8 tokens go with 4-bit weights in groups, not {scheme.describe()}"
        return
    if act.bits != 8:
        yield f"activations have 8 bits there, not {act.bits}"
    taken = _WITH_TOKENS if _by_token(act) else () if act.dynamic else _WITH_STATIC
    if (scheme.bits, scheme.granularity) not in taken:
        yield f"it has no kernel for these weights and activations together: {scheme.describe()}"


def _floats(scheme: QuantScheme) -> Iterator[str]:
    act = scheme.activation
    if scheme.is_fp4:
        if act is not None:
            yield f"NVFP4 weights go with unquantized activations, not {act.describe()}"
        return
    if scheme.granularity == "group":
        yield f"FP8 weights have one scale a tensor, channel or block, not {scheme.describe()}"
    if act is None:
        return
    if act.type != "float":
        yield f"FP8 weights go with FP8 activations, not {act.describe()}"
    if scheme.granularity == "block" and not act.dynamic:
        yield f"FP8 weights in blocks go with dynamic activations, not {act.describe()}"


def _experts(scheme: QuantScheme) -> Iterator[str]:
    act = scheme.activation
    if scheme.type == "float" and not scheme.is_fp4:
        inputs = None if act is None else (scheme.granularity, act.granularity, act.dynamic)
        if inputs not in _FP8_EXPERTS:
            yield f"it has no kernel for experts that are {scheme.describe()}"
    elif scheme.type == "int" and act is not None and not act.dynamic:
        yield f"the inputs of its integer experts are dynamic, not {act.describe()}"


def _by_token(activation: ActivationScheme) -> bool:
    return activation.dynamic and activation.granularity == "token"


def note(result: ResultFacts) -> str:
    """What to know where a result is taken."""
    if any(
        s.type == "int" and s.activation and s.activation.type == "float" for s in result.schemes()
    ):
        return "on Hopper only, by the rules of vLLM 0.32"
    return "by the rules of vLLM 0.32"
