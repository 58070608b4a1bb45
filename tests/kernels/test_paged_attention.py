"""Attention over blocks is dense attention, and each token's result its own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from compress_kernels.attention import paged_attention

HEADS, KV_HEADS, DIM = 6, 2, 8


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """keys, values: [blocks, kv_heads, block size, dim]. dense: [texts, length, kv_heads, dim]."""

    keys: Tensor
    values: Tensor
    table: Tensor
    dense: tuple[Tensor, Tensor]


def stored(texts: int, length: int, block_size: int) -> Stored:
    """Random texts in blocks of a random order; what no text owns is not a number."""
    generator = torch.Generator().manual_seed(length)
    each = -(-length // block_size)
    dense = [torch.randn(texts, length, KV_HEADS, DIM, generator=generator) for _ in "kv"]
    table = torch.randperm(texts * each, generator=generator).view(texts, each) + 1
    parts = []
    for states in dense:
        blocks = torch.full((texts * each + 1, KV_HEADS, block_size, DIM), torch.nan)
        for text in range(texts):
            for at in range(length):
                blocks[table[text, at // block_size], :, at % block_size] = states[text, at]
        parts.append(blocks)
    return Stored(parts[0], parts[1], table.to(torch.int32), (dense[0], dense[1]))


def dense_attention(
    q: Tensor, stored: Stored, text: int, position: int, options: dict[str, Any]
) -> Tensor:
    """[heads, dim] of one token, in float64."""
    first = max(0, position - (options.get("window") or position + 1) + 1)
    k, v = (x[text, first : position + 1].double() for x in stored.dense)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("hd,lhd->hl", q.double(), k) * options["scale"]
    cap = options.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 5}, {"window": 100}, {"softcap": 0.7}],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_equals_dense_attention(block_size: int, options: dict[str, Any], length: int) -> None:
    options = {"scale": 0.4, **options}
    texts = stored(3, length, block_size)
    tokens = [(text, at) for text in range(3) for at in range(length)]
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = [tokens[i] for i in order]
    q = torch.randn(len(tokens), HEADS, DIM, generator=torch.Generator().manual_seed(2))
    sequence = torch.tensor([text for text, _ in tokens], dtype=torch.int32)
    positions = torch.tensor([at for _, at in tokens])
    got = paged_attention(q, texts.keys, texts.values, texts.table, sequence, positions, **options)
    for i, (text, at) in enumerate(tokens):
        want = dense_attention(q[i], texts, text, at, options)
        torch.testing.assert_close(got[i].double(), want, atol=1e-5, rtol=1e-5)
        alone = paged_attention(
            q[i : i + 1],
            texts.keys,
            texts.values,
            texts.table,
            sequence[i : i + 1],
            positions[i : i + 1],
            **options,
        )
        assert torch.equal(alone[0], got[i])


def test_int8_is_read_with_its_scales() -> None:
    texts, (length, block_size) = stored(1, 9, 4), (9, 4)
    assert len(texts.dense[0][0]) == length
    codes, scales = [], []
    for blocks in (texts.keys, texts.values):
        filled = blocks.nan_to_num()
        scale = filled.abs().amax(-1).clamp(min=1e-6) / 127
        codes.append((filled / scale[..., None]).round().to(torch.int8))
        scales.append(scale)
    assert codes[0].shape[2] == block_size
    q = torch.randn(2, HEADS, DIM).bfloat16()
    sequence, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([8, 3])
    got = paged_attention(
        q,
        *codes,
        texts.table,
        sequence,
        positions,
        scale=0.4,
        key_scales=scales[0],
        value_scales=scales[1],
    )
    read = [c.float() * s[..., None] for c, s in zip(codes, scales, strict=True)]
    want = paged_attention(q, *read, texts.table, sequence, positions, scale=0.4)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)


def test_wrong_arguments_are_named() -> None:
    texts = stored(1, 4, 4)
    good: dict[str, Any] = {
        "q": torch.zeros(1, HEADS, DIM),
        "keys": texts.keys,
        "values": texts.values,
        "table": texts.table,
        "sequence": torch.zeros(1, dtype=torch.int32),
        "positions": torch.zeros(1, dtype=torch.int64),
        "scale": 1.0,
    }
    paged_attention(**good)
    eight = texts.keys.nan_to_num().to(torch.int8)
    for change, message in (
        ({"q": torch.zeros(1, HEADS)}, r"q is torch.float32 \[1, 6\]; floats"),
        ({"q": torch.zeros(1, 5, DIM)}, r"keys is .*; \[blocks, kv_heads, block size, 8\]"),
        ({"values": texts.values[:1]}, r"values is .*; the shape of keys"),
        ({"table": texts.table.long()}, r"table is torch.int64 .*; int32 \[S, blocks\]"),
        ({"sequence": torch.zeros(2, dtype=torch.int32)}, r"sequence is .*; torch.int32 \[1\]"),
        ({"positions": torch.zeros(1)}, r"positions is torch.float32 \[1\]; torch.int64"),
        ({"window": 0}, "window is 0; it must be 1 or more"),
        ({"key_scales": torch.ones(1)}, "torch.float32 goes without key_scales"),
        ({"keys": eight, "values": eight}, "key_scales is missing; int8 needs fp32"),
        ({"keys": eight, "values": eight, "key_scales": torch.ones(1)}, "key_scales is torch.flo"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(**{**good, **change})
