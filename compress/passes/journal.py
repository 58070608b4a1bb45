"""What a run has finished, so that a killed one resumes.

The journal lies in OUT.partial/ beside the files it speaks of, and is replaced by an atomic rename
after the work it records has been flushed to disk. A unit of a pass (the tensors outside the
blocks, then each block) is either in it, with its records, or will be done again from the same
inputs.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.checkpoint.output.folder import write_atomic
from compress.checkpoint.regular import SCARCE
from compress.errors import OutputError
from compress.machine.environment import peak_gpu_bytes, peak_rss_bytes
from compress.machine.other_work import ProcessorReading, read_processor, share_since
from compress.passes.identity import refuse_other
from compress.report.disturbance import averaged
from compress.report.schema import Layer

NAME = "journal.json"
START = "start"  # recorded as soon as the files of the result are reserved
CALIBRATION = "calibration"  # the unit whose data is the summary of the calibration set
MEASURED = "measured"  # the unit whose data are the sensitivities that schemes were chosen by
# Behind the units that round into one file: it is written, and it was read by others.
WRITTEN, PROVED = "written", "proved"
CHOSEN = "chosen"  # the unit whose data an open edit was settled by
LOADS = "loads"  # the unit whose data says how plain transformers loaded what a pass wrote
WHOLE = "whole"  # recorded once what a pass wrote is a checkpoint; its data has its sha256


@dataclass(frozen=True, slots=True)
class Spent:
    """Time and highest memory (bytes; GPU: None on the CPU) of all processes of a run.

    others: share of the processors that other programs took in that time, as far as it is known.
    """

    seconds: float = 0.0
    peak_rss_bytes: int = 0
    peak_gpu_bytes: int | None = None
    others: float | None = None


@dataclass(slots=True)
class Journal:
    """Finished units of all passes of a run; saved whole after every unit.

    passes: by name, in the order in which they began. resumed: whether an earlier process recorded
    some of the units.
    """

    path: Path
    fingerprint: dict[str, str]
    device: str
    passes: dict[str, "PassJournal"] = field(default_factory=dict)
    resumed: bool = False

    @property
    def has_work(self) -> bool:
        """Whether anything is recorded beyond the beginning of a pass."""
        return any(each.has_work for each in self.passes.values())

    def begin(self, name: str) -> "PassJournal":
        """The part of a pass that works from now on."""
        part = self.passes.setdefault(name, PassJournal(self))
        part.clock, part.processor = time.perf_counter(), read_processor()
        return part

    def save(self) -> None:
        held = {
            "fingerprint": self.fingerprint,
            "passes": {
                name: {"units": part.units, "spent": asdict(part.spent)}
                for name, part in self.passes.items()
            },
        }
        write_atomic(self.path, json.dumps(held, indent=1).encode())


@dataclass(slots=True)
class PassJournal:
    """Finished units of one pass in order, each with plain data: a list of layer records, or a
    mapping.

    spent: on the recorded units. clock, processor: when this process began the pass or last
    recorded a unit of it, and what was read then.
    """

    journal: Journal
    units: dict[str, Any] = field(default_factory=dict)
    spent: Spent = Spent()
    clock: float = field(default_factory=time.perf_counter)
    processor: ProcessorReading | None = field(default_factory=read_processor)

    @property
    def has_work(self) -> bool:
        """Whether anything is recorded beyond the beginning."""
        return bool(self.units.keys() - {START})

    @property
    def has_written(self) -> bool:
        """Whether files of the result may hold what a unit wrote."""
        return bool(self.units.keys() - {START, MEASURED, CHOSEN, CALIBRATION})

    def record(self, unit: str, data: Any) -> None:
        """Mark a unit as done. Everything it wrote must be flushed before."""
        self.units[unit] = data
        self.spent, self.clock = self.spent_so_far(), time.perf_counter()
        self.processor = read_processor()
        self.journal.save()

    def spent_so_far(self) -> Spent:
        """On the recorded units, and by this process since the last of them."""
        before, gpu = self.spent, peak_gpu_bytes(self.journal.device)
        seconds, others = time.perf_counter() - self.clock, share_since(self.processor)
        return Spent(
            before.seconds + seconds,
            max(before.peak_rss_bytes, peak_rss_bytes()),
            None if gpu is None else max(before.peak_gpu_bytes or 0, gpu),
            averaged([(before.others, before.seconds), (others, seconds)]),
        )


def start(folder: Path, fingerprint: dict[str, str], device: str) -> Journal:
    """A new journal for a fresh OUT.partial/; the first unit of a pass puts it there."""
    return Journal(folder / NAME, fingerprint, device)


def resume(folder: Path, fingerprint: dict[str, str], device: str) -> Journal:
    """The journal of a killed run, or a new one where nothing was recorded."""
    return found(folder, fingerprint, device) or start(folder, fingerprint, device)


def is_empty(folder: Path) -> bool:
    """Whether a run in this folder has recorded nothing that a resumed one could skip."""
    try:
        passes = json.loads((folder / NAME).read_text())["passes"]
        return not any(held["units"].keys() - {START} for held in passes.values())
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # what cannot be read may hold work
        return False


def whole(folder: Path) -> frozenset[str]:
    """Names of the passes whose result in this folder is whole; none where nobody can tell."""
    try:
        passes = json.loads((folder / NAME).read_text())["passes"]
        return frozenset(name for name, held in passes.items() if WHOLE in held["units"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset()


def found(folder: Path, fingerprint: dict[str, str], device: str) -> Journal | None:
    """The journal of a killed run; refused, with every difference, if this run is another one.
    None when it was killed before the first record."""
    path = folder / NAME
    try:
        held = json.loads(path.read_text())
        before = dict(held["fingerprint"])
        passes = {name: _part(part) for name, part in held["passes"].items()}
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in SCARCE:  # nothing is wrong with the journal
            raise
        raise OutputError(
            f"cannot read {path}: {error.strerror or error}; remove {folder} and start again"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise OutputError(f"{path} is not a journal; remove {folder} and start again") from None
    refuse_other(folder, before, fingerprint)
    journal = Journal(path, fingerprint, device)
    journal.passes = {name: PassJournal(journal, *part) for name, part in passes.items()}
    journal.resumed = journal.has_work
    return journal


def _part(held: Mapping[str, Any]) -> tuple[dict[str, Any], Spent]:
    """Units and time of a pass; TypeError or KeyError for what no pass recorded."""
    units = dict(held["units"])
    _require_layers(units)
    return units, Spent(**held["spent"])


def _require_layers(units: Mapping[str, Any]) -> None:
    """TypeError unless what is listed are layer records, as the report will read them."""
    for data in units.values():
        for record in data if isinstance(data, list) else ():
            layer_of(record)


def layer_of(record: Mapping[str, Any]) -> Layer:
    """A recorded layer; TypeError when it is none. JSON knows lists only."""
    return Layer(**{**record, "folds": tuple(record.get("folds", ()))})
