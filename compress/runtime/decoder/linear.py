"""Linear layers of the engine: a weight in one of the forms, its bias, how inputs are rounded."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.checkpoint.shards.dtype_codes import PLAIN_DTYPES
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.formats.weights import Weights
from compress.quant.blocks import in_blocks
from compress.quant.ggml_kinds import KINDS
from compress.quant.tensor import InputQuantization
from compress.runtime.forms.block_rows import BlockRows
from compress.runtime.forms.dense import kept_in
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight
from compress.runtime.forms.input_rounding import rounded_alike
from compress.runtime.forms.table import chosen_form, in_panels, pack_blocks, pack_codes, pack_dense


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """weight: [N, K]. bias: [N] or None. inputs: how inputs are rounded, None for not at all; each
    token by itself, as it must not matter what else a step has.
    """

    weight: LinearWeight
    bias: Tensor | None = None
    inputs: InputQuantization | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, K] -> [rows, N]."""
        return self.weight.matmul(x, self.inputs, self.bias)


def load_linear(weights: Weights, spec: LinearSpec, how: Arithmetic) -> Linear:
    """A linear of a checkpoint, its weight in the first form that takes it. CheckpointError for NaN
    or infinity."""
    name = f"{spec.name}.bias"
    bias = None
    if weights.stored_in(name) is not None:
        bias = weights.read(name, check_finite=True).to(how.device, how.dtype)
    inputs = weights.activation(spec.name)
    facts = facts_of(weights, spec)
    quantized = weights.quantized(spec.tensor)
    if quantized is not None:
        return Linear(pack_codes(quantized, facts, how), bias, inputs)
    if facts.blocks is not None:
        blocks = weights.blocks(spec.tensor, check_finite=True)
        assert blocks is not None, "it is of a type of blocks"
        return Linear(pack_blocks(blocks, facts, how), bias, inputs)
    weight = weights.read(spec.tensor, check_finite=True)
    weight = weight.t() if spec.transposed else weight
    return Linear(pack_dense(weight, facts, how), bias, inputs)


# Roles of what the decoder cuts by heads when it loads it, or takes rows of: of no form for codes.
CUT, DECODED = ("kv_b",), ("kv_b", "embedding")


def facts_of(weights: Weights, spec: LinearSpec) -> LinearFacts:
    """What is known of a linear's weight before it is read. Codes of keys and values of latents,
    which are cut by heads, and of an embedding are decoded, to the checkpoint's plain dtype. Blocks
    of GGUF's stay blocks in an embedding, too, and are fp32 where they are cut."""
    tensors = weights.checkpoint.tensors
    scheme, reader = weights.scheme(spec.name), weights.format.reader
    if scheme is not None and spec.role in DECODED:
        return LinearFacts(spec.shape, None, weights.plain_dtype, weights.plain_dtype)
    if scheme is None or reader is None:
        code = weights.stored_in(spec.tensor)
        stored = TORCH_DTYPES[code] if code in PLAIN_DTYPES else torch.float32
        blocks = code if in_blocks(code) and spec.role not in CUT else None
        return LinearFacts(spec.shape, None, stored, stored, blocks=blocks)
    scales = (f"{spec.name}.{part}" for part in reader.scales)
    stored = next(TORCH_DTYPES[tensors[name].dtype] for name in scales if name in tensors)
    factored = reader.factor is not None and f"{spec.name}.{reader.factor}" in tensors
    return LinearFacts(spec.shape, scheme, stored, weights.plain_dtype, factored)


def load_rows(weights: Weights, spec: LinearSpec, how: Arithmetic) -> BlockRows | None:
    """An embedding that stays in blocks; None for any other. CheckpointError for NaN or
    infinity."""
    if not in_panels(facts_of(weights, spec), how):
        return None
    blocks = weights.blocks(spec.tensor, check_finite=True)
    return None if blocks is None else BlockRows(blocks)


