"""What a caller asks of the engine, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a generation are chosen, and when it ends.

    temperature: 0 takes the most likely token, the lowest id of equals.
    top_k, top_p, min_p: 0, 1 and 0 leave all tokens in; see filters.py.
    repetition_penalty: 1 is none; it sees prompt and output. The frequency and presence penalties
        see the output; 0 is none.
    logit_bias: token id -> added to its logit, before the penalties.
    seed: of the noise. It depends on nothing else but the sequence's index and the position.
    max_tokens: tokens at most. min_tokens: no end before so many, stop strings included.
    stop: the text ends before the first of these strings. stop_tokens: ids that end the output
        beside the model's own end-of-text ids, which ignore_eos makes plain tokens.
    n: outputs of one prompt, with index 0 to n - 1.
    logprobs: so many of the most likely tokens are reported with their log-probability beside the
        chosen one; 0 reports none. They are the model's own, before bias, penalties, temperature.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int = 0

    @property
    def greedy(self) -> bool:
        """The highest of the model's own logits is the choice, and nothing else is asked."""
        changed = (self.temperature, self.frequency_penalty, self.presence_penalty, self.min_tokens)
        return (
            not any(changed)
            and self.repetition_penalty == 1
            and not self.logit_bias
            and not self.logprobs
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue (`sampling`) or a text to score (`score_from`): one of the two.

    prompt: token ids.
    score_from: the log-probability of the tokens from this index on is asked, given all before.
    continuations: with `score_from`: each is scored behind the prompt, which is computed once.
        Result i is that of prompt + continuations[i]; without any, the prompt itself is scored.
    salt: only requests of one salt share cached keys and values.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling | None = None
    score_from: int | None = None
    continuations: tuple[tuple[int, ...], ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen or scored token, its log-probability (nats), and the most likely (id, logprob).

    greedy: no token was more likely (of equals the lowest id counts).
    top: by logit, the highest first, of equal logits the lowest id; so a greedy token is the first.
        Scores have none.
    """

    token: int
    logprob: float
    greedy: bool
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Metrics:
    """Seconds of the monotonic clock; None for what did not happen.

    cached: tokens of the prompt whose keys and values the prefix cache had at first scheduling.
    """

    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float
    cached: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One sequence of a request, finished.

    tokens: the output, the end-of-text or stop token included; of a score the scored tokens.
    finish_reason: "stop", "length", "abort" or "error"; of a score "stop".
    text: the output as text, without what ended it; None without a tokenizer and for scores.
    score: sum of the log-probabilities (nats); greedy: every scored token was the most likely.
    error: why there is no (whole) result, in one line. math: of a score of Model.score, which math
        of its products it was computed with.
    """

    id: str
    index: int
    tokens: tuple[int, ...]
    finish_reason: str
    metrics: Metrics
    text: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float | None = None
    greedy: bool | None = None
    error: str | None = None
    math: str | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """What one step added to a sequence: tokens, the text they settled, and at its end the result.

    Text follows tokens late: an unfinished character or the beginning of a stop string waits.
    """

    id: str
    index: int
    tokens: tuple[int, ...]
    text: str
    result: RequestResult | None
