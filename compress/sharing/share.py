"""What a finished result is handed to, checked before the work begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import CompressError, OutputError
from compress.events import Progress, note, silent
from compress.report.schema import Report
from compress.sharing.hub import check_push, push
from compress.sharing.metrics import RunMetrics, metrics_of, metrics_of_export
from compress.sharing.trackers import Hook, hook_of

REPORT = "report"  # the folder of a result that has its report


@dataclass(frozen=True, slots=True)
class Share:
    """hooks: each gets the metrics. repo: where the folder goes, None for nowhere."""

    hooks: tuple[Hook, ...] = ()
    repo: str | None = None
    progress: Progress = silent

    def report(self, report: Report, pages: Path | None, out: Path | None = None) -> None:
        """A run or an evaluation. pages: the folder with report.json; out: of the result.

        OutputError where the hub or a tracker fails: what was made is there.
        """
        if self.hooks:
            self._track(metrics_of(report, pages))
        self._push(out)

    def export(self, facts: dict[str, Any], out: Path | None) -> None:
        """An export. facts: its report as JSON; out: its folder. Errors as above."""
        if self.hooks:
            self._track(metrics_of_export(facts, None if out is None else out / REPORT))
        self._push(out)

    def _track(self, metrics: RunMetrics) -> None:
        for hook in self.hooks:
            try:
                hook(metrics)
            except CompressError:
                raise
            except Exception as error:  # of any tracker: its server, its files, its own types
                name = getattr(hook, "__name__", "the hook").removeprefix("log_to_")
                said = str(error).strip().split("\n")[0] or type(error).__name__
                raise OutputError(
                    f"{name} did not take the metrics of {metrics.name} ({said}); the work is done"
                    " and its report is written"
                ) from error

    def _push(self, out: Path | None) -> None:
        if self.repo is not None and out is not None:
            self.progress(note("push", f"{out} goes to {self.repo}"))
            self.progress(note("push", f"it is at {push(self.repo, out)}"))


def ready(
    repo: str | None, track: Sequence[str | Hook] = (), progress: Progress | None = None
) -> Share:
    """Everything looked at that can be before the work. A CompressError where it will not do."""
    hooks = tuple(hook_of(each) for each in track)
    if repo is not None:
        check_push(repo)
    return Share(hooks, repo, progress or silent)
