"""How much the engine does in one step, and who goes first."""

import math
from dataclasses import dataclass

from compress.errors import RequestError

POLICY_NAMES = ("mixed", "separate", "static")
DEFAULT_RATIO = 0.3
MOST = 2**31 - 1  # of anything that is counted; below what torch and the system count with
_AT_LEAST = {
    "tokens_per_step": 1,
    "sequences": 1,
    "long_prefill": 0,
    "max_waiting_steps": 0,
    "static_batch": 1,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step.

    tokens_per_step: rows of one forward, of all sequences together.
    sequences: that run at the same time; also the most outputs (n) of one request.
    long_prefill: one prompt takes at most so many tokens of a step; 0 means all it can get.
    policy: "mixed": outputs and chunks of prompts share each step. "separate": prompts are read in
        steps of their own, as soon as waiting_served_ratio x the running sequences wait, or
        max_waiting_steps steps have passed. "static": batches of `static_batch`, each to its end.
    """

    tokens_per_step: int = 512
    sequences: int = 256
    long_prefill: int = 0
    policy: str = "mixed"
    waiting_served_ratio: float = DEFAULT_RATIO
    max_waiting_steps: int = 20
    static_batch: int = 8

    @property
    def running(self) -> int:
        """Sequences that may run at once."""
        return self.static_batch if self.policy == "static" else self.sequences

    def prompt_step(self, block_size: int) -> int:
        """Tokens of a step that only reads prompts (policy "separate"): up to whole blocks."""
        return -(-self.tokens_per_step // block_size) * block_size

    def chunk(self, block_size: int) -> int:
        """Tokens of one sequence in a step, at most."""
        whole = self.prompt_step(block_size)
        return min(self.long_prefill, whole) if self.long_prefill else whole


def check_whole(name: str, value: object, least: int) -> None:
    """RequestError for what is no whole number, and for one below `least` or above MOST."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name} is {value!r}: a whole number from {least} on is needed")
    if value > MOST:
        raise RequestError(f"{name} is {value!r}: {MOST} is the most")


def check_limits(limits: Limits) -> tuple[str, ...]:
    """Notices about settings that have no effect. Errors: RequestError for values out of range."""
    if not isinstance(limits, Limits):
        raise RequestError(
            f"limits is {limits!r:.60}: compress.runtime.sequences.limits.Limits is needed"
        )
    for name, least in _AT_LEAST.items():
        check_whole(name, getattr(limits, name), least)
    if limits.policy not in POLICY_NAMES:
        raise RequestError(f"policy is {limits.policy!r}: it must be one of {POLICY_NAMES}")
    ratio = limits.waiting_served_ratio
    if not isinstance(ratio, int | float) or not (0 <= ratio < math.inf):
        raise RequestError(f"waiting_served_ratio is {ratio!r}: a number from 0 on is needed")
    if ratio != DEFAULT_RATIO and limits.policy != "separate":
        where = f"with policy {limits.policy!r}; only 'separate' holds requests back"
        return (f"waiting_served_ratio {ratio} has no effect {where}",)
    return ()
