"""The tables of benchmarks/export/README.md, from the stored results.

python -m benchmarks.export.table
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.export.generate import RATES
from benchmarks.matrix.table import row, written
from benchmarks.processes import stored_result

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
Result = Mapping[str, Any]


def document(text: str) -> str:
    """The text with the tables of today's results between the marks."""
    return written(text, "\n".join(_lines()).strip(), MARKS)


def _lines() -> Iterator[str]:
    for model in MODELS:
        yield from _speed(stored_result(f"export_genai_{model}"))
    yield from _quality(stored_result("export_genai_tale-6m"))
    yield from _cost([stored_result(f"export_genai_{model}") for model in MODELS])
    yield from _memory(stored_result("export_memory"))
    yield from _beside(stored_result("export_memory_builder"))


def _speed(result: Result) -> Iterator[str]:
    prompt, tokens = result["prompt"], result["tokens"]
    yield f"### {result['model']}: tokens a second ({result['threads']} threads, {result['date']})"
    yield ""
    yield row("", f"prompt of {prompt}", f"{tokens} tokens after it", "bytes")
    yield row(*["---"] * 4)
    speed, sizes = result["speed"], result["bytes_over_the_builders"]
    for name in (x for x in SIDES if x in speed):
        label = SIDES[name] if result["model"] == "tale-6m" else _rounded(SIDES[name])
        cells = (_rate(speed, name, rate) for rate in RATES)
        yield row(label, *cells, f"{sizes[name]:.4g}×")
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
    yield row("", "KL divergence, nats a token", "bytes")
    yield row(*["---"] * 3)
    for name, label in SIDES.items():
        yield row(label, f"{quality['kl_nats_a_token'][name]:.4f}", f"{sizes[name]:.4g}×")
    yield ""


def _cost(results: list[Result]) -> Iterator[str]:
    yield "### Making the 4-bit folder, from the dense source"
    yield ""
    yield row("model", "what", "wall", "processor", "peak memory")
    yield row(*["---"] * 5)
    labels = {"quantize": "ours: rounding", "export": "ours: export", "build": "the builder"}
    for result in results:
        for name in ("ours", "builder"):
            steps = result["cost"][name]
            for step in (x for x in labels if x in steps):
                cost = steps[step]
                wall, cpu = f"{cost['wall_s']:.1f} s", f"{cost['cpu_s']:.1f} s"
                yield row(result["model"], labels[step], wall, cpu, f"{cost['peak_rss_mb']} MB")
    yield ""


def _memory(result: Result) -> Iterator[str]:
    (blocks,) = (name for name in result if name.endswith(" blocks"))
    found = result[blocks]
    yield f"### A checkpoint of the 7B shape, {blocks} ({result['date']})"
    yield ""
    yield row("target", "source", "read", "written", "peak memory", "wall")
    yield row(*["---"] * 6)
    for source in ("dense", "int4"):
        for target, cost in found[source].items():
            yield row(target, source, *_bytes(cost), _peak(cost), f"{cost['wall_s']:.0f} s")
    yield ""


def _beside(result: Result) -> Iterator[str]:
    yield f"### The same widths beside the builder, in 4 bits ({result['date']})"
    yield ""
    yield row("blocks", "what", "peak memory", "wall")
    yield row(*["---"] * 4)
    for blocks in (name for name in result if name.endswith(" blocks")):
        found = result[blocks]
        steps = {
            "ours: rounding": found["rounding"],
            "ours: export": found["int4"]["onnx-genai"],
            "the builder": found["builder"],
        }
        for label, cost in steps.items():
            yield row(blocks.split()[0], label, _peak(cost), f"{cost['wall_s']:.1f} s")
    yield ""


def _bytes(cost: Result) -> tuple[str, str]:
    return f"{cost['source_bytes'] / 1e9:.2f} GB", f"{cost['result_bytes'] / 1e9:.2f} GB"


def _peak(cost: Result) -> str:
    return f"{cost['peak_rss_bytes'] / 1e9:.2f} GB"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
