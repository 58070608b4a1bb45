"""A decoder as ops of compiled code, in the order in which it calls them.

Each function here is that of a class of this folder, op for op, so what comes out has its bits;
what it cannot say `why_not` refuses.
"""

import torch
from torch import Tensor

from compress.quant.tensor import InputQuantization
from compress.runtime.decoder.attention import Angles, Attention
from compress.runtime.decoder.calls import (
    Turns,
    add_call,
    attend_call,
    blocks_call,
    gather_call,
    highest_call,
    norm_call,
    rotate_call,
    round_call,
    spread_call,
    store_calls,
    why_no_call,
)
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.latent import LatentAttention
from compress.runtime.decoder.layer import DecoderLayer
from compress.runtime.decoder.linear import Linear
from compress.runtime.decoder.linear_ops import Made, Ops, Parts, head_ops, joint_ops, linear_ops
from compress.runtime.decoder.mlp_ops import linears_of, mlp_ops
from compress.runtime.decoder.norms import Norm
from compress.runtime.decoder.scratch import Choices, Scratch
from compress.runtime.forms.block_rows import BlockRows
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.input_rounding import code_rounding
from compress_kernels.cpu.program import Given
from compress_kernels.rounding import CodeRounding


def why_not(decoder: Decoder) -> str | None:
    """Why a decoder is no list of ops; None where it is."""
    reasons = (_why_no_layer(layer) for layer in decoder.layers)
    return next((reason for reason in reasons if reason is not None), None)


def _why_no_layer(layer: DecoderLayer) -> str | None:
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        inputs = attention.unfolding.inputs
        if inputs is not None and code_rounding(inputs) is None:
            return "latents are rounded but for outliers"
    reasons = map(why_no_call, (*_linears(attention), *linears_of(layer.mlp)))
    return next((reason for reason in reasons if reason is not None), None)


def _linears(attention: Attention | LatentAttention) -> tuple[Linear, ...]:
    if isinstance(attention, Attention):
        return (*attention.qkv.linears, attention.out)
    queries = () if attention.queries is None else (attention.queries[1],)
    heads = (*attention.unfolding.keys.linears, *attention.unfolding.values.linears)
    return (*attention.entering.linears, *queries, *heads, attention.out)


def decoder_ops(
    decoder: Decoder, cache: KVCache, tables: tuple[Angles | None, ...], scratch: Scratch
) -> Ops:
    """As Decoder.forward; what it returns is in scratch.final. tables: of each rotation cosine and
    sine of every position; where there are none, those of the step are in scratch.angles."""
    yield from _embedded(decoder, scratch)
    pairs = tuple(len(rotation.frequencies) for rotation in decoder.rotations)
    late = decoder.how.rotate_late
    turns = tuple(Turns(scratch.angles(number, n), late) for number, n in enumerate(pairs))
    for table, turn in zip(tables, turns, strict=True):
        for of, out in () if table is None else zip(table, turn.angles, strict=True):
            yield gather_call(of, Given("positions"), out)
    for layer in decoder.layers:
        yield from _layer(layer, cache, turns, scratch)
    norm, rows = decoder.final_norm, Given("wanted rows")
    wanted = scratch.final if norm is None else scratch.of("wanted", scratch.hidden)
    yield gather_call(scratch.x, Given("wanted"), wanted, rows=rows)
    if norm is not None:
        yield norm_call(norm, wanted[:, None], scratch.final[:, None], rows)


def choice_ops(decoder: Decoder, scratch: Scratch, best: Choices) -> Ops:
    """The highest logit of each row of scratch.final; nothing where they are none of a product
    alone."""
    if decoder.how.final_softcap is None and why_no_call(decoder.head) is None:
        rows = Given("wanted rows")
        final = scratch.final[: len(best.logits)]
        yield from linear_ops(decoder.head, final, best.logits, scratch, rows)
        tokens = torch.frombuffer(best.tokens, dtype=torch.int64)
        highest = torch.frombuffer(best.highest, dtype=torch.float32)
        yield highest_call(best.logits, tokens, highest, rows)


