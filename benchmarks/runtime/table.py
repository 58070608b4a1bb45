"""The tables of benchmarks/runtime/README.md, from the stored results.

python -m benchmarks.runtime.table
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.matrix.table import row, written
from benchmarks.processes import stored_result

DOCUMENT = Path(__file__).with_name("README.md")
MARKS = "<!-- results: python -m benchmarks.runtime.table -->", "<!-- end of results -->"
SIDES = {
    "engine": "ours",
    "static": "transformers, static batches of 8",
    "continuous": "transformers, continuous batching",
    "vllm": "vLLM",
}
# Models and dtypes, beside vLLM alone and, older, beside all sides.
SPEEDS = (
    *("tale-6m_fp32_vllm", "400m_fp32_vllm", "tale-6m_bf16_vllm", "400m_bf16_vllm"),
    *("tale-6m_fp32_vllm_2_threads", "400m_fp32_vllm_2_threads"),
    *("tale-6m_bf16_vllm_2_threads", "400m_bf16_vllm_2_threads"),
    *("tale-6m_fp32", "400m_fp32"),
)
Result = Mapping[str, Any]


def document(text: str) -> str:
    """The text with the tables of today's results between the marks."""
    return written(text, "\n".join(_lines()).strip(), MARKS)


def _lines() -> Iterator[str]:
    for name in SPEEDS:
        yield from _speed(stored_result(f"runtime_speed_{name}"))
    for threads, how in (("", "1 thread"), ("_2_threads", "2 threads")):
        for model in ("tale-6m", "400m"):
            result = stored_result(f"runtime_smaller_{model}_fp32{threads}")
            yield from _smaller(f"{model}, fp32, {how}", result)
    yield from _prefix([stored_result(f"runtime_prefix_{model}") for model in ("tale-6m", "400m")])
    yield from _waste(stored_result("runtime_kv_waste"))
    yield from _cache(stored_result("runtime_kv_quality"))
    for threads in ("", "_2_threads"):
        for model in ("_tale-6m", "_tale-6m_int4-rtn", "", "_int4-rtn"):
            yield from _roofline(stored_result(f"runtime_roofline{model}{threads}"))


def _speed(result: Result) -> Iterator[str]:
    yield f"### {result['model']}, {result['dtype']}: useful tokens a second ({_made(result)})"
    yield ""
    sides = [name for name in SIDES if name in result["cases"][0]]
    yield row(
        "requests", *(SIDES[name] for name in sides), "predicted", "TTFT p50, p99", "gap p50, p99"
    )
    yield row(*["---"] * (len(sides) + 4))
    for case in result["cases"]:
        own = case["engine"]
        cells = (_of(case, name) for name in sides)
        predicted = f"{case['predicted']['tokens_per_s']:.4g}"
        first = f"{own['ttft_p50_s']:.3g}, {own['ttft_p99_s']:.3g} s"
        gap = f"{1000 * own['inter_token_p50_s']:.3g}, {1000 * own['inter_token_p99_s']:.3g} ms"
        yield row(case["requests"], *cells, predicted, first, gap)
    yield ""


def _of(case: Result, name: str) -> str:
    rate = f"{case[name]['tokens_per_s']:.4g}"
    return rate if name == "engine" else f"{rate} ({case['ratios'][name]['tokens_per_s']:.2f}×)"


def _smaller(how: str, result: Result) -> Iterator[str]:
    """The recipes in the order of their gain with one text."""
    yield f"### Results of recipes beside their source ({how}): tokens a second, times"
    yield ""
    batches = list(next(iter(result.values()))["ratios"])
    counts = [f"{count} text{'s' * (count != '1')}" for count in batches]
    yield row("recipe", "math", *counts, f"prompts of {', '.join(batches)}")
    yield row(*["---"] * (len(batches) + 3))
    for name, case in sorted(result.items(), key=lambda x: -x[1]["ratios"]["1"]["decode"]):
        ratios = [case["ratios"][count] for count in batches]
        decoded = [f"{x['decode']:.2f}" for x in ratios]
        yield row(name, case["math"], *decoded, ", ".join(f"{x['prefill']:.2f}" for x in ratios))
    yield ""


def _prefix(results: list[Result]) -> Iterator[str]:
    yield "### The first token behind a shared beginning"
    yield ""
    yield row("model", "shared tokens", "not cached", "cached", "ratio", "predicted ratio")
    yield row(*["---"] * 6)
    for result in results:
        times = (f"{1000 * result[f'ttft_{name}_s']:.4g} ms" for name in ("cold", "cached"))
        ratios = (f"{part['ratio']:.1f}×" for part in (result, result["predicted"]))
        yield row(result["model"], result["shared_tokens"], *times, *ratios)
    yield ""


def _waste(result: Result) -> Iterator[str]:
    yield f"### Room in the cache that is held and not filled ({result['requests']} requests)"
    yield ""
    yield row("block", "mean length", "waste", "bound")
    yield row(*["---"] * 4)
    for case in result["blocks"]:
        shares = (f"{100 * case[name]:.2f} %" for name in ("waste", "bound"))
        yield row(case["block"], case["mean_length"], *shares)
    yield ""


def _cache(result: Result) -> Iterator[str]:
    yield "### Keys and values in fewer bits (tale-6m, against fp32)"
    yield ""
    texts = ("tales", "wikitext")
    yield row("dtype", "bytes a token", *(f"KL, top-1 on {text}" for text in texts))
    yield row(*["---"] * 4)
    for name, size in result["bytes_per_token"].items():
        if name in result[texts[0]]:
            found = (result[text][name] for text in texts)
            cells = (f"{x['kl_mean']:.2g}, {100 * x['top1_agreement']:.2f} %" for x in found)
            yield row(name, size, *cells)
    yield ""


def _roofline(result: Result) -> Iterator[str]:
    recipe = f" from {result['recipe']}" if result.get("recipe") else ""
    yield f"### The roofline's prediction on {result['model']}{recipe} ({_made(result)})"
    yield ""
    yield row("texts", "prompt", "what", "expected", "measured", "ratio")
    yield row(*["---"] * 6)
    for case in result["cases"]:
        for what in ("step_s", "first_token_p50_s", "whole_s"):
            if what in case:
                times = (f"{case[what][name]:.3g} s" for name in ("expected", "measured"))
                name = what.removesuffix("_s").replace("_", " ")
                ratio = f"{case[what]['ratio']:.2f}"
                yield row(case["batch"], case["prompt"], name, *times, ratio)
    yield ""


def _made(result: Result) -> str:
    """With the times of the first and the last part, where each has its own."""
    dates = {case.get("date", result["date"]) for case in result["cases"]}
    threads = result["threads"]
    many = "s" * (threads > 1)
    return f"{threads} thread{many}, {' to '.join(sorted({min(dates), max(dates)}))}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
