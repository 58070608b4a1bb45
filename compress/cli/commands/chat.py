"""`compress-model chat`."""

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import click

from compress.cli import options
from compress.cli.commands.generate import LONGEST
from compress.cli.sampling import sampling, sampling_of
from compress.cli.writing import note, write, write_pieces
from compress.errors import DataError, RequestError

if TYPE_CHECKING:
    from compress.runtime.sequences.request import Sampling
    from compress.serve.conversation import Conversation

MARK = "> "


@click.command("chat")
@options.checkpoint
@click.option("--system", metavar="TEXT", help="What the model is told before the chat.")
@click.option(
    "--max-tokens", type=int, default=512, show_default=True, help="Of an answer, at most."
)
@sampling(temperature=0.7, top_p=0.95)
@options.device
@options.arithmetic
@options.kv_dtype
@options.math
def command(
    checkpoint: str,
    system: str | None,
    max_tokens: int,
    device: str,
    dtype: Literal["fp32", "bf16", "fp16"],
    kv_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None,
    math: Literal["exact", "int16", "int8"] | None,
    **asked: Any,
) -> None:
    """Chat with CHECKPOINT by the chat template of its tokenizer.

    Every line of input is a message. Ctrl-C ends an answer, and between answers the chat, as
    Ctrl-D does. From a pipe, messages are answered one after the other.
    """
    chosen = sampling_of(asked, max_tokens)
    from compress import verbs
    from compress.runtime.sequences.limits import Limits
    from compress.serve.conversation import Conversation, chat_tokenizer

    tokenizer = chat_tokenizer(checkpoint)
    model = verbs.open_model(
        checkpoint,
        device=device,
        dtype=dtype,
        cache=verbs.CacheOptions(kv_dtype=kv_dtype),
        math=math,
        limits=Limits(sequences=1),
    )
    for line in model.notices:
        note(line)
    conversation = Conversation.begin(model, tokenizer, system)
    if sys.stdin.isatty():
        _talk(conversation, chosen)
    else:
        for line in _lines():
            _answer(conversation, line, chosen)


def _talk(conversation: "Conversation", chosen: "Sampling") -> None:
    """In a terminal, where mistakes and Ctrl-C do not end the chat."""
    for line in _typed():
        try:
            _answer(conversation, line, chosen)
        except (RequestError, DataError) as error:
            click.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:
            continue


def _answer(conversation: "Conversation", line: str, chosen: "Sampling") -> None:
    before = conversation.forgotten
    with closing(conversation.answer(line, chosen)) as pieces:
        write_pieces(pieces)
    if conversation.forgotten and not before:
        note(
            "the conversation no longer fits the model's context; from here on its oldest messages"
            " are left out"
        )


def _typed() -> Iterator[str]:
    try:
        import readline  # noqa: F401  (gives input() its keys and its history)
    except ImportError:  # a Python without it: lines are typed plainly
        note("this Python has no readline; lines cannot be edited")
    while True:
        try:
            line = input(MARK).strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if line:
            yield line


def _lines() -> Iterator[str]:
    try:
        while line := sys.stdin.readline(LONGEST + 1):
            if len(line) > LONGEST:
                raise click.UsageError(f"a line of input has more than {LONGEST} characters")
            if line.strip():
                yield line.strip()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8 text: {error}") from None
