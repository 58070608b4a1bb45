"""Quality of several results against one source, as `compress-model eval` measures it.

    python -m benchmarks.quality.measure OUT.json SOURCE RESULT [RESULT ...] [--wikitext]

Windows of the source's context with BOS first, fp32 arithmetic. The source goes through once.
The text is stories of TinyStories; or the first tokens of wikitext-2, which no model here has seen.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import SHARED
from benchmarks.quality.rows import DOCUMENTS, TEXT
from compress.checkpoint import Checkpoint
from compress.evaluation.text_quality import evaluate, source_final_states
from compress.evaluation.texts import read_windows
from compress.evaluation.workspace import Workspace
from compress.formats import Weights, open_weights
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.text.tokenizer import load_tokenizer

STORIES = TextConfig(TEXT.stem, path=str(TEXT), max_documents=DOCUMENTS)
WIKITEXT = TextConfig(
    "wikitext-2", path=str(SHARED / "text" / "wikitext-2" / "test.txt"), max_tokens=16384
)


def measure(
    source: Path, results: Sequence[Path], work: Workspace, text: TextConfig = STORIES
) -> Iterator[dict[str, float]]:
    """For each result: perplexity of it and of the source, KL(source || result) in nats a token,
    agreement of the first choice, bits a weight."""
    config = EvaluationConfig(texts=(text,))
    origin = open_weights(Checkpoint.open(source))
    windows = [
        read_windows(text, config, load_tokenizer(source), origin.spec.context, None)
        for text in config.texts
    ]
    with source_final_states(origin, windows, config, work) as states:
        for folder in results:
            result = open_weights(Checkpoint.open(folder))
            (found,) = evaluate(result, origin, windows, config, work, states)
            yield {**quality(found), "bits_per_weight": bits_per_weight(result)}


def quality(text: Any) -> dict[str, float]:
    return {
        "perplexity": text.ppl_result,
        "kl": text.kl,
        "top1_agreement": text.top1_agreement,
        "perplexity_source": text.ppl_source,
    }


def bits_per_weight(weights: Weights) -> float:
    """Of the linears in the decoder blocks, scales, zeros and calibrated outlier columns included,
    biases not."""
    linears = list(weights.spec.linears())
    names = {linear.name for linear in linears}
    stored = sum(
        info.nbytes
        for checkpoint in weights.checkpoints
        for name, info in checkpoint.tensors.items()
        if name.rpartition(".")[0] in names and not name.endswith(".bias")
    )
    return 8 * stored / sum(n * k for n, k in (x.shape for x in linears))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("out", "source"):
        parser.add_argument(name, type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--wikitext", action="store_true", help="in place of stories")
    options = parser.parse_args()
    text = WIKITEXT if options.wikitext else STORIES
    with tempfile.TemporaryDirectory() as folder:
        found = list(measure(options.source, options.results, Workspace(Path(folder)), text))
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
