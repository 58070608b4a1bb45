"""A decoder as ops of compiled code, in the order in which it calls them.

Each function here is that of a class of this folder, op for op, so what comes out has its bits;
what it cannot say `why_not` refuses.
"""

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from compress.runtime.decoder.attention import Angles, Attention
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.layer import DecoderLayer
from compress.runtime.decoder.linear import Joint, Linear
from compress.runtime.decoder.mlp import Mlp
from compress.runtime.decoder.norms import Norm
from compress.runtime.decoder.scratch import Scratch
from compress.runtime.forms.dense import FloatWeight
from compress_kernels.cpu.attention import AttentionSettings, attention_struct
from compress_kernels.cpu.linear import linear_struct
from compress_kernels.cpu.program import CompiledOp, Given
from compress_kernels.cpu.rows import (
    add_struct,
    gate_struct,
    gather_struct,
    norm_struct,
    rotate_struct,
    spread_struct,
)
from compress_kernels.cpu.states import states_struct
from compress_kernels.paged import TokenPlaces

ROWS, THREADS = Given("rows"), Given("threads")


def why_not(decoder: Decoder) -> str | None:
    """Why a decoder is no list of ops; None where it is."""
    if decoder.positions is not None:
        return "positions are learned"
    if decoder.final_norm is None or decoder.final_norm.centred:
        return "LayerNorm is torch's"
    reasons = (_why_no_layer(layer) for layer in decoder.layers)
    return next((reason for reason in reasons if reason is not None), None)


def _why_no_layer(layer: DecoderLayer) -> str | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention):
        return "attention is over latents"
    if not isinstance(mlp, Mlp):
        return "a mixture of experts chooses by token"
    norms = (attention.q_norm, attention.k_norm, layer.attention_in, layer.attention_out)
    if any(norm is not None and norm.centred for norm in (*norms, layer.mlp_in, layer.mlp_out)):
        return "LayerNorm is torch's"
    if attention.how.qkv == "heads":
        return "queries, keys and values of a head lie together"
    if attention.rounding is not None:
        return "keys and values are rounded by the checkpoint's scales"
    if mlp.gating is None or len(mlp.inner.sizes) != 2:
        return "its activation is torch's"
    linears = (*attention.qkv.linears, attention.out, *mlp.inner.linears, mlp.down)
    return next((reason for reason in map(_why_no_linear, linears) if reason is not None), None)


def _why_no_linear(linear: Linear) -> str | None:
    if linear.inputs is not None:
        return "inputs of linears are rounded"
    return None if isinstance(linear.weight, FloatWeight) else "weights are packed codes"


Made = Generator[CompiledOp, None, Tensor]  # ops, and where they leave their result


def decoder_ops(
    decoder: Decoder, cache: KVCache, tables: tuple[Angles | None, ...], scratch: Scratch
) -> Iterator[CompiledOp]:
    """As Decoder.forward; what it returns is in scratch.final. tables: of each rotation cosine and
    sine of every position; where there are none, those of the step are in scratch.angles."""
    scale = float(decoder.how.embedding_scale)
    yield _gather(decoder.embedding, Given("ids"), scratch.x, scale)
    for rotation, table in enumerate(tables):
        if table is not None:
            into = scratch.angles(rotation, table[0].shape[1])
            for of, out in zip(table, into, strict=True):
                yield _gather(of, Given("positions"), out)
    pairs = tuple(len(rotation.frequencies) for rotation in decoder.rotations)
    for layer in decoder.layers:
        yield from _layer(layer, cache, pairs, scratch)
    wanted = scratch.of("wanted", scratch.hidden)
    yield _gather(scratch.x, Given("wanted"), wanted, rows=Given("wanted rows"))
    yield from _final(decoder.final_norm, wanted, scratch.final)


def _final(norm: Norm | None, x: Tensor, out: Tensor) -> Iterator[CompiledOp]:
    """Of the rows that are wanted, [rows, hidden]."""
    if norm is None:
        raise AssertionError("why_not has refused the others")
    struct = norm_struct(x[:, None], norm.weight, out, norm.eps, norm.late)
    yield CompiledOp("rms_norm", struct, {"rows": Given("wanted rows")}, (x, norm.weight, out))


