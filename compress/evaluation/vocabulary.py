"""Whether two checkpoints read a text as the same tokens; only then can they be compared."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from compress.checkpoint.small_files import SmallFiles
from compress.errors import CheckpointError
from compress.recipe.evaluation_config import TextConfig
from compress.text.tokenizer import Tokenizer, load_tokenizer
from compress_calibration.sources import documents

FILE = "tokenizer.json"


def refuse_other_tokenizer(
    tokenizer: Tokenizer,
    source: SmallFiles,
    texts: Sequence[TextConfig],
    tasks: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """CheckpointError when the source's tokenizer gives a text other ids than `tokenizer` does.

    tasks: all that each one asks, by its name. Equal files are not read further; a source without
    tokenizer.json has nothing to compare. Raises DataError for text that cannot be read.
    """
    theirs = source.find(FILE)
    if theirs is None or theirs == SmallFiles(tokenizer.folder).find(FILE):
        return
    other = load_tokenizer(source)
    for text in texts:
        if text.kind == "self":
            continue
        seen = 0
        for document in islice(documents(text.source(), tokenizer), text.max_documents):
            seen += _same_ids(tokenizer, other, f"text {text.name!r}", document)
            if text.max_tokens is not None and seen > text.max_tokens:
                break
    for name, asked in (tasks or {}).items():
        for document in asked:
            _same_ids(tokenizer, other, f"task {name!r}", document)


def _same_ids(tokenizer: Tokenizer, other: Tokenizer, what: str, document: str) -> int:
    """How many; CheckpointError where they differ."""
    ours, theirs = tokenizer.encode(document), other.encode(document)
    if ours != theirs:
        raise CheckpointError(_difference(tokenizer, other, what, ours, theirs))
    return len(ours)


def _difference(
    tokenizer: Tokenizer, other: Tokenizer, what: str, ours: list[int], theirs: list[int]
) -> str:
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return (
        f"the tokenizers of {tokenizer.folder} and {other.folder} differ: token {at} of"
        f" {what} is {ours[at : at + 1]} in the one and {theirs[at : at + 1]} in the other; give"
        " the checkpoint that the result was made from"
    )
