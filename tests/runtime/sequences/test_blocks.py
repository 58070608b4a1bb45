"""The pool of blocks: sharing, publishing, eviction, copy-on-write, and books that show faults."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compress.runtime.sequences.blocks import NULL, BlockPool, Cached

SIZE = 4


def content(*names: int) -> Cached:
    """What a block holds whose text is `names`, one for each block up to it."""
    key = bytes(names)
    return Cached(b"key of " + key, b"key of " + key[:-1], key[-1:])


def filled(count: int) -> tuple[BlockPool, list[int]]:
    """A pool and a chain of as many published blocks as it has."""
    pool = BlockPool(count, SIZE)
    blocks = [pool.allocate() for _ in range(count - 1)]
    for depth, block in enumerate(blocks):
        pool.publish(block, content(*range(depth + 1)))
    return pool, blocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, SIZE)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.free == 0
    with pytest.raises(AssertionError, match="without a free block"):
        pool.allocate()
    pool.share(NULL)
    pool.release([NULL, NULL])
    pool.check([[1, 2, 3]])


def test_a_block_is_free_when_its_last_table_lets_go() -> None:
    pool = BlockPool(3, SIZE)
    block = pool.allocate()
    pool.share(block)
    pool.release([block])
    assert pool.free == 1
    pool.release([block])
    assert pool.free == 2
    with pytest.raises(AssertionError, match=f"block {block} is released twice"):
        pool.release([block])


def test_the_tail_of_a_text_is_evicted_before_its_head() -> None:
    pool, blocks = filled(5)
    pool.release(blocks)
    assert [pool.allocate() for _ in blocks] == blocks[::-1]


def test_the_text_used_last_is_evicted_last() -> None:
    pool, blocks = filled(5)
    pool.release(blocks[2:])
    pool.release(blocks[:2])
    pool.share(blocks[3])
    pool.release([blocks[3]])
    assert [pool.allocate() for _ in blocks] == [blocks[i] for i in (2, 1, 0, 3)]


def test_blocks_that_cache_nothing_go_first() -> None:
    pool, blocks = filled(5)
    pool.release(blocks[:1])
    block = pool.allocate()
    pool.release(blocks[1:])
    pool.release([block])
    assert pool.allocate() == block


def test_a_freed_block_is_found_until_it_is_taken() -> None:
    pool, (block,) = filled(2)
    pool.release([block])
    assert pool.find(content(0)) == block
    pool.share(block)
    assert pool.free == 0
    pool.release([block])
    assert pool.allocate() == block
    assert pool.find(content(0)) == NULL
    assert pool.cached[block] is None
    pool.check([[block]])


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(3, SIZE)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, content(7))
    pool.publish(second, content(7))
    assert pool.find(content(7)) == first
    assert pool.cached[second] is None
    pool.check([[first], [second]])


@pytest.mark.parametrize("field", ["parent", "tokens"])
def test_one_key_for_two_texts_is_no_hit(field: str) -> None:
    pool, (block,) = filled(2)
    other = content(0)._replace(**{field: b"others"})
    assert pool.find(other) == NULL
    pool.publish(block, other)
    assert pool.find(content(0)) == block


def test_writing_to_a_shared_block_copies_it() -> None:
    pool = BlockPool(4, SIZE)
    shared = pool.allocate()
    pool.share(shared)
    mine, yours = array("i", [shared]), array("i", [shared])
    assert pool.writable(mine, 2) == shared
    assert mine[0] != shared
    assert pool.writable(yours, 2) is None
    assert yours[0] == shared
    pool.check([mine, yours])


def test_a_cached_block_is_not_written() -> None:
    pool, (block,) = filled(2)
    with pytest.raises(AssertionError, match=f"block {block} is cached and would be written"):
        pool.writable(array("i", [block]), 0)


FAULTS: dict[str, Callable[[BlockPool], object]] = {
    "references are not": lambda pool: pool.refs.__setitem__(1, 2),
    "a free block is held": lambda pool: pool._link(1, NULL),
    "the free list is broken": lambda pool: pool._last.__setitem__(3, 3),
    "the free list is": lambda pool: setattr(pool, "free", 1),
    "keys do not lead": lambda pool: pool.by_key.clear(),
    "a block is lost": lambda pool: pool._unlink(4),
}


@pytest.mark.parametrize("message", FAULTS)
def test_check_finds(message: str) -> None:
    pool = BlockPool(5, SIZE)
    table = [pool.allocate(), pool.allocate()]
    pool.publish(table[0], content(1))
    pool.check([table])
    FAULTS[message](pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([table])


class Pool(RuleBasedStateMachine):
    """Tables come, grow, are forked, written to and let go; texts are a letter for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, SIZE)
        self.tables: list[list[int]] = []
        self.texts: list[list[int]] = []

    def _any(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.tables) - 1))

    @rule(letters=st.lists(st.integers(0, 2), max_size=5))
    def begin(self, letters: list[int]) -> None:
        """Takes the longest prefix that is cached; what is found has the right text."""
        table: list[int] = []
        for depth in range(len(letters)):
            wanted = content(*letters[: depth + 1])
            block = self.pool.find(wanted)
            if block == NULL:
                break
            assert self.pool.cached[block] == wanted
            self.pool.share(block)
            table.append(block)
        self.tables.append(table)
        self.texts.append(letters[: len(table)])

    @precondition(lambda self: self.tables and self.pool.free)
    @rule(data=st.data(), letter=st.integers(0, 2), publish=st.booleans())
    def grow(self, data: st.DataObject, letter: int, publish: bool) -> None:
        which = self._any(data)
        free = self.pool.free
        block = self.pool.allocate()
        assert self.pool.free == free - 1
        assert self.pool.cached[block] is None
        self.tables[which].append(block)
        self.texts[which].append(letter)
        if publish:
            self.pool.publish(block, content(*self.texts[which]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        which = self._any(data)
        for block in self.tables[which]:
            self.pool.share(block)
        self.tables.append(list(self.tables[which]))
        self.texts.append(list(self.texts[which]))

    @precondition(lambda self: self.tables and self.pool.free)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        which = self._any(data)
        table = array("i", self.tables[which])
        if table and self.pool.cached[table[-1]] is None:
            copied = self.pool.writable(table, len(table) * SIZE - 1)
            assert self.pool.refs[table[-1]] == 1
            assert (copied is None) == (table[-1] == self.tables[which][-1])
            self.tables[which] = table.tolist()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        which = self._any(data)
        self.pool.release(self.tables.pop(which))
        self.texts.pop(which)

    @invariant()
    def books(self) -> None:
        self.pool.check(self.tables)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
