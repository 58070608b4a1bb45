"""Attention over blocks is dense attention, and each token's result its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from compress_kernels.cpu import attention as compiled
from compress_kernels.cpu.library import native
from compress_kernels.ops import tiled_attention
from compress_kernels.ops.attention import paged_attention
from compress_kernels.paged import StoredStates, TokenPlaces
from compress_kernels.reference import attention as reference

HEADS, KV_HEADS, DIM = 6, 2, 8
# Around the runs of 256 positions of compiled code, and the steps of 16 inside.
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 511, 512, 513)
Attend = Callable[..., Tensor]
BOTH = pytest.mark.parametrize(
    "attend",
    [
        pytest.param(tiled_attention.paged_attention, id="tiled"),
        pytest.param(
            compiled.paged_attention,
            id="compiled",
            marks=pytest.mark.skipif(native().library is None, reason=native().reason),
        ),
    ],
)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """dense: [texts, length, kv_heads, width] each. table: of the texts."""

    states: StoredStates
    table: Tensor
    dense: tuple[Tensor, Tensor]

    def at(self, sequence: Tensor, positions: Tensor) -> TokenPlaces:
        return TokenPlaces(self.table, sequence, positions)


def stored(
    texts: int, length: int, block_size: int, widths: tuple[int, int] = (DIM, DIM)
) -> Stored:
    """Random texts in blocks of a random order; what no text owns is not a number. widths: of a
    head of keys, and of values."""
    generator = torch.Generator().manual_seed(length)
    dense = [torch.randn(texts, length, KV_HEADS, d, generator=generator) for d in widths]
    keys, values, table = placed(dense, block_size, length)
    return Stored(StoredStates(keys, values), table, (dense[0], dense[1]))


def placed(dense: list[Tensor], block_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """[texts, length, kv_heads, width] each, in blocks; and the table of the texts."""
    texts, length, kv_heads, _ = dense[0].shape
    each = -(-length // block_size)
    order = torch.randperm(texts * each, generator=torch.Generator().manual_seed(seed))
    table = order.view(texts, each) + 1
    parts = []
    for states in dense:
        shape = (texts * each + 1, kv_heads, block_size, states.shape[3])
        blocks = torch.full(shape, torch.nan)
        for at in range(length):
            blocks[table[:, at // block_size], :, at % block_size] = states[:, at]
        parts.append(blocks)
    return parts[0], parts[1], table.to(torch.int32)


def dense_attention(
    q: Tensor, stored: Stored, text: int, position: int, options: dict[str, Any]
) -> Tensor:
    """[heads, value width] of one token, in float64."""
    first = max(0, position - (options.get("window") or position + 1) + 1)
    k, v = (x[text, first : position + 1].double() for x in stored.dense)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("hd,lhd->hl", q.double(), k) * options["scale"]
    cap = options.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


@BOTH
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 5}, {"window": 100}, {"softcap": 0.7}],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 65])
def test_equals_dense_attention(
    attend: Attend, block_size: int, options: dict[str, Any], length: int
) -> None:
    options = {"scale": 0.4, **options}
    texts = stored(3, length, block_size)
    tokens = [(text, at) for text in range(3) for at in range(length)]
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = [tokens[i] for i in order]
    q = torch.randn(len(tokens), HEADS, DIM, generator=torch.Generator().manual_seed(2))
    sequence = torch.tensor([text for text, _ in tokens], dtype=torch.int32)
    positions = torch.tensor([at for _, at in tokens])
    got = attend(q, texts.states, texts.at(sequence, positions), **options)
    for i in range(0, len(tokens), 1 + len(tokens) // 40):
        want = dense_attention(q[i], texts, *tokens[i], options)
        torch.testing.assert_close(got[i].double(), want, atol=1e-5, rtol=1e-5)


WIDTHS = [4, 8, 32, 64, 80, 100, 128, 256]


def random_case(random: Random) -> dict[str, Any]:
    """Shapes as families have them; the reference is what they are compared with."""
    heads, kv_heads = random.choice([(1, 1), (4, 4), (6, 2), (8, 1)])
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": random.choice(WIDTHS),
        "values": random.choice([None, None, *WIDTHS]),
        "length": random.choice([3, 17, 64, 70, 130]),
        "dtype": random.choice([torch.float32, torch.bfloat16, torch.float16]),
        "options": {
            "scale": 0.2,
            "window": random.choice([None, None, 1, 7, 64, 1000]),
            "softcap": random.choice([None, None, 2.0]),
        },
    }


@BOTH
@pytest.mark.parametrize("seed", range(12))
def test_bits_depend_on_nothing_but_the_text(attend: Attend, seed: int) -> None:
    """Each token in steps of all sizes, beside others, in blocks of other sizes and places."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    case = random_case(random)
    texts, length = 3, case["length"]
    kept, widths = (texts, length, case["kv_heads"]), (case["dim"], case["values"] or case["dim"])
    dense = [torch.randn(*kept, d, generator=generator).to(case["dtype"]).float() for d in widths]
    q = torch.randn(texts, length, case["heads"], case["dim"], generator=generator)
    q = q.to(case["dtype"])

    def step(tokens: list[tuple[int, int]], block_size: int, place: int) -> Tensor:
        keys, values, table = placed(dense, block_size, place)
        # Rows of padding see the null block.
        missing = [(texts, 0)] * (-len(tokens) % random.choice([1, 16]))
        keys[0], values[0] = 0, 0
        table = torch.cat((table, torch.zeros_like(table[:1])))
        rows = tokens + missing
        queries = torch.stack([q[text % texts, at] for text, at in rows])
        sequence = torch.tensor([text for text, _ in rows], dtype=torch.int32)
        positions = torch.tensor([at for _, at in rows])
        states = StoredStates(*(x.to(case["dtype"]) for x in (keys, values)))
        call = (queries, states, TokenPlaces(table, sequence, positions))
        got = attend(*call, **case["options"])
        if place == 0:
            want = reference.paged_attention(*call, **case["options"])
            torch.testing.assert_close(got, want, atol=1e-5, rtol=2**-7 if q.itemsize == 2 else 0)
        return got[: len(tokens)]

    everything = [(text, at) for text in range(texts) for at in range(length)]
    whole = step(everything, 16, 0).view(*q.shape[:3], widths[1])
    for place, block_size in enumerate((1, 5, 64), start=1):
        tokens = random.sample(everything, random.choice([1, 2, 9, 33]) % len(everything) or 1)
        got = step(tokens, block_size, place)
        for row, (text, at) in zip(got, tokens, strict=True):
            assert torch.equal(row, whole[text, at])


