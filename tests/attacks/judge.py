"""What no command may do, whatever it is given: a plain function over what came of a case."""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attacks.case import Case, Outcome

INTERRUPTED = 130
MESSAGE = 2000  # bytes of a refusal
MEMORY = 3 << 30  # bytes at the peak, the zygote's own included
_CHECKS = ("plan", "inspect", "doctor")  # may end with 1: they found a problem
_WHOLE = 64 << 20  # files above this size are not hashed
Files = Mapping[str, str]  # relative path -> what it is


def snapshot(folder: Path) -> Files:
    """Every path below a folder, with kind and content; special files are not opened."""
    found: dict[str, str] = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(root, name)
            found[os.path.relpath(path, folder)] = _what(path)
    return found


def _what(path: str) -> str:
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return f"link to {os.readlink(path)}"
    if not stat.S_ISREG(info.st_mode):
        return f"kind {stat.S_IFMT(info.st_mode)}"
    if info.st_size > _WHOLE:
        return f"{info.st_size} bytes"
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.errno}"


def complaints(case: Case, outcome: Outcome, before: Files, after: Files) -> Iterator[str]:
    """Everything that is wrong, a line each."""
    yield from _ending(case, outcome)
    yield from _words(case, outcome)
    yield from _files(case, outcome, before, after)
    if outcome.status == 0:
        yield from _results(case, after)


def _ending(case: Case, outcome: Outcome) -> Iterator[str]:
    if outcome.hung:
        yield "it hangs: all threads sleep"
    elif outcome.status < 0:
        yield f"signal {-outcome.status} ended it after {outcome.cpu:.1f} s of processor time"
    elif outcome.status not in allowed(case):
        yield f"exit code {outcome.status}, not one of {sorted(allowed(case))}"
    elif case.sound and outcome.status != 0:
        yield f"exit code {outcome.status}, and nothing is wrong with it"
    if outcome.rss > MEMORY:
        yield f"{outcome.rss >> 20} MiB at the peak"
    if "Traceback" in outcome.err or "a fault of compress-model" in outcome.err:
        yield f"a traceback: {_last_line(outcome.err, before='error: this is a fault')}"


def allowed(case: Case) -> set[int]:
    """The exit codes that the command may have."""
    codes = {0, 2}
    if case.command in _CHECKS or "--dry-run" in case.argv:
        codes.add(1)
    if case.stdout in ("closed", "full", "pipe", "wrong"):
        codes.add(1)  # nobody reads what it found
    return codes | ({INTERRUPTED} if case.interrupt is not None else set())


def _last_line(text: str, before: str = "") -> str:
    lines = [line for line in text.split("\n") if line.strip()]
    lines = [line for line in lines if not before or not line.startswith(before)]
    return lines[-1][:300] if lines else ""


def _words(case: Case, outcome: Outcome) -> Iterator[str]:
    """What it says on its streams."""
    if case.stderr == "file" and outcome.status == 2:
        yield from _refusal(case, outcome)
    bytewise = case.environ.get("PYTHONIOENCODING") != "utf-16"  # which was read as UTF-8
    if bytewise and case.stdout == "file" and "--json" in case.argv and outcome.out.strip():
        try:
            json.loads(outcome.out, parse_constant=_no_constant)
        except ValueError as error:
            yield f"stdout is not one JSON document: {error}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _refusal(case: Case, outcome: Outcome) -> Iterator[str]:
    last = _last_line(outcome.err) if outcome.err.endswith("\n") else ""
    whole = next((x for x in reversed(outcome.err.split("\n")) if x.strip()), "")
    if not last.startswith("error: "):
        yield f"refused, and stderr ends with {last!r}"
    if len(whole.encode()) > MESSAGE:
        yield f"a refusal of {len(whole.encode())} bytes"
    if outcome.err.count("error: ") > 1 and outcome.err.count("\nerror: ") > 0:
        yield "more than one line of refusal"
    if case.names and not any(_plain(name) in _plain(outcome.err) for name in case.names):
        yield f"a refusal that names none of {[name[:40] for name in case.names]}"


