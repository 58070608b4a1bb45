"""The block tables of running sequences, over all groups of layers with one window."""

from collections.abc import Iterable
from typing import NamedTuple

from compress.errors import RequestError
from compress.runtime.sequences.blocks import NULL, BlockPool
from compress.runtime.sequences.prefix import extend_chain, first_seen, longest_hit
from compress.runtime.sequences.sequence import Sequence


class CacheGroup(NamedTuple):
    """Layers that see the same positions. blocks: the null block included."""

    window: int | None
    blocks: int


class Copy(NamedTuple):
    """Keys and values of a block to be copied before a step writes."""

    source: int
    target: int
    group: int


class BlockTables:
    """Gives blocks to sequences and takes them back.

    chunk: tokens of one sequence in a step, at most. reuse: whether texts find the blocks of
    others that begin alike. Errors: RequestError for a cache without room.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], block_size: int, chunk: int, reuse: bool = True
    ) -> None:
        for group in groups:
            if group.blocks < 2 or block_size < 1:
                raise RequestError(
                    f"a cache of {group.blocks} blocks of {block_size} positions holds no text: 2 "
                    "blocks at least are needed, as one pads"
                )
        self.groups, self.block_size, self.chunk, self.reuse = groups, block_size, chunk, reuse
        self.windows = tuple(group.window for group in groups)
        self.pools = [BlockPool(group.blocks, block_size) for group in groups]

    def blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def bound(self, group: int, positions: int) -> int:
        """Blocks of a group that a sequence of so many positions holds at once, at most."""
        window = self.windows[group]
        if window is None:
            return self.blocks(positions)
        # A window and a chunk, which begin and end inside blocks.
        return min(self.blocks(positions), self.blocks(window - 1 + self.chunk) + 1)

    def wanted(self, group: int, sequence: Sequence, end: int) -> int:
        """Blocks still to be allocated before the positions up to `end` are computed."""
        table = sequence.tables[group]
        fresh = self.blocks(end) - len(table)
        held = len(table) - sequence.trimmed[group]
        fresh = max(0, min(fresh, self.bound(group, end) - held))
        return fresh + self._shares_last(group, sequence)

    def fits(self, sequence: Sequence, end: int) -> bool:
        """Whether extend() can be called."""
        whole = self.blocks(end)
        for g, pool in enumerate(self.pools):
            if whole - len(sequence.tables[g]) + self._shares_last(g, sequence) > pool.free:
                return False
        return True

    def extend(self, sequence: Sequence, end: int) -> list[Copy]:
        """Private room for the positions from `computed` to `end`."""
        copies = []
        for g, pool in enumerate(self.pools):
            table = sequence.tables[g]
            if sequence.computed < len(table) * self.block_size:
                source = pool.writable(table, sequence.computed)
                if source is not None:
                    target = table[sequence.computed // self.block_size]
                    copies.append(Copy(source, target, g))
            while len(table) < self.blocks(end):
                table.append(pool.allocate())
        return copies

    def attach(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks those of its longest cached prefix."""
        if not self.reuse:
            return
        extend_chain(sequence.contents, sequence.root, sequence.tokens, self.block_size)
        contents = sequence.contents[: sequence.needed // self.block_size]
        for g, hit in enumerate(longest_hit(self.pools, self.windows, contents, self.block_size)):
            for block in hit:
                self.pools[g].share(block)
            sequence.tables[g].extend(hit)
            sequence.trimmed[g] = hit.count(NULL)
            sequence.computed = len(hit) * self.block_size
        sequence.published = len(sequence.tables[0])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child goes on from what the parent has computed, without a copy for now."""
        child.computed, child.published = parent.computed, parent.published
        child.contents = list(parent.contents[: parent.published])
        child.trimmed = list(parent.trimmed)
        for g, pool in enumerate(self.pools):
            child.tables[g] = parent.tables[g][: self.blocks(parent.computed)]
            for block in child.tables[g]:
                pool.share(block)

    def settle(self, sequence: Sequence) -> None:
        """After a step: full blocks are published, blocks left of a window given back.

        Goes by `computed`, so what a speculation takes back is neither published nor missed.
        """
        full = sequence.computed // self.block_size
        if self.reuse and full > sequence.published:
            extend_chain(sequence.contents, sequence.root, sequence.tokens, self.block_size)
            for g, pool in enumerate(self.pools):
                for index in range(sequence.published, full):
                    pool.publish(sequence.tables[g][index], sequence.contents[index])
            sequence.published = full
        for g, window in enumerate(self.windows):
            if window is not None:
                self._trim(g, sequence, first_seen(sequence.computed, window) // self.block_size)

    def release(self, sequence: Sequence) -> None:
        """All blocks of a sequence go back; nothing of it is computed any more."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table)
        sequence.reset()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError where a pool's books do not match the tables of the sequences."""
        sequences = list(sequences)
        for g, pool in enumerate(self.pools):
            pool.check(sequence.tables[g] for sequence in sequences)

    def _trim(self, group: int, sequence: Sequence, first: int) -> None:
        start, table = sequence.trimmed[group], sequence.tables[group]
        if first > start:
            self.pools[group].release(table[start:first])
            for index in range(start, first):
                table[index] = NULL
            sequence.trimmed[group] = first

    def _shares_last(self, group: int, sequence: Sequence) -> bool:
        """Whether the next position lies in a block that another sequence holds too."""
        table, index = sequence.tables[group], sequence.computed // self.block_size
        return index < len(table) and self.pools[group].refs[table[index]] > 1
