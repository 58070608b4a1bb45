"""How much memory this process may use: of the machine, and of the container it runs in."""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Estimates of memory are not exact: what is more than its room by this much is refused, what is
# between is tried, with a warning. docs/report.md has how far
# measured peaks were from planned ones.
TOLERANCE = 1.1
# Of cgroup version 2, then 1: limit, usage, and the part of the usage that is given back on demand.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes() -> int | None:
    """Bytes that can be taken without swapping or being killed; None where the system says none."""
    machine = _fields(PROC / "meminfo").get("MemAvailable:")
    found = [] if machine is None else [machine * 1024]
    found += [max(0, limit - used) for limit, used in _limits()]
    return min(found, default=None)


def room_bytes() -> int | None:
    """Bytes that this process may have in all: those it has and those it can take besides. None
    where the system does not say."""
    free = available_bytes()
    return None if free is None else free + resident_bytes()


def resident_bytes() -> int:
    """Bytes of this process in memory now; 0 where the system does not say."""
    return _fields(PROC / "self" / "status").get("VmRSS:", 0) * 1024


def too_much(peak: int, held: int, room: int) -> bool:
    """Whether a process that holds so many bytes and may have `room` can by no means reach `peak`:
    what it takes besides is more than TOLERANCE times what it may take."""
    return peak - held > TOLERANCE * (room - held)


def limit_bytes() -> int | None:
    """What the container may use at most, None where nothing limits it."""
    return min((limit for limit, _ in _limits()), default=None)


def cache_bytes() -> int:
    """Of the largest cache that a processor has, or shares; 0 where the system does not say."""
    sizes = (_text(file).strip() for file in CACHES.glob("index*/size"))
    return max((int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit()), default=0)


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, use) of every control group this process is in, from its own one upwards."""
    for folder in _groups():
        for limit_name, usage_name, cache_name in _FILES:
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                yield limit, usage - _fields(folder / "memory.stat").get(cache_name, 0)


def _groups() -> Iterator[Path]:
    for line in _text(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        # Inside a container the path may be the host's, and only the root is there.
        own = root / path.lstrip("/")
        yield from (own, *(p for p in own.parents if p.is_relative_to(root)))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    # Version 1 writes "no limit" as the largest number of whole pages.
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def _fields(path: Path) -> dict[str, int]:
    """First and second word of every line."""
    words = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
