"""Keys of full blocks, and how much of a text the pools still hold.

The key of a block is a hash of the key before it and of its tokens, so equal keys mean equal texts
from the first token on. The first key chains from a root that names everything else that keys and
values depend on: the model, its options, how they are stored, the caller's salt.
"""

from array import array
from hashlib import blake2b
from itertools import takewhile

from compress.runtime.sequences.blocks import NULL, BlockPool, Cached


def root_key(*parts: str) -> bytes:
    """The root of texts whose keys and values may be shared. Parts cannot run into each other."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=16).digest()


def extend_chain(contents: list[Cached], root: bytes, tokens: "array[int]", size: int) -> None:
    """Appends what the full blocks of a text hold, as far as `contents` does not list it yet."""
    for index in range(len(contents), len(tokens) // size):
        parent = contents[-1].key if contents else root
        data = tokens[index * size : (index + 1) * size].tobytes()
        contents.append(Cached(chain(parent, data), parent, data))


def longest_hit(
    pools: list[BlockPool], windows: tuple[int | None, ...], contents: list[Cached], size: int
) -> list[list[int]]:
    """For each group the blocks of the longest prefix from which computing can go on.

    contents: what the blocks of the prefix must hold. A group without a window needs all of them;
    one with a window those that the next position sees, with NULL before.
    """
    held = [_leading(pool, contents) for pool, w in zip(pools, windows, strict=True) if w is None]
    count = min(map(len, held), default=len(contents))
    held = [[pool.find(content) for content in contents[:count]] for pool in pools]
    for n in range(count, 0, -1):
        firsts = [first_seen(n * size, window) // size for window in windows]
        if all(NULL not in b[first:n] for b, first in zip(held, firsts, strict=True)):
            return [[NULL] * first + b[first:n] for b, first in zip(held, firsts, strict=True)]
    return [[] for _ in pools]


def _leading(pool: BlockPool, contents: list[Cached]) -> list[int]:
    found = takewhile(lambda block: block != NULL, map(pool.find, contents))
    return list(found)


def first_seen(position: int, window: int | None) -> int:
    """The first position that attention at a position reads. 0 without a window."""
    return 0 if window is None else max(0, position - window + 1)
