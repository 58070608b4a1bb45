"""The workload of an open checkpoint, as the engine would lay it out."""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.layer_cache import LayerCache
from compress.arch.spec import BlockSpec, LinearSpec
from compress.formats.weights import Weights
from compress.quant.scheme import QuantScheme
from compress.runtime.decoder.kv import cache_bytes
from compress.runtime.decoder.linear import load_linear
from compress.speed.workload import AttentionWork, Part, Product, Workload

DENSE = "dense"
# Linears that are one product where they are plain, as runtime/decoder/build.py joins them.
_JOINT = (("q", "k", "v"), ("gate", "up"))


class _Kind(NamedTuple):
    shape: tuple[int, int]
    part: Part
    scheme: QuantScheme | None
    experts: int = 0


def workload_of(
    weights: Weights, *, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Workload:
    """dtype: that the engine computes in. kv_dtype: of keys and values, the same where left out.

    Of each kind of quantized linear one is read, for the bytes it takes. Errors: CheckpointError
    for a decoder that is in no table of forwards.
    """
    spec = weights.spec
    how = describe_forward(weights.checkpoint.config, spec)
    counts: Counter[_Kind] = Counter()
    samples: dict[_Kind, LinearSpec] = {}
    for kind, linear in _kinds(weights):
        counts[kind] += 1
        samples.setdefault(kind, linear)
    products = tuple(_product(weights, k, n, samples[k], dtype) for k, n in counts.items())
    embedding = 0 if spec.tied else prod(spec.embedding_shape) * dtype.itemsize
    return Workload(
        products=products,
        other_bytes=embedding,
        attention=tuple(_attention(how, kv_dtype or dtype)),
        chosen=how.experts_per_token,
    )


def _attention(how: ForwardSpec, kv_dtype: torch.dtype) -> Iterator[AttentionWork]:
    """Layers that keep and compute the same for each position, together."""
    alike: dict[tuple[LayerCache, int], list[int]] = {}
    for index, layer in enumerate(how.layers):
        alike.setdefault((layer.cache(), layer.products), []).append(index)
    for (cache, products), numbers in alike.items():
        windows = tuple(how.layers[index].window for index in numbers)
        yield AttentionWork(windows, products, cache_bytes([cache], kv_dtype), numbers[0])


def _kinds(weights: Weights) -> Iterator[tuple[_Kind, LinearSpec]]:
    """Of every product of the model, with one of its linears."""
    for block in weights.spec.blocks:
        yield from _of_block(weights, block)
    head = weights.spec.head_linear()
    if head is None:
        head = weights.spec.embedding_linear()
        yield _Kind(head.shape, "head", None), head
    else:
        yield _Kind(head.shape, "head", weights.scheme(head.name)), head


def _of_block(weights: Weights, block: BlockSpec) -> Iterator[tuple[_Kind, LinearSpec]]:
    experts = {linear.expert for linear in block.linears}
    for expert in sorted(experts, key=lambda e: -1 if e is None else e):
        part: Part = "block" if expert is None else "expert"
        count = 0 if expert is None else len(experts - {None})
        by_role = {x.role: x for x in block.linears if x.expert == expert}
        for roles in _JOINT:
            parts = [by_role[role] for role in roles if role in by_role]
            if len(parts) > 1 and all(weights.scheme(x.name) is None for x in parts):
                rows = sum(x.shape[0] for x in parts)
                yield _Kind((rows, parts[0].shape[1]), part, None, count), parts[0]
                for role in roles:
                    by_role.pop(role, None)
        for linear in by_role.values():
            yield _Kind(linear.shape, part, weights.scheme(linear.name), count), linear


def _product(
    weights: Weights, kind: _Kind, count: int, linear: LinearSpec, dtype: torch.dtype
) -> Product:
    if kind.scheme is None:
        nbytes = prod(kind.shape) * dtype.itemsize
        return Product(kind.shape, kind.part, DENSE, count, nbytes, experts=kind.experts)
    kept = load_linear(weights, linear, dtype=dtype, device=torch.device("cpu")).weight
    stored = kind.scheme.describe()
    return Product(kind.shape, kind.part, stored, count, kept.nbytes, linear, kind.experts)
