"""Checkpoints, texts and tasks that are broken."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from attacks import places
from attacks.stock import TASKS
from attacks.values import ODD, deep, garble, mutate

INDEX = "model.safetensors.index.json"
# What else may lie in a checkpoint's folder.
_EXTRA = (
    *("tokenizer.model", "chat_template.jinja", "generation_config.json", "added_tokens.json"),
    *("quantize_config.json", "hf_quant_config.json", "model-00002-of-00002.safetensors", INDEX),
    *("LICENSE", "README.md", "merges.txt", "vocab.json", "special_tokens_map.json", "sub/x.json"),
    *("pytorch_model.bin", "recipe.yaml", "report/report.json", "model.onnx", "journal.json"),
)


def checkpoint(rng: Random, folder: Path) -> str:
    """One thing wrong in a checkpoint's folder; returns the file's name."""
    found = sorted(path.name for path in folder.iterdir() if path.is_file())
    name = rng.choice([*found, "config.json", "tokenizer.json", "model.safetensors"])
    path = folder / name
    kind = rng.choice(["bytes", "json", "json", "json", "special", "extra", "tensors"])
    if kind == "extra":
        return _extra(rng, folder)
    if kind == "special" or not path.exists():
        places.replace(rng, path)
    elif name.endswith(".safetensors") and kind in ("json", "tensors"):
        _header(rng, path)
    elif name.endswith(".json") and kind == "json":
        _json(rng, path)
    else:
        path.write_bytes(garble(rng, path.read_bytes()))
    return name


def quantization(rng: Random, folder: Path) -> str:
    """One to three changes of the config of a quantized checkpoint."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for _ in range(rng.randint(1, 3)):
        config = mutate(rng, config, often="quantization_config")
        config = config if isinstance(config, dict) else {"quantization_config": config}
    path.write_text(json.dumps(config))
    return path.name


def _extra(rng: Random, folder: Path) -> str:
    name = rng.choice(_EXTRA)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if rng.random() < 0.5:
        places.replace(rng, path)
    else:
        path.write_bytes(rng.choice([b"", b"{}", b"[]", b"\xff" * 99, b"{% for %}", b"null"]))
    return name


def _json(rng: Random, path: Path) -> None:
    """A JSON file that says something else, or is no JSON that a program expects."""
    value = json.loads(path.read_text())
    kind = rng.choice(["tree"] * 6 + ["odd", "deep", "twice", "wide"])
    if kind == "tree":
        for _ in range(rng.randint(1, 3)):
            value = mutate(rng, value)
        text = json.dumps(value)
    elif kind == "deep":
        text = json.dumps(value)[:-1] + f', "deep": {deep(levels=rng.choice([500, 200_000]))}}}'
    elif kind == "twice":
        text = json.dumps(value)[:-1] + f', "model_type": "gpt2"{json.dumps(value)[1:]}'
    elif kind == "wide":
        text = json.dumps({**value, "more": ["x" * 100] * 20_000})
    else:
        text = json.dumps(rng.choice(ODD))
    path.write_text(text)


def _header(rng: Random, path: Path) -> None:
    """A safetensors file whose header says something else."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + length], raw[8 + length :]
    kind = rng.choice(["tree"] * 5 + ["length", "bytes", "values", "deep"])
    if kind == "length":
        wrong = rng.choice([0, 1, length - 1, length + 1, 2 * length, 1 << 40, (1 << 64) - 1])
        path.write_bytes(wrong.to_bytes(8, "little") + header + body)
        return
    if kind == "values":
        path.write_bytes(raw[: 8 + length] + b"\xff" * len(body))
        return
    if kind == "bytes":
        header = garble(rng, header)
    elif kind == "deep":
        header = header[:-1] + b', "x": ' + deep().encode() + b"}"
    else:
        header = json.dumps(mutate(rng, json.loads(header))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def text(rng: Random, path: Path) -> None:
    """A text that is none, or an odd one."""
    raw = path.read_bytes()
    odd = (
        *(b"", b"\n" * 5000, b" " * 5000, b"\0" * 5000, b"\xff" * 5000, b"\xed\xa0\x80 x" * 50),
        *(b"\xef\xbb\xbf" + raw, raw.decode().encode("utf-16"), raw.replace(b" ", b"\r"), b"a"),
        *(b"<|endoftext|>" * 300, raw.replace(b" ", b"<|endoftext|>"), b"\xf0\x9f\x99\x82" * 500),
        *(raw[:3], "\u0301".encode() * 2000, b"a" * 200_000, b"\x1b[31m" + raw, raw * 20),
    )
    path.write_bytes(rng.choice(odd))


def task(rng: Random, path: Path) -> None:
    """A file of items of which some are broken."""
    row: Any = TASKS[path.name]
    lines = [json.dumps(row).encode()] * 3
    kind = rng.choice(["row", "row", "row", "bytes", "lines"])
    if kind == "row":
        lines[rng.randrange(3)] = json.dumps(mutate(rng, row)).encode()
    elif kind == "lines":
        lines[rng.randrange(3)] = rng.choice(_LINES)
    whole = b"\n".join(lines) + b"\n"
    path.write_bytes(garble(rng, whole) if kind == "bytes" else whole)


_LINES = (
    *(
        b"",
        b"null",
        b"[]",
        b"5",
        b'"x"',
        b"{}",
        b"{",
        b"}",
        b"nan",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf{}",
    ),
    *(
        b'{"query": "x", "choices": [], "gold": 0}',
        b'{"query": "", "choices": ["", ""], "gold": 1}',
    ),
    *(b'{"query": "x", "choices": ["a", "b"], "gold": 2}', deep().encode(), b"9" * 5000, b"1e999"),
    *(b'{"query": "x", "choices": ["a", "b"], "gold": -1}', b'{"query": "x", "query": "y"}'),
    *(b'{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}', b'{"context": "x", "answer": []}'),
    *(b'{"context": "x", "continuation": ""}', b'{"query": "x", "choices": "ab", "gold": "0"}'),
    b'{"query": "' + b"long " * 100_000 + b'", "choices": ["a", "b"], "gold": 0}',
    b'{"context": "x", "answer": ' + b"9" * 5000 + b"}",
)


def jsonl(rng: Random, path: Path) -> None:
    """Calibration rows, odd ones among them."""
    rows: list[Callable[[], bytes]] = [
        lambda: json.dumps({"text": rng.choice(ODD)}).encode(),
        lambda: json.dumps({"messages": rng.choice(ODD)}).encode(),
        lambda: json.dumps({"messages": [{"role": rng.choice(ODD), "content": "x"}]}).encode(),
        lambda: rng.choice(_LINES),
        lambda: json.dumps({"text": "once upon a time " * 20}).encode(),
    ]
    lines = [rng.choice(rows)() for _ in range(rng.randint(1, 5))]
    path.write_bytes(os.linesep.encode().join([*lines, b""]))
