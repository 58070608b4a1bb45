"""The numbers of a report, as trackers take them: flat names, floats, curves."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.report.schema import Report
from compress.report.summary import model_name

# What MLflow takes in a name; the others take more.
_STRANGE = re.compile(r"[^\w ./:-]")
_PAGES = ("report.json", "report.html", "report.md")


@dataclass(frozen=True, slots=True)
class LossCurve:
    """A number that was measured more than once. steps: of a training; one for each value."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """All that a tracker is told, at the end of the work.

    name: of the run, "tale-6m int4-gptq". command: "run", "eval" or "export". settings: what was
    done with what, as text. values: numbers by name; sizes in bytes, times in seconds, "NAME/kl" in
    nats a token of the text NAME. curves: of trainings. files: the report's, where they were
    written.
    """

    name: str
    command: str
    settings: Mapping[str, str]
    values: Mapping[str, float]
    curves: tuple[LossCurve, ...] = ()
    files: tuple[Path, ...] = field(default_factory=tuple)


def metrics_of(report: Report, folder: Path | None) -> RunMetrics:
    """Of a run or an evaluation. folder: with report.json, None where none was written."""
    settings = {
        "recipe": report.recipe.name,
        "overrides": " ".join(report.recipe.overrides),
        "seed": str(report.seed),
        "source": report.source.path,
        "source_sha256": report.source.sha256,
        "result": report.result.path,
        "format": report.result.format,
        "processor": report.machine.gpu or report.machine.cpu,
        **{f"version/{name}": version for name, version in report.versions.items()},
    }
    return RunMetrics(
        name=" ".join(filter(None, (model_name(report), report.recipe.name, _kind(report)))),
        command=report.command,
        settings={name: value for name, value in settings.items() if value},
        values=_numbers(dict(_values(report))),
        curves=tuple(_curves(report)),
        files=_files(folder),
    )


def metrics_of_export(facts: Mapping[str, Any], folder: Path | None) -> RunMetrics:
    """Of an export. facts: its report as JSON. folder: as above."""
    source, result = facts["source"], facts["result"]
    to = result.get("format") or result.get("target")
    seconds = facts["seconds"]
    values: dict[str, Any] = {"size_before": source["bytes"], "size": result["bytes"]}
    values["seconds"] = sum(seconds.values()) if isinstance(seconds, Mapping) else seconds
    values["peak_rss"] = facts["peak_rss_bytes"]
    for row in facts.get("exports", ()):
        values["max_logit_error"] = row["max_logit_error"]
    return RunMetrics(
        name=f"{Path(source['path']).name} export to {to}",
        command="export",
        settings={"source": source["path"], "result": str(result["path"]), "to": str(to)},
        values=_numbers(values),
        files=_files(folder),
    )


def _values(report: Report) -> Iterator[tuple[str, float | None]]:
    yield "size_before", report.source.bytes
    yield "size", report.result.bytes
    yield "bits_per_weight", report.result.bits_per_weight
    yield "kv_bytes_per_token", report.result.kv_bytes_per_token
    yield "seconds", report.seconds
    yield "peak_rss", report.peak_rss_bytes
    yield "peak_gpu", report.peak_gpu_bytes
    for stage in report.stages:
        yield f"seconds/{stage.name}", stage.seconds
    if report.budget is not None:
        yield "budget_loss", report.budget.loss.measured
    if report.quality is None:
        return
    for text in report.quality.texts:
        yield f"{text.name}/perplexity_before", text.ppl_source
        yield f"{text.name}/perplexity", text.ppl_result
        yield f"{text.name}/kl", text.kl
        yield f"{text.name}/top1_agreement", text.top1_agreement
    for name, task in report.quality.tasks.items():
        for number, found in task.numbers.items():
            yield f"{name}/{number}_before", found.source
            yield f"{name}/{number}", found.result


def _curves(report: Report) -> Iterator[LossCurve]:
    """Losses of trainings, measured on held-out rows and trained on."""
    for stage in report.stages:
        for course in stage.courses:
            for name, values in (("held_out", course.held), ("loss", course.losses)):
                yield _curve(f"{stage.name}/{course.name}/{name}", course.steps, values)


def _curve(name: str, steps: Sequence[int], values: Sequence[float | None]) -> LossCurve:
    pairs = zip(steps, values, strict=False)
    known = [(s, float(v)) for s, v in pairs if v is not None and math.isfinite(v)]
    return LossCurve(_named(name), tuple(s for s, _ in known), tuple(v for _, v in known))


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are known and finite: not all trackers take others."""
    known = {_named(name): v for name, v in values.items() if v is not None}
    return {name: float(v) for name, v in known.items() if math.isfinite(v)}


def _named(name: str) -> str:
    return _STRANGE.sub("_", name)


def _kind(report: Report) -> str:
    return "" if report.command == "run" else report.command


def _files(folder: Path | None) -> tuple[Path, ...]:
    return () if folder is None else tuple(p for n in _PAGES if (p := folder / n).is_file())
