"""The small files that go along with an artifact: config.json, tokenizer, whatever there is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint import write_atomic
from compress.formats.table import small_files
from compress_exporters.exporter import Source

QUANTIZATION = ("quantization_config", "compression_config")


def copy_side_files(source: Source, folder: Path) -> tuple[str, ...]:
    """Their names. Nothing says how the source was quantized, neither config.json nor a file."""
    names, formats = [], small_files()
    for path in source.checkpoint.side_files():
        if path.name in formats:
            continue
        write_atomic(folder / path.name, source.checkpoint.small.read(path.name))
        names.append(path.name)
    config = _plain(source.checkpoint.config)
    for key in source.spec.text_config:
        config[key] = _plain(config[key])
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    write_atomic(folder / "config.json", text.encode())
    return (*names, "config.json")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in QUANTIZATION}
