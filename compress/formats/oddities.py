"""What is odd about a quantized checkpoint, one line each: nothing wrong, but worth knowing."""

from collections.abc import Iterator, Sequence

from compress.arch.spec import LinearSpec
from compress.checkpoint.detect import find_block
from compress.checkpoint.jsonfile import read_object
from compress.checkpoint.shards.header import TensorInfo
from compress.checkpoint.ties import contradiction
from compress.formats.coded_weights import CodedWeights
from compress.formats.gptq import codec as gptq
from compress.formats.gptq.config import GptqSchemes
from compress.formats.kv_cache import is_cache_tensor
from compress.quant.packing import WORD_BITS
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import is_trivial

_CODES, _ZEROS = ("qweight", "weight_packed"), ("qzeros", "weight_zero_point")
_FLOATS = ("F16", "BF16", "F32", "F8_E8M0")


def oddities(weights: CodedWeights) -> list[str]:
    """By headers, config.json and orders of columns (g_idx); no weight is read."""
    linears = [x for x in weights.spec.all_linears() if weights.is_quantized(x.name)]
    found = [(x, s) for x in linears if (s := weights.scheme(x.name)) is not None]
    return [
        *_config(weights),
        *_tied(weights),
        *_ignored(weights),
        *_fused(weights),
        *_groups(found),
        *_padding(weights, linears),
        *_words(weights, found),
        *_orders(weights, found),
        *_parts(weights, linears),
        *_outside(weights),
        *_cache(weights),
    ]


def _config(weights: CodedWeights) -> Iterator[str]:
    if find_block(read_object(weights.checkpoint.path / "config.json")) is None:
        taken = find_block(weights.checkpoint.config) is not None
        source = "it was taken from a file beside it" if taken else "the tensors say what it is"
        yield f"config.json has no quantization_config; {source}"
    if weights.format.name == gptq.NAME and _asymmetric(weights):
        yield (
            "zero points are stored less one (GPTQ version 1); kernels disagree on those that are"
            " 0, and `export --to gptq_v2` stores them as they are"
        )


def _tied(weights: CodedWeights) -> Iterator[str]:
    odd = contradiction(weights.checkpoint.config, weights.spec)
    yield from () if odd is None else (odd,)


def _asymmetric(weights: CodedWeights) -> bool:
    schemes = (weights.scheme(x.name) for x in weights.spec.all_linears())
    return any(scheme is not None and not scheme.symmetric for scheme in schemes)


def _ignored(weights: CodedWeights) -> Iterator[str]:
    """Entries that the config's list of dense modules lacks, or has too many of."""
    if not weights.reader.lists_modules:
        return
    missing, wrong = [], []
    _, block = find_block(weights.checkpoint.config) or ("", {})
    skipped = ("embedding", "head") if weights.reader.skips_head(block) else ("embedding",)
    for x in weights.spec.all_linears():
        said = weights.schemes.scheme(x.name)
        if weights.is_quantized(x.name):
            wrong += [x.name] if said is None else []
        elif said is not None and x.role not in skipped:  # no class of theirs is quantized
            missing.append(x.name)
    tied = weights.spec.head is None and "head" not in skipped
    if tied and weights.schemes.scheme("lm_head") is not None:
        missing.append("lm_head (tied, it has no tensor)")
    if missing:
        yield f"not quantized, but quantization_config does not ignore it: {_some(missing)}"
    if wrong:
        yield f"quantized, but quantization_config ignores it: {_some(wrong)}"


def _fused(weights: CodedWeights) -> Iterator[str]:
    schemes: dict[tuple[int, str, int | None], set[QuantScheme | None]] = {}
    for block in weights.spec.blocks:
        for x in block.linears:
            if x.fused is not None:
                key = block.index, x.fused, x.expert
                schemes.setdefault(key, set()).add(weights.scheme(x.name))
    mixed = [f"block {index} {name}" for (index, name, _), s in schemes.items() if len(s) > 1]
    if mixed:
        yield f"stored in several ways, though runtimes fuse them: {_some(mixed)}"


