"""Where is computed: where the user says, or on a GPU that gives the CPU's results, else on the
CPU."""

from dataclasses import dataclass
from functools import cache

import torch

from compress.events import Progress, note
from compress.machine.environment import check_device
from compress.machine.gpu import has_nvidia, torch_build, why_no_gpu
from compress.machine.self_check import differences

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Device:
    """name: "cpu", "cuda" or "cuda:N". why: in words, where it was chosen; empty where the user
    named it. passed_over: a GPU is here, and is not used."""

    name: str
    why: str = ""
    passed_over: bool = False

    @property
    def line(self) -> str | None:
        """What was chosen and why; None where the user chose."""
        return f"{self.name}: {self.why}" if self.why else None

    @property
    def notices(self) -> tuple[str, ...]:
        """The same where there was a choice: on a machine without a GPU there is none."""
        choice = self.line is not None and (self.passed_over or self.name != "cpu")
        return (f"device {self.line}",) if choice else ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line where a GPU is here and is not used."""
        return (f"device {self.line}",) if self.passed_over else ()


def settle(asked: str, progress: Progress | None = None) -> Device:
    """The device that is asked for, or the one chosen for "auto", which `progress` is told.

    OutputError for a name that is none, and for a device that torch does not have.
    """
    if asked != AUTO:
        check_device(asked)
        return Device(asked)
    found = _chosen()
    if progress is not None and found.line is not None:
        progress(note("device", found.line))
    return found


def device_name(asked: str) -> str:
    """`settle`, where what was chosen is all that is wanted."""
    return settle(asked).name


@cache
def _chosen() -> Device:
    if not torch.cuda.is_available():
        why, line = why_no_gpu(torch_build())
        return Device("cpu", f"{why}; {line}" if line else why, passed_over=has_nvidia())
    name = torch.cuda.get_device_name("cuda")
    wrong = next(differences("cuda"), None)
    if wrong is not None:
        why = f"{name} is not used, since {wrong}; cuda takes it all the same"
        return Device("cpu", why, passed_over=True)
    return Device("cuda", f"{name}, which gives the CPU's results")
