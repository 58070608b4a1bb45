"""What tests of GGUF files share: checkpoints on their way into one, and other tokenizers."""

import json
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.quant.scheme import QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.gguf.plan import GgufPlan, make_plan
from compress_exporters.gguf.write import FILE, write_file
from helpers import compressed_models, tiny_models


def source(folder: Path) -> Weights:
    return open_weights(Checkpoint.open(folder))


def tiny(folder: Path, family: str = "llama", **options: Any) -> Weights:
    """A dense checkpoint of random fp32 weights."""
    return source(tiny_models.make(family, folder, **{"dtype": "fp32", **options}))


def coded(
    folder: Path, scheme: QuantScheme, family: str = "llama", *, dtype: Any = "fp16", **how: Any
) -> Weights:
    """A quantized one; its scales are of `dtype`."""
    original = tiny_models.make(family, folder / "original", dtype=dtype)
    return source(compressed_models.write(original, folder / "coded", scheme, **how).folder)


def planned(checkpoint: Weights, **options: Any) -> GgufPlan:
    """Without a word all dense numbers in fp32, so that none is rounded."""
    return make_plan(checkpoint, Options(**{"dtype": "fp32", **options}))


def written(checkpoint: Weights, folder: Path, **options: Any) -> tuple[GgufPlan, Path]:
    plan = planned(checkpoint, **options)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(plan, folder / FILE, lambda *_: None)
    return plan, folder / FILE


def change(folder: Path, file: str, **values: Any) -> None:
    """Keys of a JSON file beside the weights, set anew."""
    path = folder / file
    stored = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(stored | values))


def sentencepiece(folder: Path, rows: int = tiny_models.VOCAB + 64) -> None:
    """tokenizer.json as transformers converts sentencepiece's BPE: bytes, letters, a few words."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{i:02X}>": 3 + i for i in range(256)}
    merges = [["h", "e"], ["t", "h"], ["t", "he"], ["th", "e"], ["▁", "the"]]
    for text in ("▁", "t", "h", "e", "d", "o", "g", *("".join(x) for x in merges)):
        vocab.setdefault(text, len(vocab))
    assert len(vocab) <= rows
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    front = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    template = [front, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    stored = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": x, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i, x in enumerate(("<unk>", "<s>", "</s>"))
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": special,
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
