"""Messages in the words of Python.

Refusals are written for the command line, as most of their readers are there. What they advise is
an option, `--resume`, and in Python that is an argument. Each way of saying an option is translated
here, whatever the message around it; a test finds the options that no row translates.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from compress.errors import CompressError

RESUMED_RUN = "options=RunOptions(resume=True)"
Translate = Callable[[re.Match[str]], str]
# A value behind an option: quoted as for a shell, or one word.
_VALUE = r"(?:'(?P<quoted>[^']*)'|(?P<word>[^\s;,()]+))"


def in_python(message: str) -> str:
    """The message with every option of the command line as the argument that it is here."""
    for pattern, translate in _RULES.items():
        message = re.sub(pattern, translate, message)
    return message


@contextmanager
def python_words(resumed: str = RESUMED_RUN) -> Iterator[None]:
    """CompressErrors that pass are worded for Python; type, cause and traceback stay.

    resumed: the argument with which the verb goes on.
    """
    try:
        yield
    except CompressError as error:
        said = (in_python(x) if isinstance(x, str) else x for x in error.args)
        error.args = tuple(
            x.replace(RESUMED_RUN, resumed) if isinstance(x, str) else x for x in said
        )
        raise


def _value(found: re.Match[str]) -> str:
    return found["quoted"] or found["word"]


def _text(argument: str) -> Translate:
    """The argument with the text that followed the option."""
    return lambda found: argument.format(repr(_value(found)))


def _number(argument: str) -> Translate:
    return lambda found: argument.format(_value(found))


def _plain(words: str) -> Translate:
    return lambda found: words


# Pattern -> what it is in Python, the longest first. A value behind an option goes along.
_RULES: Mapping[str, Translate] = MappingProxyType(
    {
        rf"--set {_VALUE}": _text("overrides=[{}]"),
        rf"--to (?=[a-z]){_VALUE}": _text("to={}"),
        rf"--dtype (?=[a-z]+\d){_VALUE}": _text("dtype={} in options"),
        rf"--device (?=c){_VALUE}": _text("device={} in options"),
        rf"--max-context (?=\d){_VALUE}": _number("options=ExportOptions(max_context={})"),
        rf"--accuracy-level (?=\d){_VALUE}": _number("options=ExportOptions(accuracy_level={})"),
        rf"--batch (?=\d){_VALUE}": _number("batches=[{}]"),
        r"add --resume": _plain("give options=RunOptions(resume=True)"),
        r"run without --resume": _plain("call it without resume=True in options"),
        r"run again with --resume": _plain("call it again with options=RunOptions(resume=True)"),
        r"go on with --resume": _plain("go on with options=RunOptions(resume=True)"),
        r"--resume": _plain("options=RunOptions(resume=True)"),
        r"add --overwrite": _plain("give overwrite=True in options"),
        r"--overwrite": _plain("overwrite=True in options"),
        r"add --round-scales": _plain("give options=ExportOptions(round_scales=True)"),
        r"--round-scales": _plain("options=ExportOptions(round_scales=True)"),
        r"--no-verify": _plain("options=ExportOptions(verify=False)"),
        r"--in-place": _plain("in_place=True in options"),
        r"--shard-size": _plain("shard_size in options"),
        r"--max-context": _plain("max_context in options"),
        r"--accuracy-level": _plain("accuracy_level in options"),
        r"(?:\(eval: )?--max-(tokens|items)\)?": lambda m: f"max_{m[1]} in EvaluationOptions",
        r"--no-cache": _plain("cache=False in options"),
        r"--imatrix-out FILE": _plain("imatrix_out=FILE in options"),
        r"--imatrix-out": _plain("imatrix_out in options"),
        r"--imatrix FILE": _plain("imatrix=FILE in options"),
        r"--text FILE": _plain("text=FILE in options"),
        r"--text(?= is .* rounded (to --type|by one))": _plain("text in options"),
        r"--embedding f16": _plain("embedding='f16' in options"),
        r"--(embedding|imatrix|type)": lambda m: f"{m[1]} in options",
        r"add --trainings": _plain("give asked=CompareOptions(trainings=True)"),
        r"--trainings": _plain("trainings=True in asked"),
        r"--recipe": _plain("recipes"),
        r"--for": _plain("runtime"),
        r"--kv-dtype": _plain("kv_dtype in options"),
        r"--dtype": _plain("dtype in options"),
        r"--device": _plain("device in options"),
        r"--math": _plain("math in options"),
        r"--batch": _plain("batches"),
        r"--text": _plain("texts"),
        r"--task": _plain("tasks"),
        r"--set": _plain("overrides"),
        r"--out": _plain("out"),
        r"--to": _plain("to"),
    }
)
