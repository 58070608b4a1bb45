"""The tables of benchmarks/export/README.md, from the stored results.

python -m benchmarks.export.table
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.matrix.table import written
from benchmarks.processes import RESULTS

DOCUMENT = Path(__file__).with_name("README.md")
MARKS = "<!-- results: python -m benchmarks.export.table -->", "<!-- end of results -->"
MODELS = ("tale-6m", "400m")
# How the folders of genai_speed are made.
SIDES = {
    "builder": "the builder, blocks of 32",
    "ours": "ours, rounded, blocks of 32",
    "gptq": "ours, GPTQ, blocks of 32",
    "awq-gptq": "ours, AWQ and GPTQ, blocks of 32",
    "g128": "ours, GPTQ, blocks of 128",
}
RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")
Result = Mapping[str, Any]


def document(text: str) -> str:
    """The text with the tables of today's results between the marks."""
    return written(text, "\n".join(_lines()).strip(), MARKS)


def _lines() -> Iterator[str]:
    for model in MODELS:
        yield from _speed(_stored(f"export_genai_{model}"))
    yield from _quality(_stored("export_genai_tale-6m"))
    yield from _cost([_stored(f"export_genai_{model}") for model in MODELS])
    yield from _memory(_stored("export_memory"))
    yield from _beside(_stored("export_memory_builder"))


def _stored(name: str) -> Result:
    found: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _speed(result: Result) -> Iterator[str]:
    prompt, tokens = result["prompt"], result["tokens"]
    yield f"### {result['model']}: tokens a second ({result['threads']} threads, {result['date']})"
    yield ""
    yield _row("", f"prompt of {prompt}", f"{tokens} tokens after it", "bytes")
    yield _row(*["---"] * 4)
    speed, sizes = result["speed"], result["bytes_over_the_builders"]
    for name in (x for x in SIDES if x in speed):
        label = SIDES[name] if result["model"] == "tale-6m" else _rounded(SIDES[name])
        cells = (_rate(speed, name, rate) for rate in RATES)
        yield _row(label, *cells, f"{sizes[name]:.4g}×")
    yield ""


def _rounded(label: str) -> str:
    """Random weights are not worth a calibration."""
    return label.replace("GPTQ", "rounded")


def _rate(speed: Result, name: str, rate: str) -> str:
    value = f"{speed[name][rate]:.5g}"
    if name == "builder":
        return value
    ratios = speed["ratios"][name]
    low, high = ratios[f"{rate}_range"]
    return f"{value} ({ratios[rate]:.3f}×; {low:.3f} to {high:.3f})"


def _quality(result: Result) -> Iterator[str]:
    quality, sizes = result["quality"], result["bytes_over_the_builders"]
    yield f"### What 4 bits cost ({result['model']}, {quality['tokens']} tokens of tales)"
    yield ""
    yield _row("", "KL divergence, nats a token", "bytes")
    yield _row(*["---"] * 3)
    for name, label in SIDES.items():
        yield _row(label, f"{quality['kl_nats_a_token'][name]:.4f}", f"{sizes[name]:.4g}×")
    yield ""


def _cost(results: list[Result]) -> Iterator[str]:
    yield "### Making the 4-bit folder, from the dense source"
    yield ""
    yield _row("model", "what", "wall", "processor", "peak memory")
    yield _row(*["---"] * 5)
    labels = {"quantize": "ours: rounding", "export": "ours: export", "build": "the builder"}
    for result in results:
        for name in ("ours", "builder"):
            steps = result["cost"][name]
            for step in (x for x in labels if x in steps):
                cost = steps[step]
                wall, cpu = f"{cost['wall_s']:.1f} s", f"{cost['cpu_s']:.1f} s"
                yield _row(result["model"], labels[step], wall, cpu, f"{cost['peak_rss_mb']} MB")
    yield ""


def _memory(result: Result) -> Iterator[str]:
    (blocks,) = (name for name in result if name.endswith(" blocks"))
    found = result[blocks]
    yield f"### A checkpoint of the 7B shape, {blocks} ({result['date']})"
    yield ""
    yield _row("target", "source", "read", "written", "peak memory", "wall")
    yield _row(*["---"] * 6)
    for source in ("dense", "int4"):
        for target, cost in found[source].items():
            yield _row(target, source, *_bytes(cost), _peak(cost), f"{cost['wall_s']:.0f} s")
    yield ""


def _beside(result: Result) -> Iterator[str]:
    yield f"### The same widths beside the builder, in 4 bits ({result['date']})"
    yield ""
    yield _row("blocks", "what", "peak memory", "wall")
    yield _row(*["---"] * 4)
    for blocks in (name for name in result if name.endswith(" blocks")):
        found = result[blocks]
        steps = {
            "ours: rounding": found["rounding"],
            "ours: export": found["int4"]["onnx-genai"],
            "the builder": found["builder"],
        }
        for label, cost in steps.items():
            yield _row(blocks.split()[0], label, _peak(cost), f"{cost['wall_s']:.1f} s")
    yield ""


def _bytes(cost: Result) -> tuple[str, str]:
    return f"{cost['source_bytes'] / 1e9:.2f} GB", f"{cost['result_bytes'] / 1e9:.2f} GB"


def _peak(cost: Result) -> str:
    return f"{cost['peak_rss_bytes'] / 1e9:.2f} GB"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
