"""Which blocks a text finds: chains of keys, hits in groups with and without windows."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.runtime.sequences import prefix
from compress.runtime.sequences.blocks import NULL, BlockPool, Cached
from compress.runtime.sequences.prefix import extend_chain, first_seen, longest_hit, root_key

ROOT = root_key("model")


def chain_of(tokens: list[int], size: int, root: bytes = ROOT) -> list[Cached]:
    contents: list[Cached] = []
    extend_chain(contents, root, array("i", tokens), size)
    return contents


def test_only_full_blocks_have_a_key() -> None:
    assert len(chain_of([1, 2, 3, 4, 5], 2)) == 2
    assert chain_of([1], 2) == []


def test_a_chain_grows_without_changing() -> None:
    tokens = array("i", range(9))
    contents = chain_of([0, 1, 2, 3, 4], 2)
    extend_chain(contents, ROOT, tokens, 2)
    assert contents == chain_of(list(range(9)), 2)


def test_a_key_depends_on_everything_before() -> None:
    one, other = chain_of([1, 2, 3, 4], 2), chain_of([9, 2, 3, 4], 2)
    assert one[1].tokens == other[1].tokens
    assert one[1].key != other[1].key
    assert chain_of([1, 2], 2, root_key("other model"))[0].key != one[0].key


def test_parts_of_a_root_do_not_run_into_each_other() -> None:
    roots = [root_key("ab", "c"), root_key("a", "bc"), root_key("abc"), root_key("a\0bc")]
    assert len(set(roots)) == 4
    assert root_key("\ud800") != root_key("")


@pytest.mark.parametrize(
    ("position", "window", "first"),
    [(7, None, 0), (7, 1, 7), (7, 3, 5), (7, 8, 0), (7, 100, 0), (0, 1, 0)],
)
def test_first_seen(position: int, window: int | None, first: int) -> None:
    assert first_seen(position, window) == first


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 4),
    windows=st.lists(st.sampled_from([None, 1, 2, 3, 6]), min_size=1, max_size=3),
    held=st.lists(st.sets(st.integers(0, 5)), min_size=3, max_size=3),
)
def test_the_longest_hit_that_has_all_that_is_seen(
    size: int, windows: list[int | None], held: list[set[int]]
) -> None:
    """Against the definition, tried from the longest prefix down."""
    contents = chain_of(list(range(6 * size)), size)
    pools = [BlockPool(8, size) for _ in windows]
    for pool, depths in zip(pools, held, strict=False):
        for depth in sorted(depths):
            pool.publish(pool.allocate(), contents[depth])

    def fits(count: int) -> bool:
        return all(
            position // size in depths
            for window, depths in zip(windows, held, strict=False)
            for position in range(first_seen(count * size, window), count * size)
        )

    best = max(count for count in range(7) if fits(count))
    hits = longest_hit(pools, tuple(windows), contents, size)
    for pool, window, hit in zip(pools, windows, hits, strict=True):
        skipped = first_seen(best * size, window) // size
        expected = [NULL] * skipped + [pool.find(c) for c in contents[skipped:best]]
        assert hit == expected[:best]


@pytest.mark.parametrize("window", [None, 3])
def test_texts_with_equal_hashes_do_not_share(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token check: with a hash of one value, no text takes another's blocks."""
    monkeypatch.setattr(prefix, "chain", lambda parent, tokens: b"same")
    pool = BlockPool(8, 2)
    for content in chain_of([1, 2, 3, 4], 2):
        pool.publish(pool.allocate(), content)
    for tokens in ([1, 3, 3, 4], [3, 4], [1, 2, 3, 5]):
        hit = longest_hit([pool], (window,), chain_of(tokens, 2), 2)[0]
        assert hit == ([1] if tokens[:2] == [1, 2] else [])
