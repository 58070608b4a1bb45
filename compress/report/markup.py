"""HTML by construction: every string is escaped unless it went through `raw`."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_VOID = frozenset({"meta", "br", "col", "hr"})


@dataclass(frozen=True, slots=True)
class Html:
    """Text that is already markup."""

    text: str


Node = Html | str | None


def raw(text: str) -> Html:
    """Trust `text` as markup: only for our own assets and literals."""
    return Html(text)


def el(tag: str, *children: Node, **attributes: str | int | float | bool | None) -> Html:
    """One element. `class_` and `for_` lose the underscore, others become hyphens (`aria_label`).

    An attribute that is None or False is left out; True gives an empty one.
    """
    shown = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{shown}>")
    return Html(f"<{tag}{shown}>{join(children).text}</{tag}>")


def join(children: Sequence[Node]) -> Html:
    """Children one after the other, None left out."""
    return Html("".join(_text(child) for child in children if child is not None))


def _text(child: Html | str) -> str:
    return child.text if isinstance(child, Html) else escape(child, quote=True)


def _attribute(name: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{escape(str(value), quote=True)}"'
