"""Run seeds and print what is wrong: `python -m attacks.again SEED ...` or `FROM-TO`, in `tests/`.

With one seed its files are kept, for a look.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from attacks import cases, stock
from attacks.nursery import Verdict, nursery, sweep, try_case

WORKERS = 2


def main(words: list[str]) -> int:
    seeds = [seed for word in words for seed in _range(word)]
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        Path(folder).chmod(0o755)
        made = stock.make(Path(folder))
        if len(seeds) == 1:
            return _one(seeds[0], made)
        return _many(seeds, made)


def _range(word: str) -> range:
    first, _, last = word.partition("-")
    return range(int(first), int(last or first) + 1)


def _one(seed: int, made: Path) -> int:
    folder = Path(tempfile.mkdtemp(prefix="attack-")).resolve()
    folder.chmod(0o755)
    with nursery(1) as free:
        verdict = try_case(free.get(), cases.draw(seed, made, folder))
    print(verdict)
    print(f"  stdout: {verdict.outcome.out[-600:]}\n  ended with {verdict.outcome.status}")
    return bool(verdict.complaints)


def _many(seeds: list[int], made: Path) -> int:
    begin = time.perf_counter()
    with nursery(WORKERS) as free:
        found = []
        for verdict in sweep(seeds, made, free, WORKERS):
            found.append(verdict)
            if verdict.complaints:
                print(verdict, flush=True)
    print(summary(found), f"{time.perf_counter() - begin:.0f} s")
    return any(verdict.complaints for verdict in found)


def summary(found: list[Verdict]) -> str:
    """How many cases of which kind, and how many of them fail."""
    bad = [v for v in found if v.complaints]
    lines = []
    for name in ("trouble", "command"):
        all_of, bad_of = (Counter(getattr(v.case, name) for v in some) for some in (found, bad))
        lines.append(json.dumps({k: [n, bad_of[k]] for k, n in sorted(all_of.items())}))
    codes = Counter(v.outcome.status for v in found)
    cpu = sum(v.outcome.cpu for v in found)
    lines.append(f"exit codes {dict(sorted(codes.items()))}")
    lines.append(f"{len(found)} cases, {len(bad)} fail, {cpu:.0f} s of processor time,")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
