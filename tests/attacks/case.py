"""One attack: a command line, and the folder, environment, limits and streams it gets."""

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path

# What stands for a stream in a shell. "text:..." is standard input with that text.
_STREAMS = {
    "null": "/dev/null",
    "zero": "/dev/zero",
    "full": "/dev/full",
    "closed": "&-",
    "wrong": "/dev/null",
}


@dataclass(slots=True)
class Case:
    """A drawn attack. The files lie in `folder`, where the command starts.

    trouble, command: of the table they were drawn from. roles: path on disk -> what it is to the
        command ("model", "recipe", "text", "task", "source", "out").
    names: words of which a refusal must say one; () where it may be about anything.
    environ: None takes a variable away. limits: name of a resource -> its soft limit; "AS" is what
        the process may take beside what it has.
    stdin, stdout, stderr: keys of _STREAMS, "file", "pipe" (nobody reads), "text:..."; "wrong" is
        one that goes the other way.
    full_at: from this change of the disk on there is no room. interrupt: Ctrl-C after so many
        seconds of processor time.
    user: "root" runs as who runs the tests, "plain" without root's rights, "other" as a user of its
        own, who may read everything: limits on processes hold for it.
    plant: Python that a fork runs before the command, to try the judge. sleep: seconds without any
        processor time after which it hangs.
    fresh: in a process of its own, for what must be so before anything is imported. path: a folder
        in front of sys.path.
    sound: nothing is wrong with it, so it must end with 0.
    """

    seed: int
    trouble: str
    command: str
    argv: list[str]
    folder: Path
    roles: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    environ: dict[str, str | None] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    stdin: str = "null"
    stdout: str = "file"
    stderr: str = "file"
    full_at: int | None = None
    interrupt: float | None = None
    user: str = "root"
    fresh: bool = False
    path: str | None = None
    plant: str = ""
    sleep: float = 15.0
    sound: bool = False

    @property
    def out(self) -> str | None:
        """Where the command was told to write, where it was."""
        found = [path for path, role in self.roles.items() if role == "out"]
        return found[0] if found else None

    def replace(self, old: str, new: str) -> None:
        """Put another word in an argument's place."""
        self.argv = [new if word == old else word for word in self.argv]

    def shell(self) -> str:
        """A command line that does the same, as far as a shell can."""
        ulimits = {"NOFILE": "-n", "AS": "-v", "FSIZE": "-f", "NPROC": "-u", "STACK": "-s"}
        parts = [f"cd {shlex.quote(str(self.folder))}"]
        parts += [f"ulimit -S {ulimits[k]} {v}" for k, v in self.limits.items() if k in ulimits]
        given = {**self.environ, **({"PYTHONPATH": self.path} if self.path else {})}
        sets = [f"{k}={v}" for k, v in given.items() if v is not None]
        drops = [w for k, v in given.items() if v is None for w in ("-u", k)]
        words = ["env", *drops, *sets]
        line = shlex.join([*words, "compress-model", *self.argv])
        if self.stdin.startswith("text:"):
            line = f"printf %s {shlex.quote(self.stdin[5:])} | {line}"
        for number, name in enumerate((self.stdin, self.stdout, self.stderr)):
            if name not in ("file", "null") and not name.startswith("text:"):
                reads = (number == 0) != (name == "wrong")
                line += f" {number}{'<' if reads else '>'}{_STREAMS.get(name, name)}"
        beside = [f"# disk full at change {self.full_at}"] if self.full_at is not None else []
        beside += [f"# Ctrl-C after {self.interrupt} s"] if self.interrupt is not None else []
        beside += [f"# as user {self.user!r}"] if self.user != "root" else []
        return "; ".join([*parts, line]) + "  ".join(["", *beside])

    def job(self) -> str:
        """All that a zygote needs, as a line of JSON; odd bytes of file names as escapes."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    status: as subprocess has it: minus a signal's number, or the exit code. cpu: seconds of
    processor time. rss: bytes at the peak. hung: it slept and did nothing, and was killed.
    strays: paths outside the folder that it opened for writing, made, moved or removed.
    """

    status: int
    cpu: float
    rss: int
    hung: bool
    strays: tuple[str, ...]
    out: str
    err: str
