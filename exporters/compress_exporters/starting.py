"""Lines that start an artifact's runtime, to be copied: one block of text for each."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

PROMPT = "Once upon a time"
_GENAI = """\
import onnxruntime_genai as og
model = og.Model({folder})
tokenizer, parameters = og.Tokenizer(model), og.GeneratorParams(model)
tokenizer.update_options(add_special_tokens="true")
parameters.set_search_options(max_length=100)
generator = og.Generator(model, parameters)
generator.append_tokens(tokenizer.encode({prompt}))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))"""


def llama(file: Path, *, chats: bool) -> tuple[str, ...]:
    """llama.cpp's programs. chats: the file has a template for conversations."""
    model = shlex.quote(str(file))
    text = f"llama-completion -m {model} -p {shlex.quote(PROMPT)} -n 100 -no-cnv"
    return (*(() if chats else (text,)), f"llama-cli -m {model}", f"llama-server -m {model}")


def quantize(file: Path, imatrix: Path, *, again: bool) -> str:
    """llama.cpp's own rounding, by importance that was measured. again: some of the file is rounded
    already, which it does not take without a word."""
    places = (str(imatrix), str(file), f"{file.parent}-Q4_K_M.gguf")
    weighed, source, target = map(shlex.quote, places)
    allowed = "--allow-requantize " if again else ""
    return f"llama-quantize {allowed}--imatrix {weighed} {source} {target} Q4_K_M"


def genai(folder: Path) -> tuple[str, ...]:
    """onnxruntime-genai writes a text."""
    script = _GENAI.format(folder=json.dumps(str(folder)), prompt=json.dumps(PROMPT))
    return "pip install onnxruntime-genai", script


def onnxruntime(model: Path, entries: Mapping[str, str]) -> tuple[str, ...]:
    """A session of ONNX Runtime. entries: of its config, without which it does not open the
    graph."""
    lines = ["import onnxruntime as ort"]
    if entries:
        lines += ["options = ort.SessionOptions()"]
        lines += [
            f"options.add_session_config_entry({json.dumps(key)}, {json.dumps(value)})"
            for key, value in entries.items()
        ]
    more = ", options" if entries else ""
    lines += [f"session = ort.InferenceSession({json.dumps(str(model))}{more})"]
    return "pip install onnxruntime", "\n".join(lines)


def trtexec(commands: Mapping[str, Sequence[str]], folder: Path) -> tuple[str, ...]:
    """A command that builds an engine, for each of them. commands: as in build.json, whose files
    have no folder."""
    return tuple(
        " \\\n  ".join(shlex.quote(_placed(word, folder)) for word in command)
        for command in commands.values()
    )


def _placed(word: str, folder: Path) -> str:
    name, given, file = word.partition("=")
    return f"{name}={folder / file}" if given and name in ("--onnx", "--saveEngine") else word
