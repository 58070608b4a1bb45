"""How many processors the container grants this process."""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def quota() -> float:
    """Processors, maybe not a whole number; 0 where nothing limits them.

    The least of the control group that this process is in and of those above it, of both versions.
    """
    return min((found for folder in _groups() if (found := _quota(folder)) > 0), default=0.0)


def _quota(folder: Path) -> float:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    # Version 2 writes "max" for no limit, version 1 writes -1.
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return 0.0


def _groups() -> Iterator[Path]:
    """As compress.machine.memory finds those of memory, which runs without torch and so without
    this package."""
    for line in _text(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUPS / "cpu" if controllers else CGROUPS
        # Inside a container the path may be the host's, and only the root is there.
        own = root / path.lstrip("/")
        yield from (own, *(above for above in own.parents if above.is_relative_to(root)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
