"""The small files that go along with an artifact: config.json, tokenizer, whatever there is."""

import json
from pathlib import Path

from compress.checkpoint import write_atomic
from compress.checkpoint.detect import without_block
from compress.formats.table import small_files
from compress.formats.weights import Weights


def copy_side_files(source: Weights, folder: Path) -> tuple[str, ...]:
    """Their names. Nothing says how the source was quantized, neither config.json nor a file."""
    names, formats = [], small_files()
    for path in source.checkpoint.side_files():
        if path.name in formats:
            continue
        write_atomic(folder / path.name, source.checkpoint.small.read(path.name))
        names.append(path.name)
    text = json.dumps(without_block(source.checkpoint.config), indent=2, ensure_ascii=False) + "\n"
    write_atomic(folder / "config.json", text.encode())
    return (*names, "config.json")
