"""Calibration rows as compress-model would make them, in a file that a peer can read.

    python -m benchmarks.peers.rows MODEL TEXT OUT --samples 128 --length 256 [--seed 0]

Prints the SHA-256 of the rows, which the report of a run over the same text carries too.
"""

import argparse
from pathlib import Path

from safetensors.torch import save_file

from compress.checkpoint import Checkpoint
from compress.text.tokenizer import load_tokenizer
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.dataset import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "text", "out"):
        parser.add_argument(name)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = CalibrationConfig(
        sources=(SourceConfig("text", options.text),),
        samples=options.samples,
        length=options.length,
        seed=options.seed,
    )
    vocab = Checkpoint.open(options.model).config["vocab_size"]
    tokens = build(config, load_tokenizer(Path(options.model)), generate=None, vocab=vocab)
    save_file({"ids": tokens.ids}, options.out)
    print(tokens.summary.sha256)


if __name__ == "__main__":
    main()
