"""What a run has finished, so that a killed one resumes.

The journal lies in OUT.partial/ beside the files it speaks of, and is replaced by an atomic rename
after the work it records has been flushed to disk. A unit (the tensors outside the blocks, then
each block) is either in it, with its layer records, or will be done again from the same inputs.
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
from compress.passes.units import OUTSIDE
from compress.report.disturbance import averaged
from compress.report.schema import Layer

NAME = "journal.json"
START = "start"  # recorded as soon as the files of the result are reserved
CALIBRATION = "calibration"  # the unit whose data is the summary of the calibration set


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
    """Finished units in order, each with plain data; saved whole after every unit.

    spent: on the recorded units. resumed: whether an earlier process recorded some of them.
    clock, processor: when this process began or last recorded a unit, and what was read then.
    """

    path: Path
    fingerprint: dict[str, str]
    device: str
    units: dict[str, Any] = field(default_factory=dict)
    spent: Spent = Spent()
    resumed: bool = False
    clock: float = field(default_factory=time.perf_counter)
    processor: ProcessorReading | None = field(default_factory=read_processor)

    @property
    def has_work(self) -> bool:
        """Whether anything is recorded beyond the beginning."""
        return bool(self.units.keys() - {START})

    def record(self, unit: str, data: Any) -> None:
        """Mark a unit as done. Everything it wrote must be flushed before."""
        self.units[unit] = data
        self.spent, self.clock = self.spent_so_far(), time.perf_counter()
        self.processor = read_processor()
        held = {
            "fingerprint": self.fingerprint,
            "units": self.units,
            "spent": asdict(self.spent),
        }
        write_atomic(self.path, json.dumps(held, indent=1).encode())

    def spent_so_far(self) -> Spent:
        """On the recorded units, and by this process since the last of them."""
        before, gpu = self.spent, peak_gpu_bytes(self.device)
        seconds, others = time.perf_counter() - self.clock, share_since(self.processor)
        return Spent(
            before.seconds + seconds,
            max(before.peak_rss_bytes, peak_rss_bytes()),
            None if gpu is None else max(before.peak_gpu_bytes or 0, gpu),
            averaged([(before.others, before.seconds), (others, seconds)]),
        )


def start(folder: Path, fingerprint: dict[str, str], device: str) -> Journal:
    """A new journal in a fresh OUT.partial/."""
    journal = Journal(folder / NAME, fingerprint, device)
    journal.record(START, {})
    return journal


def resume(folder: Path, fingerprint: dict[str, str], device: str) -> Journal:
    """The journal of a killed run, or a new one where nothing was recorded."""
    return found(folder, fingerprint, device) or start(folder, fingerprint, device)


def is_empty(folder: Path) -> bool:
    """Whether a run in this folder has recorded nothing that a resumed one could skip."""
    try:
        return not json.loads((folder / NAME).read_text())["units"].keys() - {START}
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # what cannot be read may hold work
        return False


def found(folder: Path, fingerprint: dict[str, str], device: str) -> Journal | None:
    """The journal of a killed run; refused, with every difference, if this run is another one.
    None when it was killed before the first record."""
    path = folder / NAME
    try:
        held = json.loads(path.read_text())
        before, units = dict(held["fingerprint"]), dict(held["units"])
        spent = Spent(**held["spent"])
        _require_layers(units)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in SCARCE:  # nothing is wrong with the journal
            raise
        raise OutputError(
            f"cannot read {path}: {error.strerror or error}; remove {folder} and start again"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OutputError(f"{path} is not a journal; remove {folder} and start again") from None
    refuse_other(folder, before, fingerprint)
    journal = Journal(path, fingerprint, device, units, spent)
    journal.resumed = journal.has_work
    return journal


def _require_layers(units: Mapping[str, Any]) -> None:
    """TypeError unless the units of tensors hold layer records, as the report will read them."""
    for unit, data in units.items():
        if unit == OUTSIDE or unit.startswith("block "):
            for record in data:
                layer_of(record)


def layer_of(record: Mapping[str, Any]) -> Layer:
    """A recorded layer; TypeError when it is none. JSON knows lists only."""
    return Layer(**{**record, "folds": tuple(record.get("folds", ()))})