def _embedded(decoder: Decoder, scratch: Scratch) -> Ops:
    """As Decoder.embed, into scratch.x."""
    x, embedding = scratch.x, decoder.embedding
    scale = float(x.new_tensor(decoder.how.embedding_scale))
    if isinstance(embedding, BlockRows):
        yield blocks_call(embedding.blocks, Given("ids"), x, scale)
    else:
        of = embedding.values if isinstance(embedding, FloatWeight) else embedding.panels
        yield gather_call(of, Given("ids"), x, scale)
    if decoder.positions is not None and decoder.how.positions is not None:
        learned = scratch.of("learned", scratch.hidden)
        yield gather_call(
            decoder.positions[decoder.how.positions.offset :], Given("positions"), learned
        )
        yield add_call(x, learned, x)


def _layer(layer: DecoderLayer, cache: KVCache, turns: tuple[Turns, ...], scratch: Scratch) -> Ops:
    """As DecoderLayer; the residual is in scratch.x before and afterwards."""
    x, attention = scratch.x, layer.attention
    entering = yield from _through(layer.attention_in, x, scratch)
    if isinstance(attention, Attention):
        seen = yield from _attention(attention, entering, cache, turns, scratch)
    else:
        seen = yield from _latents(attention, entering, cache, turns, scratch)
    seen = yield from _through(layer.attention_out, seen, scratch, "seen, normed")
    if not layer.parallel:
        yield add_call(x, seen, x)
    entering = yield from _through(layer.mlp_in, x, scratch)
    made = yield from mlp_ops(layer.mlp, entering, scratch)
    if layer.parallel:
        yield add_call(made, seen, made)
    else:
        made = yield from _through(layer.mlp_out, made, scratch, "made, normed")
    yield add_call(made, x, x)


def _attention(
    attention: Attention,
    x: Tensor,
    cache: KVCache,
    turns: tuple[Turns, ...],
    scratch: Scratch,
) -> Made:
    """As Attention; x: [rows, hidden] -> the same shape."""
    how, turn = attention.how, attention.rotation
    q, k, v = yield from _states(attention, x, scratch)
    q = yield from _normed("q", q, attention.q_norm, attention, scratch)
    k = yield from _normed("k", k, attention.k_norm, attention, scratch)
    # Not rotated they are copied, to lie without gaps.
    none = Turns((q[:, 0, :0],) * 2, late=False)
    both = none if turn is None else turns[turn]
    q = yield from _turned("q", q, both, scratch)
    k = yield from _turned("k", k, both, scratch)
    if how.qkv == "heads":
        v = yield from _turned("v", v, none, scratch)
    if attention.rounding is not None:
        k = yield from _through_codes("k", k, attention.rounding[0], scratch)
        v = yield from _through_codes("v", v, attention.rounding[1], scratch)
    if cache.dtype == torch.int8:
        q = yield from _spread("q", q, scratch)
        k = yield from _spread("k", k, scratch)
    yield from store_calls(cache, attention.layer, attention.group, (k, v))
    seen = scratch.of("heads", how.heads, how.value_width)
    yield attend_call(how, cache, attention.layer, attention.group, q, seen)
    out = scratch.of("seen", scratch.hidden)
    yield from linear_ops(attention.out, seen.flatten(1), out, scratch)
    return out


def _states(attention: Attention, x: Tensor, scratch: Scratch) -> Parts:
    """As Attention's, before norms: [rows, heads of each, width]."""
    how = attention.how
    widths = [how.key_width, how.key_width, how.value_width]
    out = scratch.of("qkv", sum(how.widths))
    parts = yield from joint_ops(attention.qkv, x, out, scratch)
    if how.qkv == "heads":
        return torch.split(out.view(len(out), how.heads, sum(widths)), widths, -1)
    return tuple(part.view(len(part), -1, n) for part, n in zip(parts, widths, strict=True))