def load_dense(weights: Weights, spec: LinearSpec, how: Arithmetic) -> Tensor:
    """What the decoder does more with than multiply: the weight [N, K] in the dtype in which dense
    weights are kept. CheckpointError for NaN or infinity."""
    weight = weights.read(spec.tensor, check_finite=True)
    return weight.to(how.device, kept_in(facts_of(weights, spec).stored, how))


def multiplied(weights: Weights) -> Iterator[LinearSpec]:
    """The linears that the decoder multiplies with: of the blocks, and the head where it has a
    weight of its own."""
    yield from weights.spec.linears()
    head = weights.spec.head_linear()
    if head is not None:
        yield head


def weight_bytes(weights: Weights, how: Arithmetic) -> int:
    """What the weights of all linears will take, each in its form. Nothing is read."""
    found = (facts_of(weights, spec) for spec in multiplied(weights))
    return sum(chosen_form(facts, how).form.nbytes(facts, how) for facts in found)


def embedding_bytes(weights: Weights, how: Arithmetic) -> int:
    """What the token embedding will take, and a head that is tied to it."""
    facts = facts_of(weights, weights.spec.embedding_linear())
    head = chosen_form(facts, how).form.nbytes(facts, how) if weights.spec.tied else 0
    return looked_up_bytes(weights, how) + head


def looked_up_bytes(weights: Weights, how: Arithmetic) -> int:
    """What of the token embedding no product reads."""
    facts = facts_of(weights, weights.spec.embedding_linear())
    if facts.blocks is not None and in_panels(facts, how):
        return KINDS[facts.blocks].nbytes(prod(facts.shape))
    return 0 if weights.spec.tied else prod(facts.shape) * kept_in(facts.stored, how).itemsize


def refusals(weights: Weights, how: Arithmetic) -> tuple[str, ...]:
    """A line for each kind of linears whose form is not the first: which form, how many, and why
    not those before it. Nothing is read."""
    counts: dict[tuple[str, str, tuple[tuple[str, str], ...]], int] = {}
    for spec in multiplied(weights):
        facts = facts_of(weights, spec)
        chosen = chosen_form(facts, how)
        stored, refused, coded = facts.describe(), chosen.refused, weights.scheme(spec.name)
        if coded is not None and spec.role in CUT:
            stored, refused = coded.describe(), (("packed codes", "it is cut by heads"),)
        if refused:
            kind = stored, chosen.form.name, refused
            counts[kind] = counts.get(kind, 0) + 1
    return tuple(
        f"{count} linear{'s' * (count > 1)} ({stored}): {form};"
        f" not {' nor '.join(f'{name} ({reason})' for name, reason in refused)}"
        for (stored, form, refused), count in counts.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Linears that read one input: one product where their forms can be joined.

    linears: one for all parts, or one a part. sizes: outputs of each part.
    """

    linears: tuple[Linear, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: tuple[Linear, ...], sizes: tuple[int, ...]) -> "Joint":
        """parts: one linear for each size, or one that is fused already."""
        joined = _join(parts) if len(parts) > 1 else None
        return cls(parts if joined is None else (joined,), sizes)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: [rows, K] -> [rows, size] for each part."""
        if len(self.linears) == len(self.sizes):
            return tuple(linear(x) for linear in self.linears)
        return torch.split(self.linears[0](x), list(self.sizes), dim=-1)


def _join(parts: tuple[Linear, ...]) -> Linear | None:
    """One linear in place of several; None where parts round their inputs each in its way, only
    some have a bias, or their forms stay apart."""
    biases = [part.bias for part in parts if part.bias is not None]
    inputs = [part.inputs for part in parts]
    alike = rounded_alike(inputs) and len(biases) in (0, len(parts))
    first, *others = (part.weight for part in parts)
    weight = first.joined(tuple(others)) if alike else None
    bias = torch.cat(biases) if biases else None
    return None if weight is None else Linear(weight, bias, inputs[0])
