"""`compress-model generate`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import click

from compress.cli import options
from compress.cli.sampling import sampling, sampling_of
from compress.cli.writing import note, write, write_pieces

if TYPE_CHECKING:
    from compress.runtime.loading.model import Model
    from compress.runtime.sequences.request import RequestResult, Sampling

TOKENS = 128
LONGEST = 1 << 24  # characters of a prompt: four million tokens, and /dev/zero has no end


@click.command("generate")
@options.checkpoint
@click.argument("prompt", required=False)
@click.option(
    "--max-tokens", type=int, help=f"Tokens at most. Left out: {TOKENS}, or what still fits."
)
@sampling(temperature=0.0, top_p=1.0)
@click.option("-n", "--outputs", type=int, default=1, help="So many outputs of the prompt.")
@click.option("--logprobs", type=int, default=0, help="With --json: of the K most likely tokens.")
@options.device
@options.arithmetic
@options.kv_dtype
@options.math
@options.as_json
def command(
    checkpoint: str,
    prompt: str | None,
    max_tokens: int | None,
    outputs: int,
    logprobs: int,
    device: str,
    dtype: Literal["fp32", "bf16", "fp16"],
    kv_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None,
    math: Literal["exact", "int16", "int8"] | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Continue PROMPT with CHECKPOINT, dense or compressed.

    Without PROMPT, or with -, it is read from standard input, less one line end behind it. Text is
    written as it comes. The same seed gives the same text.
    """
    if logprobs and not as_json:
        raise click.UsageError("--logprobs needs --json: text has no place for them")
    most = max(TOKENS, asked["min_tokens"]) if max_tokens is None else max_tokens
    chosen = sampling_of(asked, most, n=outputs, logprobs=logprobs)
    text = _read(prompt)
    from compress import verbs
    from compress.runtime.sequences.limits import Limits

    model = verbs.open_model(
        checkpoint,
        device=device,
        dtype=dtype,
        cache=verbs.CacheOptions(kv_dtype=kv_dtype),
        math=math,
        limits=Limits(sequences=max(outputs, 1)),
    )
    if max_tokens is None:
        room = _room(model, text)
        chosen = replace(chosen, max_tokens=max(1, chosen.min_tokens, min(most, room)))
    if as_json:
        _print_json(model, text, chosen)
        return
    for line in model.notices:
        note(line)
    if outputs == 1:
        write_pieces(_streamed(model, text, chosen))
    else:
        _print_all(model, text, chosen)


def _room(model: "Model", prompt: str) -> int:
    """Tokens that still fit behind the prompt; RequestError where none does."""
    from compress.errors import RequestError

    tokens = len(model.encode(prompt))
    if tokens < model.context:
        return model.context - tokens
    raise RequestError(
        f"the prompt has {tokens} tokens, which leaves no room for an output: the model reads"
        f" {model.context}; write less"
    )


def _read(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or - and text on standard input")
    try:
        text = sys.stdin.read(LONGEST + 1)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8 text: {error}") from None
    if len(text) > LONGEST:
        raise click.UsageError(
            f"standard input has more than {LONGEST} characters; no model reads so many"
        )
    return text.removesuffix("\n")


def _streamed(model: "Model", prompt: str, chosen: "Sampling") -> Iterator[str]:
    """The text as it comes; then how fast it came, on stderr."""
    for update in model.stream(prompt, chosen):
        yield update.text
        if update.result is not None:
            _refuse(update.result)
            yield "" if update.result.text and update.result.text.endswith("\n") else "\n"
            click.echo(_speed([update.result]), err=True)


def _refuse(result: "RequestResult") -> None:
    from compress.errors import RequestError

    if result.error is not None:
        raise RequestError(result.error)


def _speed(results: Sequence["RequestResult"]) -> str:
    """Of the outputs of one prompt, which are computed together."""
    count, outputs = sum(len(result.tokens) for result in results), len(results)
    metrics = [result.metrics for result in results]
    begin, end = metrics[0].arrival, max(m.finished for m in metrics)
    first = min(m.first_token or m.finished for m in metrics)
    more = count - outputs
    speed = f", then {more / (end - first):.1f} a second" if more > 0 and end > first else ""
    tokens = "1 token" if count == 1 else f"{count} tokens"
    tokens += f" in {outputs} outputs" if outputs > 1 else ""
    reasons = " and ".join(sorted({str(result.finish_reason) for result in results}))
    return f"{tokens}, the first after {first - begin:.2f} s{speed}; ended by {reasons}"


def _print_all(model: "Model", prompt: str, chosen: "Sampling") -> None:
    results = model.generate([prompt], chosen)
    for result in results:
        _refuse(result)
        write(f"--- {result.index + 1} of {chosen.n}\n")
        write_pieces([result.text or "\n"])
    click.echo(_speed(results), err=True)
    if chosen.temperature == 0:
        note("with temperature 0 all outputs are the same; --temperature 1 makes them differ")


def _durations(result: "RequestResult") -> dict[str, float | None]:
    """Seconds that an output took, from when it was asked for, and tokens a second behind its
    first; None where there was no token, or only one."""
    metrics, tokens = result.metrics, len(result.tokens)
    first = metrics.first_token
    waited = None if metrics.scheduled is None else metrics.scheduled - metrics.arrival
    writing = 0.0 if first is None else metrics.finished - first
    return {
        "waiting_seconds": waited,
        "first_token_seconds": None if first is None else first - metrics.arrival,
        "seconds": metrics.finished - metrics.arrival,
        "tokens_per_second": (tokens - 1) / writing if tokens > 1 and writing > 0 else None,
    }


def _print_json(model: "Model", prompt: str, chosen: "Sampling") -> None:
    results = model.generate([prompt], chosen)
    for result in results:
        _refuse(result)
    keep = ("index", "text", "tokens", "finish_reason", "logprobs", "metrics")
    found = [
        {**{key: asdict(result)[key] for key in keep}, "durations": _durations(result)}
        for result in results
    ]
    ids = model.encode(prompt)
    options.print_json(
        {"prompt": prompt, "prompt_tokens": ids, "results": found, "notices": model.notices}
    )
