"""Decoding behind 4,096 positions: a llama of 58M and its shape with a quarter of the cache.

    python -m benchmarks.retrofit.decode [--batch 8] [--steps 8] [--positions 4096]

hidden 512, 8 layers, 8 heads of 64, ffn 1376, vocabulary 32,000, random weights, fp32. The other
has a latent of 192 and a rotated key of 64 in place of 1,024 numbers a token and layer, as
`mla, kv_bytes: 0.25` would leave; its weights are random too, since a step's time does not depend
on what they are. Nor does it on the keys and values of the texts, so the cache is filled with
random numbers in place of reading prompts; every text has blocks of its own. A step is that of the
engine: a token for each of the texts, logits and all. Sides take turns, step by step. The result
goes to benchmarks/results/retrofit_decode.json, of other positions with their number behind.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from benchmarks.processes import busy_seconds, write_result
from benchmarks.runtime.setting import setting
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.batch import TextChunk, build_batch

POSITIONS, BLOCK = 4096, 16
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 192,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 8,
}
CONFIGS = {"source": LlamaConfig(**SIZES), "mla": DeepseekV3Config(**SIZES, **LATENT)}


class Side:
    """A decoder whose cache has the keys and values of a batch of texts."""

    def __init__(self, config: Any, folder: Path, batch: int, positions: int) -> None:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        self.decoder = Decoder.load(open_weights(Checkpoint.open(folder)))
        how, each = self.decoder.how, positions // BLOCK
        device = self.decoder.device
        self.cache = KVCache(how, [1 + batch * each], BLOCK, dtype=torch.float32, device=device)
        for parts in self.cache.states:
            for part in parts:
                part.normal_()
        at = positions - 1
        chunks = [
            TextChunk((7 + i,), at, at, (range(1 + i * each, 1 + (i + 1) * each),), positions)
            for i in range(batch)
        ]
        self.batch = build_batch(chunks, BLOCK, self.decoder.multiple)

    def step(self) -> tuple[float, float]:
        """Wall and processor seconds."""
        wall, busy = time.perf_counter(), time.process_time()
        hidden = self.decoder.forward(self.batch, self.cache)
        self.decoder.logits(hidden).argmax(-1)
        return time.perf_counter() - wall, time.process_time() - busy


def measured(sides: dict[str, Side], steps: int) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(steps + 1):
        for name, side in sides.items():
            seconds = side.step()
            if number:  # the first finds nothing in place
                found[name].append(seconds)
    yield from found.items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--positions", type=int, default=POSITIONS, help="whole blocks of 16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **setting("benchmarks.retrofit.decode"),
        "positions": options.positions,
        "batch": options.batch,
        "steps": options.steps,
    }
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        sides = {
            name: Side(config, Path(folder) / name, options.batch, options.positions)
            for name, config in CONFIGS.items()
        }
        began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        for name, seconds in measured(sides, options.steps):
            walls, cpus = zip(*seconds, strict=True)
            result[name] = {
                "parameters": open_weights(Checkpoint.open(Path(folder) / name)).checkpoint.params,
                "cache_bytes_per_token": sides[name].cache.bytes_per_token,
                "tokens_per_s": round(options.batch / statistics.median(walls), 2),
                "tokens_per_cpu_s": round(options.batch / statistics.median(cpus), 2),
                "best_tokens_per_cpu_s": round(options.batch / min(cpus), 2),
            }
        passed = time.perf_counter() - began
        others = (busy_seconds() - busy - (time.process_time() - own)) / (passed * 2)
        result["others"] = round(others, 3)
    rates = ("tokens_per_s", "tokens_per_cpu_s", "best_tokens_per_cpu_s")
    result["times"] = {x: round(result["mla"][x] / result["source"][x], 2) for x in rates}
    behind = "" if options.positions == POSITIONS else f"_{options.positions}"
    write_result(f"retrofit_decode{behind}", result)


if __name__ == "__main__":
    main()
