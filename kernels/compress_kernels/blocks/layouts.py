"""How llama.cpp lays out the blocks of a weight's rows: its own types, k-quants and IQ4.

A block holds 32 numbers, a super-block 256 of them in sub-blocks of 16 or 32. A number is

    d * scale * level - dmin * minimum

with d and dmin in fp16 for the block, whole numbers scale and minimum for the sub-block (1, and -1,
where a block has no sub-blocks), and a level by its code: code - centre, or an entry of a table.
The types are those of ggml (llama.cpp's pull request 1684 describes the k-quants); the
documents of none say more than its structures do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Levels of the IQ4 types, closer together near 0 as weights are.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class Plane:
    """Bits of codes, packed: a run of 8 / bits * width numbers takes width bytes, and byte i has
    the numbers i, i + width, i + 2 width, ... of it from its lowest bits on."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A type of block. numbers: in it. size: bytes. sub: numbers that share a scale. centre: the
    code of level 0, or no matter where there is a table. low, high: where the code's bits are.
    parts: of the bytes, in order. scale_range: of the sub-blocks' scales, (1, 1) without
    sub-blocks. minima: the largest minimum of a sub-block, 1 for one of the block alone, 0 for
    none.
    """

    name: str
    numbers: int
    size: int
    sub: int
    centre: int
    low: Plane
    high: Plane | None
    parts: tuple[str, ...]
    scale_range: tuple[int, int] = (1, 1)
    minima: int = 0
    levels: tuple[int, ...] | None = None

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.low.bits + (0 if self.high is None else self.high.bits)

    @property
    def subs(self) -> int:
        """Sub-blocks of a block."""
        return self.numbers // self.sub


_NIBBLES, _PAIRS, _FLAGS = Plane(4, 16), Plane(2, 32), Plane(1, 32)

LAYOUTS: Mapping[str, BlockLayout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            BlockLayout("Q4_0", 32, 18, 32, 8, _NIBBLES, None, ("d", "low")),
            BlockLayout("Q4_1", 32, 20, 32, 0, _NIBBLES, None, ("d", "dmin", "low"), minima=1),
            BlockLayout("Q5_0", 32, 22, 32, 16, _NIBBLES, Plane(1, 1), ("d", "high", "low")),
            BlockLayout(
                "Q5_1", 32, 24, 32, 0, _NIBBLES, Plane(1, 1), ("d", "dmin", "high", "low"),
                minima=1,
            ),
            BlockLayout("Q8_0", 32, 34, 32, 128, Plane(8, 32), None, ("d", "low")),
            BlockLayout(
                "Q2_K", 256, 84, 16, 0, _PAIRS, None, ("scales", "low", "d", "dmin"), (0, 15), 15
            ),
            BlockLayout(
                "Q3_K", 256, 110, 16, 4, _PAIRS, _FLAGS, ("high", "low", "scales", "d"), (-32, 31)
            ),
            BlockLayout(
                "Q4_K", 256, 144, 32, 0, Plane(4, 32), None, ("d", "dmin", "scales", "low"),
                (0, 63), 63,
            ),
            BlockLayout(
                "Q5_K", 256, 176, 32, 0, Plane(4, 32), _FLAGS,
                ("d", "dmin", "scales", "high", "low"), (0, 63), 63,
            ),
            BlockLayout(
                "Q6_K", 256, 210, 16, 32, Plane(4, 64), _PAIRS, ("low", "high", "scales", "d"),
                (-128, 127),
            ),
            BlockLayout("IQ4_NL", 32, 18, 32, 0, _NIBBLES, None, ("d", "low"), levels=IQ4_LEVELS),
            BlockLayout(
                "IQ4_XS", 256, 136, 32, 0, _NIBBLES, None, ("d", "scales", "low"), (-32, 31),
                levels=IQ4_LEVELS,
            ),
        )
    }
)  # fmt: skip
