"""Documents by what they say, in whatever file and format they lie."""

import unicodedata
from collections.abc import Iterator
from hashlib import blake2b

from compress.text.tokenizer import Tokenizer
from compress_calibration.config import SourceConfig
from compress_calibration.sources import documents

SHORTEST = 32  # characters of a document that two texts do not share by chance
READ = 1 << 26  # characters that are looked at: a second or two
PIECE = 1 << 24  # characters in memory: a longer document has a fingerprint of each piece
BYTES = 8  # of a fingerprint: of a million documents and a million no two others are alike


def fingerprints(
    source: SourceConfig, tokenizer: Tokenizer, count: int | None = None, most: int = READ
) -> Iterator[bytes]:
    """One of each document of some length, in file order, read as a stream: documents that differ
    in white space or in how a letter is composed have the same.

    count: documents that are looked at; None for all. most: characters behind which it ends.
    Raises as `documents` does.
    """
    read = 0
    for number, document in enumerate(documents(source, tokenizer, PIECE)):
        if number == count or read >= most:
            return
        read += len(document)
        said = " ".join(unicodedata.normalize("NFC", document).split())
        if len(said) >= SHORTEST:
            yield blake2b(said.encode("utf-8", "surrogatepass"), digest_size=BYTES).digest()
