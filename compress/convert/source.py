"""A quantized checkpoint as an export sees it: what must fit into the other format."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.errors import CheckpointError
from compress.formats import CODECS, CodedWeights
from compress.quant.scheme import ActivationScheme, QuantScheme


@dataclass(frozen=True, slots=True)
class ExportLayer:
    """A quantized linear and how it is stored.

    order: hash of its g_idx, None where every column is in the group of its place. factor: its
    inputs are multiplied by factors that nothing has folded away. zeros: how many zero points it
    has. centred: all of them are 0. homeless: by format, how many of them that has no place for.
    bytes_before, bytes_after: on disk.
    """

    linear: LinearSpec
    scheme: QuantScheme
    order: str | None
    factor: bool
    zeros: int
    centred: bool
    homeless: Mapping[str, int]
    bytes_before: int
    bytes_after: int = 0

    @property
    def reordered(self) -> bool:
        """Whether its columns have an order of their own (act-order "group")."""
        return self.order is not None


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a source holds.

    layers: its quantized linears, by original tensor name. shapes: of the tensors of the dense
    original. others: quantized tensors that are no linears of the decoder. kv_cache, kv_dtype:
    scheme of the key/value cache whose scales it has, None for none, and their dtype code. centred:
    how many layers are symmetric by their zero points, though the source calls them asymmetric.
    """

    weights: CodedWeights
    layers: Mapping[str, ExportLayer]
    shapes: Mapping[str, tuple[int, ...]]
    others: tuple[str, ...]
    kv_cache: ActivationScheme | None
    kv_dtype: str
    centred: int = 0

    @property
    def schemes(self) -> dict[str, QuantScheme]:
        return {name: layer.scheme for name, layer in self.layers.items()}

    @property
    def with_g_idx(self) -> frozenset[str]:
        return frozenset(name for name, layer in self.layers.items() if layer.reordered)


def look(weights: CodedWeights) -> Held:
    """Reads headers and what lies beside codes and scales; CheckpointError for what is wrong."""
    shapes = weights.shapes
    layers = {
        linear.tensor: _layer(weights, linear)
        for linear in weights.spec.all_linears()
        if linear.tensor in shapes and weights.is_quantized(linear.name)
    }
    others = tuple(
        name
        for name in shapes
        if name.endswith(".weight")
        and name not in layers
        and weights.is_quantized(name.removesuffix(".weight"))
    )
    for name in others:  # only dense takes them, but nothing takes damaged ones
        weights.beside(name.removesuffix(".weight"))
    held = Held(weights, layers, shapes, others, weights.kv_cache, _cache_dtype(weights))
    return _centred(held)


def _centred(held: Held) -> Held:
    """With symmetric schemes where no layer needs its zero points: AWQ has no other word for them.

    All or none, as linears that runtimes merge share a scheme.
    """
    asymmetric = {name: x for name, x in held.layers.items() if not x.scheme.symmetric}
    if not all(x.centred for x in asymmetric.values()):
        return held
    layers = {name: _symmetric(x) if name in asymmetric else x for name, x in held.layers.items()}
    return replace(held, layers=layers, centred=len(asymmetric))


def _symmetric(layer: ExportLayer) -> ExportLayer:
    return replace(layer, scheme=replace(layer.scheme, symmetric=True), zeros=0, homeless={})


def _layer(weights: CodedWeights, linear: LinearSpec) -> ExportLayer:
    scheme = weights.scheme(linear.name)
    if scheme is None:
        raise CheckpointError(
            f"{linear.name} has quantized tensors but quantization_config does not say how they are"
            " stored; the config and the tensors do not belong together"
        )
    tensors = weights.checkpoint.tensors
    beside = weights.beside(linear.name)
    size = sum(
        tensors[name].nbytes
        for part in dict.fromkeys((*weights.reader.parts, "weight"))
        if (name := f"{linear.name}.{part}") in tensors
    )
    zero = beside.zero
    homeless = {
        name: n
        for name, fmt in CODECS.items()
        if zero is not None and (n := fmt.unstorable(zero, scheme))
    }
    return ExportLayer(
        linear,
        scheme,
        order=None if beside.g_idx is None else _hash(beside.g_idx),
        factor=beside.input_factor is not None,
        zeros=0 if zero is None else zero.numel(),
        centred=zero is not None and not bool(zero.any()),
        homeless=homeless,
        bytes_before=size,
    )


def _hash(g_idx: Tensor) -> str:
    return sha256(g_idx.int().numpy().tobytes()).hexdigest()


def _cache_dtype(weights: CodedWeights) -> str:
    """Dtype code of the scales of the key/value cache; CheckpointError when some are missing."""
    if weights.kv_cache is None:
        return "BF16"
    scales = [weights.cache(block) for block in weights.spec.blocks]
    if any(found is None for found in scales):
        raise CheckpointError(
            f"{weights.checkpoint.path}: quantization_config has a kv_cache_scheme, but not every"
            " block has scales of its cache; download it again, or take that key out of config.json"
            " to convert the weights alone"
        )
    k = scales[0][0].scale if scales and scales[0] is not None else None
    return "BF16" if k is None else DTYPE_CODES[k.dtype]