def _latents(
    attention: LatentAttention,
    x: Tensor,
    cache: KVCache,
    turns: tuple[Turns, ...],
    scratch: Scratch,
) -> Made:
    """As LatentAttention; x: [rows, hidden] -> the same shape."""
    how, whole = attention.how, attention.how.rank + attention.how.rotated
    entering = scratch.of("entering", sum(attention.entering.sizes))
    q, both = yield from joint_ops(attention.entering, x, entering, scratch)
    q = yield from _queries(attention, q, scratch)
    q, turned = torch.split(q, [how.nope, how.rotated], -1)
    asked = scratch.of("asked", how.heads, whole)
    latents = scratch.of("latents", 1, whole)
    yield from head_ops(attention.unfolding.keys, q, asked[..., : how.rank], scratch)
    yield norm_call(attention.norm, both[:, None, : how.rank], latents[..., : how.rank])
    if attention.unfolding.inputs is not None:
        own = latents[:, 0, : how.rank]
        yield round_call(own, own, _coded(attention.unfolding.inputs))
    ends = ((turned, asked), (both[:, None, how.rank :], latents))
    turn = attention.rotation
    for part, into in ends:
        none = Turns((part[:, 0, :0],) * 2, late=False)
        found, mixed = (none, False) if turn is None else (turns[turn], how.interleaved)
        yield rotate_call(part, found, into[..., how.rank :], mixed)
    if cache.dtype == torch.int8:
        asked = yield from _spread("asked", asked, scratch, how.rank)
        latents = yield from _spread("latents", latents, scratch, how.rank)
    yield from store_calls(cache, attention.layer, attention.group, (latents,))
    seen = scratch.of("seen latents", how.heads, how.rank)
    yield attend_call(how, cache, attention.layer, attention.group, asked, seen)
    if cache.dtype == torch.int8:
        seen = yield from _spread("seen latents", seen, scratch)
    heads = scratch.of("heads", how.heads, how.value_width)
    yield from head_ops(attention.unfolding.values, seen, heads, scratch)
    out = scratch.of("seen", scratch.hidden)
    yield from linear_ops(attention.out, heads.flatten(1), out, scratch)
    return out


def _queries(attention: LatentAttention, q: Tensor, scratch: Scratch) -> Made:
    """Of all heads, [rows, heads, width]: q itself, or what is made of it as their latent."""
    how = attention.how
    if attention.queries is None:
        return q.view(len(q), how.heads, how.key_width)
    norm, linear = attention.queries
    normed = scratch.of("q, normed", 1, q.shape[1])
    out = scratch.of("q", how.heads, how.key_width)
    yield norm_call(norm, q[:, None], normed)
    yield from linear_ops(linear, normed[:, 0], out.flatten(1), scratch)
    return out


def _normed(name: str, x: Tensor, norm: Norm | None, of: Attention, scratch: Scratch) -> Made:
    """Queries or keys [rows, heads, width] behind a norm over each head, or over all of them."""
    if norm is None:
        return x
    out = scratch.of(f"{name}, normed", *x.shape[1:])
    if of.how.qk_norm == "full":
        yield norm_call(norm, x.flatten(1)[:, None], out.flatten(1)[:, None])
    else:
        yield norm_call(norm, x, out)
    return out


def _turned(name: str, x: Tensor, turns: Turns, scratch: Scratch) -> Made:
    """x, out: [rows, heads, width]."""
    out = scratch.of(f"{name}, turned", *x.shape[1:])
    yield rotate_call(x, turns, out)
    return out


def _spread(name: str, x: Tensor, scratch: Scratch, first: int | None = None) -> Made:
    """x: [rows, heads, width]; the `first` numbers apart from the others."""
    out = scratch.of(f"{name}, spread", *x.shape[1:])
    sizes = [x.shape[2] if first is None else first, 0 if first is None else x.shape[2] - first]
    for part, into in zip(torch.split(x, sizes, -1), torch.split(out, sizes, -1), strict=True):
        if part.shape[2]:
            yield spread_call(part, into)
    return out


def _through_codes(name: str, x: Tensor, inputs: InputQuantization, scratch: Scratch) -> Made:
    """x, out: [rows, heads, width]; under one scale."""
    out = scratch.of(f"{name}, rounded", *x.shape[1:])
    yield round_call(x.flatten(1), out.flatten(1), _coded(inputs))
    return out


def _coded(inputs: InputQuantization) -> CodeRounding:
    found = code_rounding(inputs)
    assert found is not None, "why_not has refused the others"
    return found


def _through(norm: Norm | None, x: Tensor, scratch: Scratch, name: str = "normed") -> Made:
    """x behind a norm that a block may not have."""
    if norm is None:
        return x
    out = scratch.of(name, scratch.hidden)
    yield norm_call(norm, x[:, None], out[:, None])
    return out
