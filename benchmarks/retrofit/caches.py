"""What retrofits and 8-bit caches cost together: perplexity and cache bytes through the engine.

    python -m benchmarks.retrofit.caches [--points gqa "mla/mla whole" ...] [--work FOLDER]

Looks at checkpoints that benchmarks.retrofit.run has left in the work folder (the first draw of
each) and at the source, and stores what it finds in benchmarks/results/retrofit_caches.json; what
is stored is not looked at again. benchmarks.retrofit.pareto makes the page of it.

Texts are scored by the engine in fp32, from a cache in bf16, int8 (a scale for each token and head)
and fp8 (E4M3 with one scale a layer for keys and one for values, or one for a latent and its key,
from the largest numbers of training stories, as recipes have `kv_cache: fp8`). The engine stores no
fp8: its numbers are rounded, kept in fp32, and counted as one byte each. Bytes of the others are
those of the blocks that its allocator gives out at once, at most, for one text that is read 16
tokens at a time; layers with a window give back what they have left behind.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.processes import REPO, RESULTS, SHARED, package_versions, setting
from benchmarks.quality.measure import STORIES
from benchmarks.quality.results import locked
from benchmarks.quality.tools import OUR_PACKAGES
from benchmarks.retrofit.points import POINTS
from benchmarks.structure.points import CALIBRATION, SOURCE
from benchmarks.structure.run import folder_of, tell, wanted
from benchmarks.structure.stored import load, write
from compress.checkpoint import Checkpoint
from compress.evaluation.texts import read_windows
from compress.evaluation.windows import TokenWindows
from compress.formats import open_weights
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request
from compress.text.tokenizer import load_tokenizer

FILE, ORIGIN = "retrofit_caches.json", "source"
NOVEL = SHARED / "text" / "novels" / "Stevenson_Treasure_1883.txt"
CONTEXT, BLOCK, AT_ONCE = 512, 16, 8
SANE = 320  # positions that tale-6m was trained to read; behind them it loses its way
LENGTHS = (256, CONTEXT)  # of texts whose blocks are counted
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


@dataclass(frozen=True, slots=True, eq=False)
class RoundedCache:
    """A cache that rounds what is written to fp8, by the largest number of each part of each layer;
    without any it looks for them."""

    kept: KVCache
    largest: dict[tuple[int, int], float] = field(default_factory=dict)
    looks: bool = True

    @property
    def groups(self) -> Any:
        return self.kept.groups

    @property
    def block_size(self) -> int:
        return self.kept.block_size

    @property
    def dtype(self) -> torch.dtype:
        return self.kept.dtype

    def write(self, layer: int, parts: Sequence[Tensor], slots: Tensor) -> None:
        if self.looks:
            for i, part in enumerate(parts):
                before = self.largest.get((layer, i), 0.0)
                self.largest[layer, i] = max(before, float(part.abs().max()))
        else:
            parts = [_rounded(part, self.largest[layer, i]) for i, part in enumerate(parts)]
        self.kept.write(layer, parts, slots)

    def keys_and_values(self, layer: int) -> Any:
        return self.kept.keys_and_values(layer)

    def copy(self, source: int, target: int, group: int) -> None:
        self.kept.copy(source, target, group)


def _rounded(part: Tensor, largest: float) -> Tensor:
    scale = largest / LARGEST
    return (part / scale).clamp(-LARGEST, LARGEST).to(E4M3).to(part.dtype) * scale


def look_at(folder: Path, texts: dict[str, TokenWindows]) -> dict[str, Any]:
    """All that is stored of a checkpoint."""
    began = time.process_time()
    decoder = Decoder.load(open_weights(Checkpoint.open(folder)))
    finding = RoundedCache(_cache(decoder, torch.float32))
    _scored(decoder, finding, texts["calibration"])
    caches = {
        "bf16": lambda: _cache(decoder, torch.bfloat16),
        "int8": lambda: _cache(decoder, torch.int8),
        "fp8": lambda: RoundedCache(_cache(decoder, torch.float32), finding.largest, looks=False),
    }
    found: dict[str, Any] = {"bytes": _bytes(decoder)}
    for name in ("stories", "treasure"):
        found[name] = {kind: _of(decoder, make(), texts[name]) for kind, make in caches.items()}
    found["cpu_s"] = round(time.process_time() - began, 1)
    return found


def _of(decoder: Decoder, cache: Any, windows: TokenWindows) -> dict[str, float]:
    """Perplexity; of a text at full context also of the positions before and behind SANE."""
    places = _scored(decoder, cache, windows)
    found = {"perplexity": _perplexity([x for _, x in places])}
    behind = [x for place, x in places if place >= SANE]
    if len(behind) > len(places) // 4:
        found["before_320"] = _perplexity([x for place, x in places if place < SANE])
        found["behind_320"] = _perplexity(behind)
    return found


def _perplexity(logprobs: Sequence[float]) -> float:
    return round(math.exp(-math.fsum(logprobs) / len(logprobs)), 4)


def _scored(decoder: Decoder, cache: Any, windows: TokenWindows) -> list[tuple[int, float]]:
    """Position and log-probability of every scored token."""
    engine = Engine(LocalRunner(decoder, cache), _facts(decoder), _limits(), reuse=False)
    requests, firsts = [], windows.first.tolist()
    for i, (ids, count) in enumerate(zip(windows.ids, windows.lengths.tolist(), strict=True)):
        row = tuple(ids[:count].tolist())
        requests.append(Request(str(i), row, score_from=firsts[i]))
    found = []
    for result, first in zip(engine.generate(requests), firsts, strict=True):
        if result.error is not None:
            raise RuntimeError(result.error)
        found += [(first + i, each.logprob) for i, each in enumerate(result.logprobs)]
    return found


def _bytes(decoder: Decoder) -> dict[str, Any]:
    """Of one token, and of the blocks of one text, for each length."""
    found: dict[str, Any] = {}
    for kind, dtype in (("bf16", torch.bfloat16), ("int8", torch.int8)):
        cache = _cache(decoder, dtype)
        held = {str(n): _held(decoder, cache, n) for n in LENGTHS}
        found[kind] = {"token": cache.bytes_per_token, **held}
    found["fp8"] = {name: count // 2 for name, count in found["bf16"].items()}
    return found


def _held(decoder: Decoder, cache: KVCache, length: int) -> int:
    limits = Limits(long_prefill=BLOCK)
    engine = Engine(LocalRunner(decoder, cache), _facts(decoder), limits, reuse=False)
    engine.generate([Request("0", tuple(range(1, length + 1)), score_from=length - 1)])
    return cache.nbytes(engine.stats.held)


def _facts(decoder: Decoder) -> ModelFacts:
    return ModelFacts(context=CONTEXT, vocabulary=decoder.spec.vocab)


def _limits() -> Limits:
    return Limits(sequences=AT_ONCE)


def _cache(decoder: Decoder, dtype: torch.dtype) -> KVCache:
    blocks = [2 + (AT_ONCE + 1) * CONTEXT // BLOCK] * len(decoder.how.windows)
    return KVCache(decoder.how, blocks, BLOCK, dtype=dtype, device=decoder.device)


def texts(tokens: int) -> dict[str, TokenWindows]:
    """Windows of the source's context, BOS first. tokens: of the novel."""
    asked = {
        "stories": STORIES,
        "treasure": TextConfig("treasure", path=str(NOVEL), max_tokens=tokens),
        "calibration": TextConfig("train", path=str(CALIBRATION), max_documents=16),
    }
    config, tokenizer = EvaluationConfig(texts=tuple(asked.values())), load_tokenizer(SOURCE)
    return {
        name: read_windows(text, config, tokenizer, CONTEXT, None) for name, text in asked.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", nargs="+", default=[], metavar="GROUP[/NAME]")
    parser.add_argument("--work", type=Path, default=REPO / "out" / "structure")
    parser.add_argument("--tokens", type=int, default=4096, help="of the novel")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {ORIGIN: SOURCE}
    for point in POINTS:
        folder = folder_of(point, 0, options.work)
        if wanted(point, options.points) and (folder / "cost.json").is_file():
            folders[point.label] = folder / "result"
    given = texts(options.tokens)
    versions = package_versions(str(REPO / ".venv/bin/python"), OUR_PACKAGES)
    for label, folder in folders.items():
        if label in load(FILE):
            continue
        with torch.inference_mode():
            found = {
                **setting("benchmarks.retrofit.caches"),
                "versions": versions,
                "tokens": {name: each.scored for name, each in given.items()},
                **look_at(folder, given),
            }
        with locked(RESULTS / FILE):
            write(FILE, {**load(FILE), label: found})
        ppl = {k: v["perplexity"] for k, v in found["stories"].items()}
        tell(f"{label}: stories {ppl}, {found['cpu_s']} s")


if __name__ == "__main__":
    main()
