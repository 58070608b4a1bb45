"""The blocks of one group of layers: who holds them, what they cache, which goes next.

A block holds the keys and values of `block_size` positions, for every layer of the group. Several
sequences may hold one. A full block can be published under the key of its tokens and all tokens
before (prefix.py); it keeps the key when nobody holds it any more, until it is taken for something
else. Block 0, the null block, is never handed out: padding is written there, and it stands in
tables where a window has moved on.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NULL = 0


class Cached(NamedTuple):
    """What a published block holds: `tokens` (their bytes) behind the blocks that `parent` names.

    All three are compared at a hit, so two texts with one key cannot take each other's blocks.
    """

    key: bytes
    parent: bytes
    tokens: bytes


class BlockPool:
    """Blocks 1 to count - 1 with reference counts, and a list of the free ones in order of use.

    The list is linked through arrays, both ways, with block 0 as its head: taking a block out of
    its middle (a prefix hit) costs as little as taking the first.
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count, self.block_size = count, block_size
        self.refs = [0] * count
        self.cached: list[Cached | None] = [None] * count
        self.by_key: dict[bytes, int] = {}
        self._next: list[int] = [*range(1, count), NULL]
        self._last: list[int] = [count - 1, *range(count - 1)]
        self.free = count - 1

    def allocate(self) -> int:
        """A private block, its content undefined. The caller has checked that one is free."""
        block = self._next[NULL]
        assert block != NULL, "allocate() without a free block"
        self._unlink(block)
        self._forget(block)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds the block."""
        if block == NULL:
            return
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """A table gives its blocks back. Its last are taken for something else before its first."""
        for block in reversed(list(blocks)):
            if block == NULL:
                continue
            assert self.refs[block] > 0, f"block {block} is released twice"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                # What caches nothing goes first.
                behind = NULL if self.cached[block] is None else self._last[NULL]
                self._link(block, behind)

    def writable(self, table: "array[int]", position: int) -> int | None:
        """Makes the block of a position private to a table that holds it.

        Returns the block whose content must be copied into the new one, None if it was private.
        """
        index = position // self.block_size
        block: int = table[index]
        assert self.cached[block] is None, f"block {block} is cached and would be written"
        if self.refs[block] == 1:
            return None
        table[index] = self.allocate()
        self.release([block])
        return block

    def publish(self, block: int, content: Cached) -> None:
        """Others may find the full block, unless a block with this content is found already."""
        if block != NULL and self.cached[block] is None and content.key not in self.by_key:
            self.cached[block] = content
            self.by_key[content.key] = block

    def find(self, content: Cached) -> int:
        """The published block with this content, or NULL."""
        block = self.by_key.get(content.key, NULL)
        return block if block != NULL and self.cached[block] == content else NULL

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError where the books are wrong. tables: of all who hold blocks."""
        held = [0] * self.count
        for table in tables:
            for block in table:
                held[block] += block != NULL
        assert held == self.refs, "references are not the tables that hold a block"
        free = list(self._in_order())
        assert len(free) == len(set(free)) == self.free, "the free list is broken"
        assert all(self.refs[b] == 0 for b in free), "a free block is held"
        assert self.free + sum(n > 0 for n in held) == self.count - 1, "a block is lost"
        found = {c.key: b for b, c in enumerate(self.cached) if c is not None}
        assert found == self.by_key, "keys do not lead to their blocks"
        assert self.cached[NULL] is None

    def _in_order(self) -> Iterator[int]:
        block = NULL
        while True:
            before, block = block, self._next[block]
            assert self._last[block] == before, "the free list is broken"
            if block == NULL:
                return
            yield block

    def _unlink(self, block: int) -> None:
        before, after = self._last[block], self._next[block]
        self._next[before], self._last[after] = after, before
        self.free -= 1

    def _link(self, block: int, behind: int) -> None:
        after = self._next[behind]
        self._next[behind], self._last[after] = block, block
        self._last[block], self._next[block] = behind, after
        self.free += 1

    def _forget(self, block: int) -> None:
        content, self.cached[block] = self.cached[block], None
        if content is not None:
            del self.by_key[content.key]
