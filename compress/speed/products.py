"""The workload of an open checkpoint, as the engine would lay it out."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.layer_cache import LayerCache
from compress.arch.spec import BlockSpec, LinearSpec
from compress.formats.weights import Weights
from compress.runtime.decoder.kv import cache_bytes
from compress.runtime.decoder.linear import facts_of, load_linear, looked_up_bytes
from compress.runtime.forms.block_panels import DecodedBlocks
from compress.runtime.forms.decoded import DecodedOnce, as_dense
from compress.runtime.forms.dense import kept_in
from compress.runtime.forms.form import Arithmetic, LinearFacts
from compress.runtime.forms.table import chosen_form
from compress.runtime.loading.room import settled_arithmetic
from compress.speed.workload import AttentionWork, Part, Product, Workload
from compress_kernels.panels import Math

DENSE = "dense"
# Linears that are one product where their forms join, as runtime/decoder/build.py has them.
_JOINT = (("q", "k", "v"), ("q", "kv_a"), ("q_a", "kv_a"), ("gate", "up"))


class _Kind(NamedTuple):
    facts: LinearFacts
    part: Part
    experts: int = 0


def workload_of(
    weights: Weights,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    math: Math = "exact",
) -> Workload:
    """dtype, device: that the engine computes in and on. kv_dtype: of keys and values, the same as
    dtype where left out. math: of products with codes.

    Of each kind of quantized linear one is read, for the bytes it takes. Errors: CheckpointError
    for a decoder that is in no table of forwards.
    """
    spec = weights.spec
    how = describe_forward(weights.checkpoint.config, spec)
    arithmetic = settled_arithmetic(weights, Arithmetic.here(dtype, device, math))
    counts: Counter[_Kind] = Counter()
    samples: dict[_Kind, LinearSpec] = {}
    for kind, linear in _kinds(weights, arithmetic):
        counts[kind] += 1
        samples.setdefault(kind, linear)
    products = tuple(_product(weights, k, n, samples[k], arithmetic) for k, n in counts.items())
    return Workload(
        products=products,
        other_bytes=looked_up_bytes(weights, arithmetic),
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


def _kinds(weights: Weights, how: Arithmetic) -> Iterator[tuple[_Kind, LinearSpec]]:
    """Of every product of the model, with one of its linears."""
    for block in weights.spec.blocks:
        yield from _of_block(weights, block, how)
    head = weights.spec.head_linear()
    if head is None:
        # It shares the embedding's weight.
        head = weights.spec.embedding_linear()
    yield _Kind(facts_of(weights, head), "head"), head


def _of_block(
    weights: Weights, block: BlockSpec, how: Arithmetic
) -> Iterator[tuple[_Kind, LinearSpec]]:
    experts = {linear.expert for linear in block.linears}
    for expert in sorted(experts, key=lambda e: -1 if e is None else e):
        part: Part = "block" if expert is None else "expert"
        count = 0 if expert is None else len(experts - {None})
        by_role = {x.role: x for x in block.linears if x.expert == expert}
        for roles in _JOINT:
            parts = [by_role[role] for role in roles if role in by_role]
            facts = [facts_of(weights, x) for x in parts]
            if len(parts) > 1 and _joined(facts, how):
                shape = (sum(x.shape[0] for x in parts), parts[0].shape[1])
                yield _Kind(replace(facts[0], shape=shape), part, count), parts[0]
                for role in roles:
                    by_role.pop(role, None)
        for linear in by_role.values():
            yield _Kind(facts_of(weights, linear), part, count), linear


def _joined(facts: list[LinearFacts], how: Arithmetic) -> bool:
    """Whether weights become one: codes that are alike, or weights that are dense in memory and
    kept in one dtype; their inputs alike."""
    activations = {None if x.scheme is None else x.scheme.activation for x in facts}
    if len(activations) > 1:
        return False
    (inputs,) = activations
    own = inputs is not None and (not inputs.dynamic or inputs.outliers == "calibrated")
    if own or (inputs is not None and any(x.factored for x in facts)):
        return False
    whole = [as_dense(x) if _is_decoded(x, how) else x for x in facts]
    kept = {kept_in(x.stored, how) for x in whole if not x.coded}
    coded = {(x.scheme, x.blocks, x.stored) for x in whole if x.coded}
    return len(kept) + len(coded) == 1 and all(chosen_form(x, how).form.joins for x in facts)


def _is_decoded(facts: LinearFacts, how: Arithmetic) -> bool:
    return isinstance(chosen_form(facts, how).form, DecodedOnce | DecodedBlocks)


def _product(
    weights: Weights, kind: _Kind, count: int, linear: LinearSpec, how: Arithmetic
) -> Product:
    facts = kind.facts
    if not facts.coded:
        nbytes = chosen_form(facts, how).form.nbytes(facts, how)
        return Product(facts.shape, kind.part, DENSE, count, nbytes, linear, kind.experts)
    kept = load_linear(weights, linear, how).weight
    one = replace(facts, shape=kept.shape)  # of several that are joined the first was read
    stored = f"{'decoded ' * _is_decoded(one, how)}{facts.describe()}"
    joint = facts.shape != kept.shape
    nbytes = chosen_form(one, how).form.nbytes(facts, how) if joint else kept.nbytes
    return Product(facts.shape, kind.part, stored, count, nbytes, linear, kind.experts)
