"""One text that the engine works on: a request has one for each output or continuation."""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from compress.runtime.sequences.blocks import Cached
from compress.runtime.sequences.request import Request, Sampling, TokenLogprob
from compress.runtime.sequences.stops import Writer


class Status(Enum):
    """PARKED: waits for the first sequence of its request to compute the prompt for all."""

    PARKED = "parked"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Times:
    """Seconds of the monotonic clock."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of a text. Only a RUNNING one holds blocks.

    order: (arrival, index), which decides who goes first. tokens: prompt, then output; of a score
    the whole text from the start. root: see prefix.py. computed: so many positions have their keys
    and values in the blocks of `tables` (one table for each group); `trimmed` counts the leading
    blocks a window has left behind, `published` those offered to others. contents: what the full
    blocks hold, as far as it was needed. followers: those that share this one's prompt and begin
    when it is computed. logprobs: of the chosen tokens where they are asked, or of the scored ones.
    cached: tokens of the prompt it did not have to compute. told: tokens that the caller knows.
    greedy: as Sampling's; False for a score. scoring: whether it is one.
    """

    request: Request
    index: int
    order: tuple[int, int]
    tokens: "array[int]"
    root: bytes
    stop_ids: frozenset[int]
    writer: Writer | None
    times: Times
    groups: int
    status: Status = Status.WAITING
    computed: int = 0
    tables: list["array[int]"] = field(default_factory=list)
    trimmed: list[int] = field(default_factory=list)
    published: int = 0
    contents: list[Cached] = field(default_factory=list)
    followers: list["Sequence"] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    told: int = 0
    finish_reason: str | None = None
    error: str | None = None
    prompt_length: int = field(init=False)
    scoring: bool = field(init=False)
    greedy: bool = field(init=False)

    def __post_init__(self) -> None:
        # Asked several times in each step, and always the same.
        self.prompt_length = len(self.request.prompt)
        self.scoring = self.request.score_from is not None
        self.greedy = self.request.sampling is not None and self.request.sampling.greedy
        self.told = self.prompt_length
        self.reset()

    def reset(self) -> None:
        """Nothing is computed; the tables are empty. Tokens and log-probabilities stay."""
        self.computed = self.published = 0
        self.tables = [array("i") for _ in range(self.groups)]
        self.trimmed = [0] * self.groups

    @property
    def sampling(self) -> Sampling:
        """Of a generation. Scores have none."""
        assert self.request.sampling is not None
        return self.request.sampling

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def given(self) -> int:
        """Tokens it came with."""
        return len(self.tokens) if self.scoring else self.prompt_length

    @property
    def goal(self) -> int:
        """Positions to compute for now. Nobody asks what follows the last token of a score."""
        return self.prompt_length if self.followers else len(self.tokens) - self.scoring

    @property
    def most(self) -> int:
        """Positions it will ever compute, at most: the last token is never read."""
        if self.scoring:
            return len(self.tokens) - 1
        return self.prompt_length + self.sampling.max_tokens - 1

    @property
    def pending(self) -> int:
        return self.goal - self.computed

    @property
    def needed(self) -> int:
        """The first position whose logits are still wanted. From here on nothing can be skipped."""
        if self.request.score_from is None:
            return len(self.tokens) - 1
        return self.request.score_from - 1 + len(self.logprobs)

    @property
    def decoding(self) -> bool:
        """All but the newest token of its output is computed."""
        # Asked of every running text in each step: `pending == 1` without its way over properties.
        known = len(self.tokens)
        return known > self.prompt_length and self.computed == known - 1 and not self.scoring
