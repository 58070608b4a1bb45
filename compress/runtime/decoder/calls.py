"""One op of a step as a call of compiled code: what the function is given, and what of that a run
gives it anew."""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.arch.forward.kinds import Grouped, Latent
from compress.quant.blocks import BlockTensor
from compress.runtime.decoder.attention import Angles
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Linear
from compress.runtime.decoder.norms import Norm
from compress.runtime.forms.block_panels import BlockPanels
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.input_rounding import code_rounding
from compress.runtime.forms.pairs import PairWeight
from compress.runtime.forms.panels import PackedPanels
from compress_kernels.blocks.layouts import LAYOUTS
from compress_kernels.cpu.attention import AttentionSettings, attention_struct
from compress_kernels.cpu.experts import choice_struct
from compress_kernels.cpu.linear import heads_struct, linear_struct
from compress_kernels.cpu.packed import function_of, packed_pairs_struct, packed_struct
from compress_kernels.cpu.pairs import pair_struct
from compress_kernels.cpu.program import CompiledOp, Given
from compress_kernels.cpu.rows import (
    add_struct,
    centred_struct,
    gate_struct,
    gather_struct,
    highest_struct,
    norm_struct,
    rotate_struct,
    spread_struct,
)
from compress_kernels.cpu.states import states_struct
from compress_kernels.cpu.super_blocks import decode_struct
from compress_kernels.cpu.through_codes import through_struct
from compress_kernels.heads import HeadPanels
from compress_kernels.ops.rows import Function
from compress_kernels.paged import TokenPlaces
from compress_kernels.pairs import PairPanels
from compress_kernels.rounding import CodeRounding

ROWS, THREADS = Given("rows"), Given("threads")
OF_ROWS = {"rows": ROWS, "threads": THREADS}


class Turns(NamedTuple):
    """angles: of a step's tokens, fp32 [rows, pairs] each. late: what they make is rounded once."""

    angles: Angles
    late: bool


def why_no_call(linear: Linear) -> str | None:
    """Why the product of a linear is no call; None where it is."""
    weight = linear.weight
    if isinstance(weight, PackedPanels):
        if weight.outliers is not None and weight.panels.own is None:
            return "outlier columns stand beside codes"
        if weight.rounding(linear.inputs) is not None:
            return None
    if linear.inputs is not None and code_rounding(linear.inputs) is None:
        return "inputs of linears are rounded but for outliers"
    known = isinstance(weight, FloatWeight | PairWeight | PackedPanels | BlockPanels)
    return None if known else "codes are decoded in tiles"


def rounding_before(linear: Linear) -> CodeRounding | None:
    """How inputs are rounded before the product, which why_no_call knows to be a call."""
    weight, inputs = linear.weight, linear.inputs
    if inputs is None or (isinstance(weight, PackedPanels) and weight.rounding(inputs)):
        return None
    return code_rounding(inputs)


def round_call(x: Tensor, out: Tensor, rounding: CodeRounding, rows: Given = ROWS) -> CompiledOp:
    """x, out: [rows, n], rows apart; out may be x."""
    given = {"rows": rows, "threads": THREADS}
    return CompiledOp("through_codes", through_struct(x, out, rounding), given, (x, out))


def linear_call(linear: Linear, x: Tensor, out: Tensor, rows: Given = ROWS) -> CompiledOp:
    """x: [rows, K], rounded where `rounding_before` says so; out: [rows, N], rows apart."""
    weight, bias, given = linear.weight, linear.bias, {"rows": rows, "threads": THREADS}
    if isinstance(weight, PackedPanels | BlockPanels):
        panels = weight.panels
        keeps = (x, bias, out, *panels.tensors)
        if x.dtype == torch.bfloat16:
            halves = packed_pairs_struct(x, panels, bias, out)
            given = {f"rows.{name}": value for name, value in given.items()}
            return CompiledOp("packed_pairs", halves, given, keeps)
        rounding = weight.rounding(linear.inputs)
        packed = packed_struct(x, panels, bias, out, weight.math, rounding)
        return CompiledOp(function_of(weight.math, rounding), packed, given, keeps)
    assert isinstance(weight, FloatWeight | PairWeight), "why_no_call has refused the others"
    values = weight.panels if isinstance(weight, PairWeight) else weight.values
    if x.dtype == torch.bfloat16:
        pairs = pair_struct(x, values, bias, out)
        return CompiledOp("pair_rows", pairs, given, (x, values, bias, out))
    assert isinstance(values, Tensor), "panels of pairs are for bf16"
    struct = linear_struct(x, values, bias, out)
    return CompiledOp("linear_rows", struct, given, (x, values, bias, out))


