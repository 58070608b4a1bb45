"""What storing keys and values in fewer bits costs: KL through the engine, on tale-6m.

    python -m benchmarks.runtime.kv_quality [--tokens 8192]

Texts are scored by the engine, once for each dtype of the cache; the logits of every position are
compared with those of an fp32 cache. `tales` are whole documents, <|endoftext|> first, cut at the
context's 512 tokens; `wikitext` is cut into windows of 512, so that half of its positions lie
behind 256, which few tales reach. The result goes to benchmarks/results.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.processes import REPO, SHARED, write_result
from benchmarks.runtime.setting import setting
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.batch import FlatBatch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.sequences.request import Request

MODEL = REPO / "examples" / "tale-6m"
TALES = SHARED / "text" / "tinystories" / "tinystories_valid.txt"
WIKITEXT = SHARED / "text" / "wikitext-2"
END = "<|endoftext|>"
LENGTH, BLOCK = 512, 16
DTYPES = (torch.bfloat16, torch.float16, torch.int8)


class Recording:
    """A decoder whose logits are kept: of a text that is scored whole, those of every position."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.device, self.multiple = decoder, decoder.device, decoder.multiple
        self.kept: list[Tensor] = []
        self._count = 0

    def forward(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        self._count = batch.count
        return self.decoder.forward(batch, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        found = self.decoder.logits(hidden)
        self.kept.append(found[: self._count].clone())
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    decoder = Decoder.load(open_weights(Checkpoint.open(MODEL)))
    result = {
        **setting("benchmarks.runtime.kv_quality"),
        "model": "tale-6m, fp32",
        "bytes_per_token": {
            name(dtype): _cache(decoder, dtype).bytes_per_token
            for dtype in (torch.float32, *DTYPES)
        },
        "tales": compare(decoder, tales(options.tokens)),
        "wikitext": compare(decoder, windows(options.tokens)),
    }
    write_result("runtime_kv_quality", result)


def tales(tokens: int) -> list[list[int]]:
    """Whole documents, until they have so many tokens."""
    tokenizer, found = Tokenizer.from_file(str(MODEL / "tokenizer.json")), []
    for text in TALES.read_text().split(END):
        if sum(map(len, found)) < tokens and text.strip():
            found.append(tokenizer.encode(END + text.strip()).ids[:LENGTH])
    return found


def windows(tokens: int) -> list[list[int]]:
    file = sorted(WIKITEXT.glob("*test*"))[0]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode(file.read_text()[: 20 * tokens]).ids
    return [ids[at : at + LENGTH] for at in range(0, tokens, LENGTH)]


def compare(decoder: Decoder, texts: Sequence[list[int]]) -> dict[str, Any]:
    exact = [logprobs(decoder, text, torch.float32) for text in texts]
    losses = {name(dtype): loss(decoder, texts, exact, dtype) for dtype in DTYPES}
    return {"texts": len(texts), "tokens": sum(map(len, texts)), **losses}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def loss(
    decoder: Decoder, texts: Sequence[list[int]], exact: Sequence[Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    """Mean, median and largest KL (nats), and how often the most likely token is the same."""
    kl, same = [], []
    for text, want in zip(texts, exact, strict=True):
        found = logprobs(decoder, text, dtype)
        kl.append((want.exp() * (want - found)).sum(-1))
        same.append(want.argmax(-1) == found.argmax(-1))
    everywhere = torch.cat(kl)
    return {
        "kl_mean": float(f"{everywhere.mean():.4g}"),
        "kl_median": float(f"{everywhere.median():.4g}"),
        "kl_max": float(f"{everywhere.max():.4g}"),
        "top1_agreement": round(float(torch.cat(same).double().mean()), 5),
    }


def logprobs(decoder: Decoder, text: list[int], dtype: torch.dtype) -> Tensor:
    """fp64 [tokens - 1, vocabulary], from a cache of that dtype."""
    recording = Recording(decoder)
    facts = ModelFacts(context=LENGTH, vocabulary=decoder.spec.vocab)
    engine = Engine(LocalRunner(recording, _cache(decoder, dtype)), facts)
    (result,) = engine.generate([Request("text", tuple(text), None, score_from=1)])
    if result.error is not None:
        raise SystemExit(result.error)
    return torch.cat(recording.kept).double().log_softmax(-1)


def _cache(decoder: Decoder, dtype: torch.dtype) -> KVCache:
    blocks = [2 + LENGTH // BLOCK] * len(decoder.how.windows)
    return KVCache(decoder.how, blocks, BLOCK, dtype=dtype, device=decoder.device)


if __name__ == "__main__":
    main()
