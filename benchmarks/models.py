"""Checkpoints of random weights in the shapes that the benchmarks ask for.

    python -m benchmarks.models s8-mha FOLDER
    python -m benchmarks.models llama-7b FOLDER [--blocks 1]

One tensor is in memory at a time, so the 7B shape (13.5 GB on disk) needs no more than 300 MB. With
a tokenizer (byte-level BPE trained on ../shared/text) real text can be put through.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.processes import SHARED
from compress.checkpoint.shards.layout import Entry, plan_shards
from compress.checkpoint.shards.writer import ShardWriter

TEXTS = ("calibration/*.utf8", "novels/*.txt", "tinystories/tinystories_train.txt")
END = "<|endoftext|>"
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with multi-head attention, bf16, its head not tied to the embeddings."""

    hidden: int
    blocks: int
    heads: int
    ffn: int
    vocab: int
    context: int


SHAPES = {
    "s8-mha": Shape(hidden=512, blocks=8, heads=8, ffn=1408, vocab=32000, context=2048),
    "400m": Shape(hidden=1024, blocks=24, heads=16, ffn=3072, vocab=32000, context=2048),
    "llama-7b": Shape(hidden=4096, blocks=32, heads=32, ffn=11008, vocab=32000, context=4096),
}


def make(folder: Path, shape: Shape, seed: int = 0, *, tokenizer: bool = True) -> None:
    """Write config, weights (in shards) and tokenizer of a random checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = plan_shards(entries(shape), SHARD_BYTES)
    writer = ShardWriter.create(folder, layout)
    for position, (name, _, size) in enumerate(entries(shape)):
        writer.write(name, random_tensor(size, seed * 100_003 + position))
    writer.finish()
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1))
    if tokenizer:
        write_tokenizer(folder, shape)


def entries(shape: Shape) -> Iterator[Entry]:
    """Names, dtypes and shapes of all tensors."""
    h, f = shape.hidden, shape.ffn
    yield "model.embed_tokens.weight", "BF16", (shape.vocab, h)
    for block in range(shape.blocks):
        prefix = f"model.layers.{block}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", "BF16", (h, h)
        for name, size in (("gate_proj", (f, h)), ("up_proj", (f, h)), ("down_proj", (h, f))):
            yield f"{prefix}mlp.{name}.weight", "BF16", size
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", "BF16", (h,)
    yield "model.norm.weight", "BF16", (h,)
    yield "lm_head.weight", "BF16", (shape.vocab, h)


def random_tensor(size: tuple[int, ...], seed: int) -> torch.Tensor:
    """Ones for a norm, else values of variance 1 / columns, which keep activations near 1."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty(size, dtype=torch.bfloat16)
    return out.normal_(0.0, 1.0 / math.sqrt(size[1]), generator=generator)


def config(shape: Shape) -> dict[str, object]:
    """config.json as transformers writes it for a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.hidden // shape.heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def write_tokenizer(folder: Path, shape: Shape) -> None:
    """Train a byte-level BPE of the vocabulary's size and store it beside the weights."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(text_files(), vocab_size=shape.vocab, special_tokens=[END])
    found = tokenizer.get_vocab_size()
    if found != shape.vocab:
        raise SystemExit(f"the text gives a vocabulary of {found}, {shape.vocab} wanted")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": shape.context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def text_files() -> list[str]:
    """Real text to train on, in a fixed order."""
    found = [path for pattern in TEXTS for path in sorted((SHARED / "text").glob(pattern))]
    if not found:
        raise SystemExit(f"no text under {SHARED / 'text'} to train a tokenizer on")
    return [str(path) for path in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    blocks = options.blocks or shape.blocks
    make(options.folder, replace(shape, blocks=blocks))


if __name__ == "__main__":
    main()