def _plain(text: str) -> str:
    """Without what messages may write otherwise: case, dashes, cut or escaped text."""
    said = "".join(c for c in text.lower().replace("_", "-") if c.isascii() and c.isprintable())
    return said.strip()[:4000] if len(said) > 40 else said.strip()


def outputs(case: Case) -> list[str]:
    """Folders that the command was told to write, relative to the folder above the case's."""
    words = case.argv
    said = [words[i + 1] for i, w in enumerate(words[:-1]) if w in ("--out", "-o")]
    said += [w.partition("=")[2] for w in words if w.startswith("--out=")]
    base = case.folder.parent
    return [os.path.relpath(os.path.normpath(case.folder / path), base) for path in said]


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _files(case: Case, outcome: Outcome, before: Files, after: Files) -> Iterator[str]:
    """Nothing lost or changed; nothing new but the result of a success."""
    strays = [path for path in outcome.strays if os.path.lexists(path)]
    if strays:
        yield f"left or changed outside of its folder: {', '.join(strays[:3])}"
    ends = outcome.status in (0, INTERRUPTED) or case.stdout != "file"
    outs = outputs(case) if ends else []
    in_place = "--in-place" in case.argv and outcome.status == 0
    for path, what in before.items():
        replaced = "--overwrite" in case.argv and any(_below(path, out) for out in outs)
        if replaced or _of_home(path):
            continue
        if after.get(path) != what:
            yield f"{path} was {what[:30]} and is {after.get(path, 'gone')[:30]}"
    new = [path for path in after if path not in before and not _of_home(path)]
    kept = left_work(case, before, after)
    for path in new:
        if any(_below(path, out) for out in outs) or (in_place and _is_graph(path)):
            continue
        if not (kept and any(_below(path, folder) for folder in kept)):
            yield f"left {path}"


def _of_home(path: str) -> bool:
    """What a home is for: our compiled kernels and measured sensitivities."""
    own = "home/.cache/compress-model"
    return path == "home/.cache" or _below(path, own)


def _is_graph(path: str) -> bool:
    return path.startswith("here/model/") and path.count("/") <= 3


def left_work(case: Case, before: Files, after: Files) -> list[str]:
    """Folders of a stopped `run` in which something is finished."""
    if case.command != "run":
        return []
    found = []
    for out in outputs(case):
        for state in ("partial", "publishing"):
            folder = f"{out}.{state}"
            if folder in after and folder not in before and _has_work(case, folder):
                found.append(folder)
    return found


def _has_work(case: Case, folder: str) -> bool:
    if folder.endswith("publishing"):
        return True
    try:
        journal = json.loads((case.folder.parent / folder / "journal.json").read_text())
    except (OSError, ValueError):
        return False
    return any(set(part["units"]) - {"start"} for part in journal["passes"].values())


def _results(case: Case, after: Files) -> Iterator[str]:
    """A success left what it was asked for, whole."""
    if "--dry-run" in case.argv or "--help" in case.argv:
        return
    for out in outputs(case)[-1:]:  # of options said twice the last counts
        folder = case.folder.parent / out
        if case.command == "run" or (case.command == "export" and _to_format(case)):
            yield from _opens(folder)
        elif case.command in ("eval", "roofline", "bench"):
            yield from _has_report(folder)
        elif case.command == "export" and not list(folder.glob("*.onnx")):
            yield from [] if list(folder.glob("*.gguf")) else ["no artifact in its folder"]


def _to_format(case: Case) -> bool:
    from compress.cli.commands.export import HOLDS

    return case.argv[case.argv.index("--to") + 1] in HOLDS if "--to" in case.argv else False


def _opens(folder: Path) -> Iterator[str]:
    from compress.inspect.inspect import inspect_checkpoint

    try:
        inspect_checkpoint(folder)
    except Exception as error:  # whatever: the result is not whole
        yield f"the result cannot be opened: {error}"


def _has_report(folder: Path) -> Iterator[str]:
    try:
        json.loads((folder / "report.json").read_text())
        assert (folder / "report.html").stat().st_size
    except (OSError, ValueError, AssertionError) as error:
        yield f"no whole report: {error}"
