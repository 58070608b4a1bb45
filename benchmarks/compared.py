"""The stored comparison as docs/compare.md has it.

    python -m benchmarks.compared

writes what lies between the two markers anew from benchmarks/results/compare_tale-6m.json.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.matrix import table
from benchmarks.processes import REPO, stored_result
from compress.report import units

NAME = "compare_tale-6m"
DOCUMENT = REPO / "docs" / "compare.md"
MARKS = "<!-- comparison: python -m benchmarks.compare -->", "<!-- end of comparison -->"


def section(result: Mapping[str, Any]) -> str:
    """What docs/compare.md says of a stored comparison: its winner, the table, where it is from."""
    source, results = result["source"], result["results"]
    said = (
        f"It says `{result['winner']}`, with the lines that start it, of these {len(results)}, all"
        f" measured on {units.counted(result['tokens'], 'token')} of text that the model wrote,"
        f" where the source ({units.size(source['bytes'])}) has perplexity"
        f" {units.significant(source['perplexity'], 4)} and is predicted"
        f" {source['tokens_per_second']:,.0f} tokens a second:"
    )
    files = f"../benchmarks/results/{NAME}"
    threads, command = result["setting"]["threads"], result["setting"]["command"]
    command = f"OMP_NUM_THREADS={threads} {command}" if threads.isdigit() else command
    made = (
        f"[The page]({files}.html) of that comparison, which begins as below, and [its"
        f" figures]({files}.json) were made in {result['spent']['cpu_s']:,.0f} s of processor time"
        f" without the cache, by `{command}`."
    )
    shown = f"![The winner, and size against KL divergence of all]({files}.png)"
    return "\n\n".join((said, "\n".join(_table(result)), made, shown))


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    yield table.row(
        "recipe", "file", "bits", "KL", "perplexity", "top-1", "KV", "tokens/s", "front"
    )
    yield "|---" * 9 + "|"
    for one in result["results"]:
        yield table.row(
            f"`{one['name']}`" + (", the winner" if one["name"] == result["winner"] else ""),
            units.size(one["bytes"]),
            units.trimmed(one["bits_per_weight"]),
            units.significant(one["kl"]),
            units.significant(one["perplexity"], 4),
            units.percent(one["top1_agreement"]),
            units.size(one["kv_bytes_per_token"]),
            f"{one['tokens_per_second']:,.0f}",
            "yes" if one["on_kl_front"] else "",
        )


def document(text: str) -> str:
    """docs/compare.md with the stored comparison between its markers."""
    return table.written(text, section(stored_result(NAME)), MARKS)


def main() -> None:
    DOCUMENT.write_text(document(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
