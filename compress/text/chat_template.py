"""Renders a chat as text by the checkpoint's own Jinja template, as transformers does.

A template comes with the checkpoint and is untrusted code: it runs in Jinja's immutable sandbox
and is given plain JSON data only.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from compress.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

# Keys under which a message may hold its reasoning. Templates read the first key, gpt-oss' the
# second; the third is only taken from messages.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# Templates that print today's date would make calibration differ from day to day.
FIXED_DATE = (2024, 7, 26)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, and the special tokens that it may name (`bos_token`, `eos_token` ...).

    tokens: the text of each.
    """

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        """Text of one chat, with its special tokens written out.

        add_generation_prompt: end with the words that open the assistant's turn. Raises DataError
        when a message is no mapping, or the template is broken or refuses the chat.
        """
        try:
            return _compiled(self.text).render(
                messages=[_with_reasoning(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        # The template is code that came with the checkpoint: it can raise any exception, such as
        # the OverflowError by which Jinja's sandbox refuses a range that is too long.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"the chat template cannot render this chat: {reason}") from error


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the keys that templates read."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is {message!r}; it must be a mapping with role and content")
    known = (message[name] for name in REASONING_FIELDS if message.get(name) is not None)
    reasoning = next(known, None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@lru_cache(maxsize=8)
def _compiled(text: str) -> "Template":
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote; its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own protocol)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=_fixed_date,
        # The bare `dict` type leads out of the sandbox through its attributes.
        dict=lambda *pairs, **named: dict(*pairs, **named),
    )
    return environment.from_string(text)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own `tojson` escapes HTML characters, and no model was trained on such text.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _fixed_date(pattern: str) -> str:
    from datetime import date

    return date(*FIXED_DATE).strftime(pattern)