@BOTH
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 0.7}], ids=str)
@pytest.mark.parametrize(
    "widths",
    [(8, 3), (3, 8), (16, 1), (64, 16), (24, 80), (100, 64), (64, 100), (192, 128)],
    ids=str,
)
def test_values_may_be_narrower_or_wider_than_keys(
    attend: Attend, widths: tuple[int, int], options: dict[str, Any]
) -> None:
    options = {"scale": 0.3, **options}
    texts = stored(2, 70, 16, widths)
    q = torch.randn(3, HEADS, widths[0], generator=torch.Generator().manual_seed(3))
    tokens = [(0, 69), (1, 33), (0, 0)]
    sequence = torch.tensor([text for text, _ in tokens], dtype=torch.int32)
    places = texts.at(sequence, torch.tensor([at for _, at in tokens]))
    got = attend(q, texts.states, places, **options)
    assert got.shape == (3, HEADS, widths[1])
    for row, query, token in zip(got, q, tokens, strict=True):
        want = dense_attention(query, texts, *token, options)
        torch.testing.assert_close(row.double(), want, atol=1e-5, rtol=1e-5)
    want = reference.paged_attention(q, texts.states, places, **options)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("widths", [(24, 16), (72, 64), (37, 21)], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_values_may_lie_in_the_keys(
    attend: Attend, dtype: torch.dtype, options: dict[str, Any], widths: tuple[int, int]
) -> None:
    """What a copy of them gives, and the reference."""
    options = {"scale": 0.3, **options}
    texts = stored(2, 70, 16, (widths[0], 1))
    keys, scales = texts.states.keys.nan_to_num(), None
    if dtype == torch.int8:
        scales = (keys.abs().amax(-1).clamp(min=1e-3) / 127).half()
        keys = (keys / scales[..., None].float()).round().clamp(-127, 127)
    keys = keys.to(dtype)
    values = keys[..., : widths[1]]
    shared = StoredStates(keys, values, scales, scales)
    assert shared.shared
    beside = StoredStates(keys, values.clone(memory_format=torch.contiguous_format), scales, scales)
    assert not beside.shared
    q = torch.randn(3, HEADS, widths[0], generator=torch.Generator().manual_seed(3))
    sequence, positions = torch.tensor([0, 1, 0], dtype=torch.int32), torch.tensor([69, 33, 0])
    places = texts.at(sequence, positions)
    got = attend(q, shared, places, **options)
    assert got.shape == (3, HEADS, widths[1])
    torch.testing.assert_close(got, attend(q, beside, places, **options), atol=1e-6, rtol=1e-6)
    want = reference.paged_attention(q, shared, places, **options)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    public = paged_attention(q, shared, places, **options)
    torch.testing.assert_close(public, want, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True, slots=True)
class Shape:
    """heads: of queries and of keys. values: in the keys' memory if `latent`."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype = torch.float32
    latent: bool = False

    def __str__(self) -> str:
        return f"{self.heads} of {self.widths}, {self.dtype}{', a latent' * self.latent}"


SHAPES = (
    Shape((2, 2), (64, 64)),
    Shape((2, 1), (72, 40)),
    Shape((8, 2), (32, 48), torch.bfloat16),
    Shape((16, 2), (64, 64), torch.int8),
    Shape((7, 1), (33, 19), torch.float16),
    Shape((8, 1), (88, 64), latent=True),
    Shape((3, 1), (88, 50), torch.bfloat16, latent=True),
    Shape((5, 1), (80, 64), torch.int8, latent=True),
)


def random_states(shape: Shape, texts: int, length: int) -> tuple[StoredStates, Tensor]:
    """Blocks of 16 in a random order, and the table; the block behind the last is of no text and
    holds no number where its dtype has one that is none."""
    generator = torch.Generator().manual_seed(length)
    each = -(-length // 16)
    parts: list[tuple[Tensor, Tensor | None]] = []
    for width in shape.widths:
        states = torch.randn(texts * each + 1, shape.heads[1], 16, width, generator=generator)
        scales = None
        if shape.dtype == torch.int8:
            states = (states * 40).round().clamp(-127, 127)
            scales = (torch.rand(states.shape[:3], generator=generator) / 40 + 0.01).half()
            scales[-1] = torch.nan
        else:
            states[-1] = torch.nan
        parts.append((states.to(shape.dtype), scales))
    (keys, key_scales), (values, value_scales) = parts
    if shape.latent:
        values, value_scales = keys[..., : shape.widths[1]], key_scales
    table = torch.randperm(texts * each, generator=generator).view(texts, each).int()
    return StoredStates(keys, values, key_scales, value_scales), table


@pytest.mark.skipif(native().library is None, reason=native().reason)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 3.0}], ids=str)
def test_a_token_alone_has_the_bits_of_a_prompt(shape: Shape, options: dict[str, Any]) -> None:
    """By one thread and by several, in any order, in chunks of all sizes, in float64's bounds."""
    options = {"scale": shape.widths[0] ** -0.5, **options}
    states, table = random_states(shape, 2, max(LENGTHS))
    q = torch.randn(2 * max(LENGTHS), shape.heads[0], shape.widths[0])
    sequence = torch.arange(len(q), dtype=torch.int32) // max(LENGTHS)
    positions = torch.arange(len(q)) % max(LENGTHS)

    def attend(rows: Tensor, threads: int) -> Tensor:
        torch.set_num_threads(threads)
        places = TokenPlaces(table, sequence[rows], positions[rows])
        return compiled.paged_attention(q[rows], states, places, **options)

    before = torch.get_num_threads()
    try:
        whole = attend(torch.arange(len(q)), 1)
        lasts = torch.tensor([text * max(LENGTHS) + n - 1 for text in range(2) for n in LENGTHS])
        for threads in (1, 2, 4):
            for row in lasts[threads::3]:
                assert torch.equal(attend(row[None], threads)[0], whole[row])
            assert torch.equal(attend(lasts, threads), whole[lasts])
        for some in torch.split(torch.randperm(len(q)), [1, 4, 9, 100, len(q) - 114]):
            assert torch.equal(attend(some, 3), whole[some])
    finally:
        torch.set_num_threads(before)
    wide = StoredStates(
        *(x.double() for x in (states.keys, states.values)), states.key_scales, states.value_scales
    )
    places = TokenPlaces(table, sequence[lasts], positions[lasts])
    want = exact(q[lasts].double(), wide, places, **options)
    torch.testing.assert_close(whole[lasts].double(), want, atol=3e-6, rtol=0)


def exact(
    q: Tensor,
    stored: StoredStates,
    places: TokenPlaces,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """In float64, token by token, of blocks of 16."""
    out = []
    for row, text, position in zip(q, places.sequence, places.positions.tolist(), strict=True):
        seen = torch.arange(max(0, position + 1 - (window or position + 1)), position + 1)
        at = places.table[text][seen // 16].long(), slice(None), seen % 16
        k, v = (
            x[at] if s is None else x[at] * s[at][..., None].double()
            for x, s in (
                (stored.keys, stored.key_scales),
                (stored.values, stored.value_scales),
            )
        )
        k, v = (x.repeat_interleave(len(row) // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("hd,lhd->hl", row, k) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
    return torch.stack(out)


@pytest.mark.skipif(native().library is None, reason=native().reason)
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=str)
def test_what_others_see_does_not_get_in(heads: tuple[int, int]) -> None:
    """Keys and values behind a token and before its window are no numbers: tokens of the same
    prompt see them, and it does not."""
    shape = Shape(heads, (32, 32))
    states, table = random_states(shape, 1, 513)
    q, bad = torch.randn(513, heads[0], 32), (100, 300, 301, 470)
    for x in (states.keys, states.values):
        for at in bad:
            x[table[0, at // 16].long(), :, at % 16] = torch.nan
    places = TokenPlaces(table, torch.zeros(513, dtype=torch.int32), torch.arange(513))
    got = compiled.paged_attention(q, states, places, scale=0.2, window=60)
    for position in range(513):
        free = not any(position - 60 < at <= position for at in bad)
        assert got[position].isfinite().all() if free else got[position].isnan().all()


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.skipif(native().library is None, reason=native().reason)
def test_scores_of_minus_infinity_weigh_nothing(rows: int) -> None:
    """A whole run of them too; where there is nothing else, the result is no number."""
    states, table = random_states(Shape((2, 2), (16, 16)), 1, 513)
    # From the key's first number: positions 0 to 255 see -inf, the others 0.
    states.keys.zero_()
    states.keys[table[0, :16].long(), :, :, 0] = -torch.inf
    q = torch.ones(rows, 2, 16)
    places = TokenPlaces(table, torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 400))
    got = compiled.paged_attention(q, states, places, scale=1.0)
    seen = torch.arange(256, 401)
    want = states.values[table[0][seen // 16].long(), :, seen % 16].mean(0)
    torch.testing.assert_close(got, want.expand(rows, 2, 16), atol=1e-6, rtol=1e-6)
    places = TokenPlaces(table, torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 200))
    assert compiled.paged_attention(q, states, places, scale=1.0).isnan().all()


def test_no_tokens_give_no_rows() -> None:
    texts = stored(1, 4, 4)
    places = texts.at(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    assert paged_attention(torch.zeros(0, HEADS, DIM), texts.states, places, scale=1.0).numel() == 0


@BOTH
def test_threads_leave_no_trace(attend: Attend) -> None:
    texts = stored(2, 130, 16)
    q = torch.randn(256, HEADS, DIM)
    sequence = torch.arange(256, dtype=torch.int32) % 2
    call = (q, texts.states, texts.at(sequence, torch.arange(256) // 2))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.append(attend(*call, scale=1.0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@BOTH
def test_large_scores_and_infinities_stay_where_they_are(attend: Attend) -> None:
    texts = stored(2, 20, 4)
    keys = texts.states.keys.clone()
    keys[texts.table[0, 4]] = torch.inf  # positions 16 to 19 of the first text
    q = torch.full((3, HEADS, DIM), 100.0)
    sequence, positions = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([19, 15, 19])
    got = attend(q, replace(texts.states, keys=keys), texts.at(sequence, positions), scale=1.0)
    assert not got[0].isfinite().any()
    assert got[1:].isfinite().all()


@BOTH
@pytest.mark.parametrize("widths", [(DIM, DIM), (DIM, 5), (DIM, 24)], ids=str)
def test_int8_is_read_with_its_scales(attend: Attend, widths: tuple[int, int]) -> None:
    texts = stored(1, 9, 4, widths)
    codes, scales = [], []
    for blocks in (texts.states.keys, texts.states.values):
        filled = blocks.nan_to_num()
        scale = (filled.abs().amax(-1).clamp(min=1e-3) / 127).half()
        codes.append((filled / scale[..., None].float()).round().clamp(-127, 127).to(torch.int8))
        scales.append(scale)
    q = torch.randn(2, HEADS, DIM).bfloat16()
    sequence, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([8, 3])
    places = texts.at(sequence, positions)
    got = attend(q, StoredStates(*codes, *scales), places, scale=0.4)
    read = [c.float() * s[..., None].float() for c, s in zip(codes, scales, strict=True)]
    assert got.dtype == torch.bfloat16
    wide = attend(q.float(), StoredStates(*codes, *scales), places, scale=0.4)
    assert torch.equal(got, wide.bfloat16())
    want = attend(q.float(), StoredStates(*read), places, scale=0.4)
    torch.testing.assert_close(wide, want, atol=2e-6, rtol=2e-6)


def test_wrong_arguments_are_named() -> None:
    texts = stored(1, 4, 4)
    good: dict[str, Any] = {
        "q": torch.zeros(1, HEADS, DIM),
        "keys": texts.states.keys,
        "values": texts.states.values,
        "table": texts.table,
        "sequence": torch.zeros(1, dtype=torch.int32),
        "positions": torch.zeros(1, dtype=torch.int64),
        "scale": 1.0,
    }

    def call(change: dict[str, Any]) -> None:
        given = {**good, **change}
        names = (
            ("keys", "values", "key_scales", "value_scales"),
            ("table", "sequence", "positions"),
        )
        states, places = ({k: given.pop(k) for k in part if k in given} for part in names)
        paged_attention(stored=StoredStates(**states), places=TokenPlaces(**places), **given)

    call({})
    eight = texts.states.keys.nan_to_num().to(torch.int8)
    for change, message in (
        ({"q": torch.zeros(1, HEADS)}, r"q is torch.float32 \[1, 6\]; floats"),
        ({"q": torch.zeros(1, 5, DIM)}, r"keys is .*; \[blocks, kv_heads, block size, 8\]"),
        ({"values": texts.states.values[:1]}, r"values is .*; the shape of keys"),
        (
            {"values": texts.states.values[..., :0]},
            r"values is .*; the shape of keys but for its l",
        ),
        ({"values": texts.states.values.half()}, r"values is torch.float16 .*, and their dtype"),
        (
            {"keys": texts.states.keys.mT.contiguous().mT},
            r"keys has strides .*; a contiguous tensor",
        ),
        (
            {"values": texts.states.keys.clone()[..., :5]},
            r"values has strides .*; a contiguous tensor",
        ),
        ({"table": texts.table.long()}, r"table is torch.int64 .*; int32 \[S, blocks\]"),
        ({"sequence": torch.zeros(2, dtype=torch.int32)}, r"sequence is .*; torch.int32 \[1\]"),
        ({"positions": torch.zeros(1)}, r"positions is torch.float32 \[1\]; torch.int64"),
        ({"window": 0}, "window is 0; it must be 1 or more"),
        ({"key_scales": torch.ones(1)}, "torch.float32 goes without key_scales"),
        ({"keys": eight, "values": eight}, "key_scales is missing; int8 needs fp16"),
        ({"keys": eight, "values": eight, "key_scales": torch.ones(1)}, "key_scales is torch.flo"),
    ):
        with pytest.raises(ValueError, match=message):
            call(change)
