"""What a choice does to its sequence, and the result of a sequence that has ended."""

from compress.runtime.sampling.head import LogitsRow
from compress.runtime.sampling.sampling import Choice
from compress.runtime.sequences.request import Metrics, Request, RequestResult
from compress.runtime.sequences.sequence import Sequence


def accept(row: LogitsRow, choice: Choice | None, now: float) -> None:
    """Appends a token or a score; sets the finish reason where the sequence ends with it.

    What comes behind an end is dropped.
    """
    sequence = row.sequence
    if sequence.finish_reason is not None:
        return
    if choice is None:
        sequence.error = f"the model's logits after {row.position + 1} tokens are not finite"
        _finish(sequence, "error")
    elif sequence.scoring:
        _accept_score(sequence, choice)
    else:
        _accept_token(sequence, choice, now)


def _accept_score(sequence: Sequence, choice: Choice) -> None:
    assert choice.report is not None
    sequence.logprobs.append(choice.report)
    if sequence.needed == len(sequence.tokens) - 1:
        _finish(sequence, "stop")


def _accept_token(sequence: Sequence, choice: Choice, now: float) -> None:
    sequence.tokens.append(choice.token)
    sampling, generated = sequence.sampling, sequence.generated
    if sequence.times.first_token is None:
        sequence.times.first_token = now
    if choice.report is not None:
        sequence.logprobs.append(choice.report)
    may_stop = generated > sampling.min_tokens
    if may_stop and choice.token in sequence.stop_ids:
        _finish(sequence, "stop")
    elif sequence.writer is not None and sequence.writer.push(choice.token, may_stop):
        sequence.finish_reason = "stop"
    elif generated == sampling.max_tokens:
        _finish(sequence, "length")


def _finish(sequence: Sequence, reason: str) -> None:
    """Ends a sequence by something else than a stop string; the text it held back may hold one."""
    stopped = sequence.writer is not None and sequence.writer.flush()
    sequence.finish_reason = "stop" if stopped and reason == "length" else reason


def abort(sequence: Sequence) -> None:
    _finish(sequence, "abort")


def result_of(sequence: Sequence, now: float) -> RequestResult:
    """Of a sequence with a finish reason."""
    assert sequence.finish_reason is not None
    times = sequence.times
    metrics = Metrics(times.arrival, times.scheduled, times.first_token, now, sequence.cached)
    whole = sequence.scoring and sequence.finish_reason == "stop"
    scored = (report.token for report in sequence.logprobs)
    return RequestResult(
        id=sequence.request.id,
        index=sequence.index,
        tokens=tuple(scored if sequence.scoring else sequence.tokens[sequence.prompt_length :]),
        finish_reason=sequence.finish_reason,
        metrics=metrics,
        text=None if sequence.writer is None else sequence.writer.text,
        logprobs=tuple(sequence.logprobs),
        score=sum(report.logprob for report in sequence.logprobs) if whole else None,
        greedy=all(report.greedy for report in sequence.logprobs) if whole else None,
        error=sequence.error,
    )


def refused(request: Request, message: str, now: float) -> RequestResult:
    """Of a request that was not let in."""
    metrics = Metrics(now, None, None, now, 0)
    return RequestResult(request.id, 0, (), "error", metrics, error=message)
