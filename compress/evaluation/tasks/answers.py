"""What an output answers, and whether that is right."""

import re
from collections.abc import Sequence
from decimal import Decimal

from compress.expressions import Expression

# 1,000 is one number, 5,6 are two; in 3-5 there is no minus.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\$?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)")

Answer = str | Decimal | None


def answer_of(output: str, extract: Expression | None, numbers: bool) -> Answer:
    """What an output answers; None where it has no answer.

    extract: its last match is taken, the first group where it has one; None takes the output.
    numbers: of that the last number, else the text without white space at its
    ends.
    """
    text = output if extract is None else extract.last(output)
    if text is None:
        return None
    return _last_number(text) if numbers else text.strip()


def is_right(answer: Answer, right: Sequence[str]) -> bool:
    """Whether an answer is one of the right texts; of a number, whether it has the value of one."""
    if answer is None:
        return False
    if isinstance(answer, Decimal):
        return answer in [_last_number(text) for text in right]
    return answer in [text.strip() for text in right]


def is_number(text: str) -> bool:
    """Whether a text is one number and nothing else."""
    return _NUMBER.fullmatch(text.strip()) is not None


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