def heads_call(weight: HeadPanels, x: Tensor, out: Tensor) -> CompiledOp:
    """x: [rows, heads, K], out: [rows, heads, N], fp32, rows and heads apart."""
    given = {"rows": ROWS, "threads": THREADS}
    struct = heads_struct(x, weight, out)
    return CompiledOp("head_rows", struct, given, (x, weight.values, out))


def norm_call(norm: Norm, x: Tensor, out: Tensor, rows: Given = ROWS) -> CompiledOp:
    """x, out: [rows, heads, n], rows and heads apart."""
    keeps, given = (x, norm.weight, norm.bias, out), {"rows": rows, "threads": THREADS}
    if norm.centred:
        struct = centred_struct(x, (norm.weight, norm.bias), out, norm.eps)
        return CompiledOp("layer_norm", struct, given, keeps)
    plain = norm_struct(x, norm.weight, out, norm.eps, norm.late)
    return CompiledOp("rms_norm", plain, given, keeps)


def rotate_call(x: Tensor, turns: Turns, out: Tensor, interleaved: bool = False) -> CompiledOp:
    """x, out: [rows, heads, width], rows and heads apart. Angles of no pairs just copy."""
    late = turns.late and x.dtype != torch.float32
    struct = rotate_struct(x, turns.angles, out, late=late, interleaved=interleaved)
    return CompiledOp("rotate_heads", struct, OF_ROWS, (x, *turns.angles, out))


def spread_call(x: Tensor, out: Tensor) -> CompiledOp:
    """x, out: [rows, heads, width], rows and heads apart."""
    return CompiledOp("spread_heads", spread_struct(x, out), {"rows": ROWS}, (x, out))


def gate_call(first: Tensor, up: Tensor | None, out: Tensor, function: Function) -> CompiledOp:
    """first, up: [rows, n], rows as far apart; out without gaps. Without `up` nothing is gated."""
    struct = gate_struct(first, up, out, function)
    return CompiledOp("gate_rows", struct, OF_ROWS, (first, up, out))


def choice_call(logits: Tensor, shares: Tensor, index: Tensor, normalised: bool) -> CompiledOp:
    """logits: [rows, experts]. shares, index: [rows, chosen]; all without gaps."""
    struct = choice_struct(logits, shares, index, normalised)
    return CompiledOp("choose_experts", struct, {"rows": ROWS}, (logits, shares, index))


def add_call(x: Tensor, other: Tensor, out: Tensor) -> CompiledOp:
    """All [rows, n] without gaps."""
    return CompiledOp("add_rows", add_struct(x, other, out), OF_ROWS, (x, other, out))


def gather_call(
    of: Tensor | PairPanels, index: Given, out: Tensor, factor: float = 1.0, rows: Given = ROWS
) -> CompiledOp:
    """of: [any, n]. out: [rows, n]: rows of it, times the factor."""
    none = torch.zeros(1, dtype=torch.int64)
    struct = gather_struct(of, none, out, factor)
    return CompiledOp("gather_rows", struct, {"rows": rows, "index": index}, (of, out))


def blocks_call(of: BlockTensor, index: Given, out: Tensor, factor: float = 1.0) -> CompiledOp:
    """out: [rows, n], without gaps: rows of it decoded, times the factor."""
    none = torch.zeros(1, dtype=torch.int64)
    struct = decode_struct(LAYOUTS[of.kind], of.data, out, none, factor)
    given = {"rows": ROWS, "index": index, "threads": THREADS}
    return CompiledOp("decode_blocks", struct, given, (of.data, out))


def highest_call(x: Tensor, index: Tensor, values: Tensor, rows: Given) -> CompiledOp:
    """x: [rows, n]. index, values: [rows]; all without gaps."""
    struct = highest_struct(x, index, values)
    given = {"rows": rows, "threads": THREADS}
    return CompiledOp("highest_of_rows", struct, given, (x, index, values))


def store_calls(
    cache: KVCache, layer: int, group: int, parts: tuple[Tensor, ...]
) -> list[CompiledOp]:
    """As KVCache.write. parts: [rows, heads, width] of the layer, rows apart."""
    slots = torch.zeros(1, dtype=torch.int64)
    given = {**OF_ROWS, "slots": Given(f"slots {group}")}
    calls = []
    for x, states, scales in zip(parts, cache.states[layer], cache.scales[layer], strict=True):
        struct = states_struct(x, states, slots, scales)
        calls.append(CompiledOp("store_states", struct, given, (x, states, scales)))
    return calls


def attend_call(
    how: Grouped | Latent, cache: KVCache, layer: int, group: int, q: Tensor, out: Tensor
) -> CompiledOp:
    """q, out: [rows, heads, width], without gaps."""
    stored = cache.keys_and_values(layer)
    none = torch.zeros(1, 1, dtype=torch.int32)
    places = TokenPlaces(none, none[0], none[0].long())
    softcap = how.softcap if isinstance(how, Grouped) else None
    settings = AttentionSettings(how.scale, how.window, softcap)
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