def _gather(
    of: Tensor, index: Given, out: Tensor, factor: float = 1.0, rows: Given = ROWS
) -> CompiledOp:
    """of: [any, n]. out: [rows, n]."""
    none = torch.zeros(1, dtype=torch.int64)
    struct = gather_struct(of, none, out, factor)
    return CompiledOp("gather_rows", struct, {"rows": rows, "index": index}, (of, out))


def _layer(
    layer: DecoderLayer, cache: KVCache, pairs: tuple[int, ...], scratch: Scratch
) -> Iterator[CompiledOp]:
    """As DecoderLayer; the residual is in scratch.x before and afterwards. pairs: of numbers that
    each rotation turns."""
    assert isinstance(layer.attention, Attention), "why_not has refused the others"
    assert isinstance(layer.mlp, Mlp), "why_not has refused the others"
    x = scratch.x
    entering = yield from _through(layer.attention_in, x, scratch)
    seen = yield from _attention(layer.attention, entering, cache, pairs, scratch)
    seen = yield from _through(layer.attention_out, seen, scratch, "seen, normed")
    if not layer.parallel:
        yield _add(x, seen, x)
    entering = yield from _through(layer.mlp_in, x, scratch)
    made = yield from _mlp(layer.mlp, entering, scratch)
    if layer.parallel:
        yield _add(made, seen, made)
    else:
        made = yield from _through(layer.mlp_out, made, scratch, "made, normed")
    yield _add(made, x, x)


def _attention(
    attention: Attention, x: Tensor, cache: KVCache, pairs: tuple[int, ...], scratch: Scratch
) -> Made:
    """As Attention; x: [rows, hidden] -> the same shape."""
    how, turn = attention.how, attention.rotation
    widths = (how.key_width, how.key_width, how.value_width)
    parts = yield from _joint(attention.qkv, x, scratch.of("qkv", sum(how.widths)))
    q, k, v = (part.view(len(part), -1, n) for part, n in zip(parts, widths, strict=True))
    q = yield from _state("q", q, attention.q_norm, attention, scratch)
    k = yield from _state("k", k, attention.k_norm, attention, scratch)
    q = yield from _turned("q", q, turn, pairs, scratch)
    if turn is not None:
        k = yield from _turned("k", k, turn, pairs, scratch)
    if cache.dtype == torch.int8:
        q = yield from _spread("q", q, scratch)
        k = yield from _spread("k", k, scratch)
    stored = zip((k, v), cache.states[attention.layer], cache.scales[attention.layer], strict=True)
    yield from (_store(*each, attention.group) for each in stored)
    seen = scratch.of("heads", how.heads, how.value_width)
    yield _attend(attention, q, seen, cache)
    out = scratch.of("seen", scratch.hidden)
    yield _linear(attention.out, seen.flatten(1), out)
    return out


def _state(name: str, x: Tensor, norm: Norm | None, of: Attention, scratch: Scratch) -> Made:
    """Queries or keys [rows, heads, width] behind a norm over each head, or over all of them."""
    if norm is None:
        return x
    out = scratch.of(f"{name}, normed", *x.shape[1:])
    full = of.how.qk_norm == "full"
    yield _norm(norm, x.flatten(1)[:, None] if full else x, out)
    return out


def _turned(
    name: str, x: Tensor, turn: int | None, pairs: tuple[int, ...], scratch: Scratch
) -> Made:
    """Queries or keys, [rows, heads, width], rotated; just copied to lie together where nothing
    is."""
    out = scratch.of(f"{name}, turned", *x.shape[1:])
    cos, sin = (x[:, 0, :0],) * 2 if turn is None else scratch.angles(turn, pairs[turn])
    struct = rotate_struct(x, cos, sin, out, late=False)
    yield CompiledOp("rotate_heads", struct, {"rows": ROWS}, (x, cos, sin, out))
    return out