def _groups(found: Sequence[tuple[LinearSpec, QuantScheme]]) -> Iterator[str]:
    short = [
        f"{x.name} ({x.shape[1]} columns in groups of {scheme.group_size})"
        for x, scheme in found
        if x.shape[1] % scheme.columns_per_scale(x.shape[1])
    ]
    if short:
        yield f"the last group is short: {_some(short)}"


def _padding(weights: CodedWeights, linears: Sequence[LinearSpec]) -> Iterator[str]:
    rows = max([weights.spec.vocab, *(x.shape[0] for x in linears if x.role == "head")])
    if rows > weights.spec.vocab:
        yield f"the head is padded by {rows - weights.spec.vocab} rows beyond the vocabulary"


def _words(weights: CodedWeights, found: Sequence[tuple[LinearSpec, QuantScheme]]) -> Iterator[str]:
    """Codes and zero points that leave bits of their words unused, told by the tensors' sizes."""
    for what, parts in (("codes", _CODES), ("zero points", _ZEROS)):
        padded = []
        for x, scheme in found:
            (n, k), packed = x.shape, _first(weights, x, _CODES, "I32")
            info = _first(weights, x, parts, "I32")
            numbers = n * (k if parts is _CODES else scheme.groups(k))
            if packed and info and info.numel * WORD_BITS > numbers * scheme.bits:
                padded.append(f"{x.name} ({n} x {k})")
        if padded:
            yield f"words of {what} are padded, which some kernels do not take: {_some(padded)}"


def _orders(
    weights: CodedWeights, found: Sequence[tuple[LinearSpec, QuantScheme]]
) -> Iterator[str]:
    """Orders of columns that the config denies: loaders that go by it leave them out."""
    if not isinstance(weights.schemes, GptqSchemes):
        return
    read, tensors = weights.checkpoint.read, weights.checkpoint.tensors
    denied = [
        x.name
        for x, scheme in found
        if not weights.schemes.reorders(x.name)
        and (name := f"{x.name}.{weights.reader.g_idx}") in tensors
        and not is_trivial(read(name), scheme)
    ]
    if denied:
        yield f"g_idx gives columns an order though desc_act is false: {_some(denied)}"


def _first(
    weights: CodedWeights, linear: LinearSpec, parts: Sequence[str], dtype: str
) -> TensorInfo | None:
    """The first of the parts that a linear has in that dtype."""
    tensors = weights.checkpoint.tensors
    infos = (tensors.get(f"{linear.name}.{part}") for part in parts)
    return next((info for info in infos if info is not None and info.dtype == dtype), None)


def _parts(weights: CodedWeights, linears: Sequence[LinearSpec]) -> Iterator[str]:
    tensors = weights.checkpoint.tensors

    def dtypes(part: str) -> set[str]:
        names = (f"{x.name}.{part}" for x in linears)
        return {tensors[name].dtype for name in names if name in tensors}

    if dtypes("pre_quant_scale"):
        yield "inputs are multiplied by a pre_quant_scale, which only dense weights can take in"
    schemes = ((x, weights.scheme(x.name)) for x in linears)
    half = [x for x, s in schemes if s is not None and s.is_fp4 and s.activation is None]
    if any(f"{x.name}.input_scale" in tensors for x in half):
        yield "runtimes round inputs to FP4 (NVFP4); here they stay as they are"
    main = {dtype for part in weights.reader.marks for dtype in dtypes(part)} & set(_FLOATS)
    if "F8_E8M0" in main:
        yield "scales are powers of two (E8M0)"
    only = weights.format.scale_dtype
    if only == "F16" and main - {"F16"}:
        yield f"scales are {', '.join(sorted(main))}; the format's loaders expect F16"


def _outside(weights: CodedWeights) -> Iterator[str]:
    known = {x.name for x in weights.spec.all_linears()}
    marked = [
        name.rpartition(".")[0]
        for name in weights.checkpoint.tensors
        if name.rpartition(".")[2] in weights.reader.marks
    ]
    modules = [module for module in dict.fromkeys(marked) if module not in known]
    if modules:
        yield f"quantized, but no linear of the decoder: {_some(modules)}"


def _cache(weights: CodedWeights) -> Iterator[str]:
    if weights.kv_cache and not any(map(is_cache_tensor, weights.checkpoint.tensors)):
        yield (
            "quantization_config says that keys and values are quantized, but there are no scales:"
            " here they stay as they are"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more
