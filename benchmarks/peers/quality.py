"""Quality of our GPTQ and llm-compressor's over calibration seeds, on tale-6m.

    python -m benchmarks.peers.quality [--seeds 5] [--groups 64 128] [--work FOLDER]

Each seed draws other rows of real text; both tools get the same ones. Both results are measured by
our evaluation against the bf16 source: the first 120 documents of tinystories_test, every window
512 tokens with the model's BOS first, fp32 arithmetic.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers import cases
from benchmarks.peers.cases import CASES, Case
from benchmarks.peers.side_by_side import versions
from benchmarks.processes import SHARED, setting, write_result

TEXT = SHARED / "text" / "tinystories" / "tinystories_test.txt"
DOCUMENTS = 120
MEASURES = ("perplexity", "kl", "top1_agreement")
Quality = dict[str, float]


def measure(checkpoint: Path, source: Path) -> Quality:
    """Perplexity, KL(source || result) in nats a token, and agreement of the first choice."""
    from compress.verbs import EvaluationOptions, evaluate_checkpoint

    asked = EvaluationOptions(texts=[str(TEXT)], max_documents=DOCUMENTS)
    report = evaluate_checkpoint(checkpoint, asked, against=source)
    assert report.quality is not None
    (text,) = report.quality.texts
    found = {
        "perplexity": text.ppl_result,
        "kl": text.kl,
        "top1_agreement": text.top1_agreement,
        "perplexity_source": text.ppl_source,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def compare(case: Case, seeds: int, work: Path) -> dict[str, Any]:
    """Both tools over all seeds, with means, their standard errors and the verdict."""
    found: dict[str, list[Quality]] = {"compress-model": [], "llm-compressor": []}
    for seed in range(seeds):
        inputs = cases.prepare(case, work, seed)
        for name, tool in (("compress-model", cases.run_ours), ("llm-compressor", cases.run_peer)):
            quality = measure(tool(inputs).out, inputs.model)
            print(f"{case.name}, seed {seed}: {name} {quality['perplexity']:.4f}", file=sys.stderr)
            found[name].append(quality)
    ours, peer = found.values()
    return {
        **cases.describe(case),
        "perplexity_source": ours[0]["perplexity_source"],
        "mean": {name: summary(runs) for name, runs in found.items()},
        "verdict": verdict(ours, peer),
        "by_seed": {
            name: [{key: round(run[key], 5) for key in MEASURES} for run in runs]
            for name, runs in found.items()
        },
    }


def summary(runs: Sequence[Quality]) -> dict[str, dict[str, float]]:
    """Mean and its standard error over the seeds."""
    return {
        key: {
            "mean": round(statistics.fmean(run[key] for run in runs), 5),
            "standard_error": round(standard_error([run[key] for run in runs]), 5),
        }
        for key in MEASURES
    }


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


def verdict(ours: Sequence[Quality], peer: Sequence[Quality]) -> dict[str, Any]:
    """Our mean perplexity is to be at most the peer's plus its standard error."""
    theirs = [run["perplexity"] for run in peer]
    bound = statistics.fmean(theirs) + standard_error(theirs)
    mean = statistics.fmean(run["perplexity"] for run in ours)
    differences = [a["perplexity"] - b["perplexity"] for a, b in zip(ours, peer, strict=True)]
    return {
        "ours": round(mean, 5),
        "at_most": round(bound, 5),
        "met": mean <= bound,
        "paired_difference": round(statistics.fmean(differences), 5),
        "paired_standard_error": round(standard_error(differences), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--work", type=Path, help="folder for the results (kept)")
    options = parser.parse_args()
    base = next(case for case in CASES if case.model == "tale-6m")
    text = f"first {DOCUMENTS} documents of {TEXT.name}"
    head = {**setting("benchmarks.peers.quality"), "versions": versions(), "text": text}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        for group in options.groups:
            case = replace(base, name=f"tale-6m-g{group}", group=group)
            results.append(compare(case, options.seeds, work))
            # After each group: the ten runs of one take minutes.
            write_result("peers_llmcompressor_quality", {**head, "cases": results})


if __name__ == "__main__":
    main()