def _spread(name: str, x: Tensor, scratch: Scratch) -> Made:
    """Queries or keys, [rows, heads, width]."""
    out = scratch.of(f"{name}, spread", *x.shape[1:])
    yield CompiledOp("spread_heads", spread_struct(x, out), {"rows": ROWS}, (x, out))
    return out


def _store(state: Tensor, states: Tensor, scales: Tensor | None, group: int) -> CompiledOp:
    """state: [rows, heads, width], rows apart. states, scales: of a layer, in blocks."""
    slots = torch.zeros(len(state), dtype=torch.int64)
    given = {"rows": ROWS, "slots": Given(f"slots {group}")}
    return CompiledOp(
        "store_states", states_struct(state, states, slots, scales), given, (state, states)
    )


def _attend(attention: Attention, q: Tensor, out: Tensor, cache: KVCache) -> CompiledOp:
    """q, out: [rows, heads, *]."""
    how, group = attention.how, attention.group
    stored = cache.keys_and_values(attention.layer)
    none = torch.zeros(1, 1, dtype=torch.int32)
    places = TokenPlaces(none, none[0], none[0].long())
    settings = AttentionSettings(how.scale, how.window, how.softcap)
    given = {
        "rows": ROWS,
        "threads": THREADS,
        "table": Given(f"table {group}"),
        "table_stride": Given(f"width {group}"),
        "sequence": Given("sequence"),
        "positions": Given("positions"),
    }
    struct = attention_struct(q, stored, places, settings, out)
    return CompiledOp("paged_attention", struct, given, (q, stored.keys, stored.values, out))


def _mlp(mlp: Mlp, x: Tensor, scratch: Scratch) -> Made:
    """As Mlp with a gate; x: [rows, hidden] -> the same shape."""
    width = mlp.inner.sizes[0]
    first, up = yield from _joint(mlp.inner, x, scratch.of("inner", 2 * width))
    assert mlp.gating is not None, "why_not has refused the others"
    middle, out = scratch.of("middle", width), scratch.of("made", scratch.hidden)
    given = {"rows": ROWS}
    yield CompiledOp(
        "gate_rows", gate_struct(first, up, middle, mlp.gating), given, (first, up, middle)
    )
    yield _linear(mlp.down, middle, out)
    return out


def _joint(joint: Joint, x: Tensor, out: Tensor) -> Generator[CompiledOp, None, tuple[Tensor, ...]]:
    """All parts side by side in `out`, [rows, sum of sizes]; views of it."""
    parts = torch.split(out, list(joint.sizes), dim=1)
    each = zip(joint.linears, parts if len(joint.linears) > 1 else (out,), strict=True)
    yield from (_linear(linear, x, part) for linear, part in each)
    return parts


def _linear(linear: Linear, x: Tensor, out: Tensor) -> CompiledOp:
    assert isinstance(linear.weight, FloatWeight), "why_not has refused the others"
    weight, bias = linear.weight.values, linear.bias
    given = {"rows": ROWS, "threads": THREADS}
    return CompiledOp(
        "linear_rows", linear_struct(x, weight, bias, out), given, (x, weight, bias, out)
    )


def _through(norm: Norm | None, x: Tensor, scratch: Scratch, name: str = "normed") -> Made:
    """x behind a norm that a block may not have."""
    if norm is None:
        return x
    out = scratch.of(name, scratch.hidden)
    yield _norm(norm, x[:, None], out)
    return out


def _norm(norm: Norm, x: Tensor, out: Tensor) -> CompiledOp:
    """x: [rows, heads, n]."""
    struct = norm_struct(x, norm.weight, out, norm.eps, norm.late)
    return CompiledOp("rms_norm", struct, {"rows": ROWS}, (x, norm.weight, out))


def _add(x: Tensor, other: Tensor, out: Tensor) -> CompiledOp:
    return CompiledOp("add_rows", add_struct(x, other, out), {"rows": ROWS}, (x, other, out))
