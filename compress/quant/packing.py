"""Dense bit packing: signed codes of 2 to 8 bits in int32 words.

A code is stored as code + 2^(bits-1), so unsigned; code i of a row occupies bits i * bits and up of
one long little-endian bit string, cut into 32-bit words. Codes straddle words when bits does not
divide 32. This is compressed-tensors' layout (all versions for 2, 4 and 8 bits; 0.18 and later for
3, 5, 6 and 7, which older ones padded to whole codes a word).

Both directions rest on one fact: 8 codes fill exactly `bits` bytes. So 8 codes at a time are
gathered in an int64 and its low bytes are taken, with no loop over words. Where whole codes fill a
byte, the bytes of a few codes are merged in one integer: several times as fast.
"""

import torch
from torch import Tensor

WORD_BITS = 32
_WHOLE = (2, 4, 8)  # widths of which whole codes fill a byte
_PIECE = 1 << 16  # codes merged at once


def words_for(count: int, bits: int) -> int:
    """int32 words that `count` codes of `bits` bits take."""
    return -(-count * bits // WORD_BITS)


def pack(codes: Tensor, bits: int) -> Tensor:
    """int8 codes [rows, count] in [-2^(bits-1), 2^(bits-1) - 1] -> int32 [rows, words_for(count)].

    Bits past the last code are zero.
    """
    assert codes.dtype == torch.int8
    assert codes.dim() == 2
    assert 2 <= bits <= 8
    rows, count = codes.shape
    offset, octets = 1 << (bits - 1), -(-count // 8)
    if bits in _WHOLE:
        padded = codes.new_full((rows, octets * 8), -offset) if count % 8 else codes
        if count % 8:
            padded[:, :count] = codes
        joined = _joined(padded, bits)
        return _padded(joined.view(rows, -1), words_for(count, bits) * 4).view(torch.int32)
    unsigned = codes.contiguous().view(torch.uint8) + offset  # wraps: -offset -> 0
    assert count == 0 or int(unsigned.max()) < 2 * offset, "a code is out of range"
    padded = _padded(unsigned, octets * 8).view(rows, octets, 8)
    string = torch.zeros(rows, octets, dtype=torch.int64, device=codes.device)
    for i in range(8):
        string |= padded[:, :, i].to(torch.int64) << (i * bits)
    # string: [rows, octets, 8 bytes], of which the low `bits` bytes are used
    used = string.unsqueeze(-1).view(torch.uint8)[:, :, :bits].reshape(rows, octets * bits)
    words = words_for(count, bits)
    return _padded(used, words * 4).view(torch.int32)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack`: int32 [rows, words_for(count)] -> int8 codes [rows, count]."""
    assert words.dtype == torch.int32
    assert words.dim() == 2
    assert 2 <= bits <= 8
    rows = words.shape[0]
    assert words.shape[1] == words_for(count, bits), "words do not hold that many codes"
    octets = -(-count // 8)
    if bits in _WHOLE:
        codes = _split(words, bits).view(rows, -1)
        return codes if codes.shape[1] == count else codes[:, :count].contiguous()
    stream = _padded(_padded(words, words.shape[1]).view(torch.uint8), octets * bits)
    groups = torch.zeros(rows, octets, 8, dtype=torch.uint8, device=words.device)
    groups[:, :, :bits] = stream.view(rows, octets, bits)
    string = groups.view(torch.int64).squeeze(-1)  # string: [rows, octets]
    mask, offset = (1 << bits) - 1, 1 << (bits - 1)
    codes = torch.empty(rows, octets, 8, dtype=torch.uint8, device=words.device)
    for i in range(8):
        codes[:, :, i] = ((string >> (i * bits)) & mask).to(torch.uint8)
    codes -= offset  # wraps: 0 -> -offset
    return codes.view(rows, octets * 8)[:, :count].contiguous().view(torch.int8)


def _joined(codes: Tensor, bits: int) -> Tensor:
    """int8 codes [rows, n], n a multiple of 8 -> their bytes uint8 [rows * n * bits / 8]."""
    flat = codes.reshape(-1).view(torch.uint8)
    out = flat.new_empty(flat.numel() * bits // 8)
    for start, stop in _pieces(flat):
        unsigned = flat[start:stop] + (1 << (bits - 1))  # wraps: -offset -> 0
        assert bits == 8 or int(unsigned.max()) < 1 << bits, "a code is out of range"
        out[start * bits // 8 : stop * bits // 8] = _narrowed(unsigned, bits)
    return out


def _split(words: Tensor, bits: int) -> Tensor:
    """int32 words -> all int8 codes in them [rows * words * 32 / bits]."""
    flat = words.reshape(-1).view(torch.uint8)
    out = flat.new_empty(flat.numel() * 8 // bits)
    for start, stop in _pieces(out):
        codes = _widened(flat[start * bits // 8 : stop * bits // 8], bits)
        out[start:stop] = codes - (1 << (bits - 1))  # wraps: 0 -> -offset
    return out.view(torch.int8)


def _pieces(codes: Tensor) -> list[tuple[int, int]]:
    """Cuts of a row of codes whose temporaries stay in a processor's cache."""
    count = codes.numel()
    step = _PIECE if codes.device.type == "cpu" else max(count, 1)
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def _narrowed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes, a byte each, merged into bytes."""
    if bits == 8:
        return codes
    if bits == 4:
        pairs = codes.view(torch.int16)
        return (pairs | (pairs >> 4)).to(torch.uint8)
    fours = codes.view(torch.int32)
    return (fours | (fours >> 6) | (fours >> 12) | (fours >> 18)).to(torch.uint8)


def _widened(data: Tensor, bits: int) -> Tensor:
    """Inverse of `_narrowed`."""
    if bits == 8:
        return data
    if bits == 4:
        wide = data.to(torch.int16)
        return ((wide | (wide << 4)) & 0x0F0F).view(torch.uint8)
    wide = data.to(torch.int32)
    return ((wide | (wide << 6) | (wide << 12) | (wide << 18)) & 0x03030303).view(torch.uint8)


def _padded(data: Tensor, width: int) -> Tensor:
    """data [rows, n] cut or zero-filled on the right to [rows, width]."""
    kept = min(width, data.shape[1])
    # A new tensor even where nothing changes: one row counts as contiguous whatever its stride is,
    # and then it cannot be viewed as wider integers.
    result = data.new_zeros(data.shape[0], width)
    result[:, :kept] = data[:, :kept]
    return result
