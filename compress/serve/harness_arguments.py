"""The arguments of `lm_eval --model compress_model --model_args …`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from compress.arch.text_config import text_config
from compress.checkpoint.jsonfile import read_object
from compress.errors import RequestError
from compress.machine.device import AUTO, Device, settle

Dtype = Literal["fp32", "bf16", "fp16"]

# Names that the harness's own models use for a dtype, and ours.
_DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        "float32": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16",
        "fp32": "fp32",
        "bf16": "bf16",
        "fp16": "fp16",
    }
)
# What the harness passes to every model and has no meaning here -> the values that need no notice.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"batch_size": (1, "1"), "max_batch_size": (), "trust_remote_code": (False,)}
)
_WORDS: Mapping[type, str] = MappingProxyType(
    {str: "text", int: "a whole number", bool: "True or False", Mapping: "a map"}
)


@dataclass(frozen=True, slots=True)
class HarnessArguments:
    """Named as the arguments of the harness's `hf` model, of which these are a part.

    pretrained: a folder or a hub id. tokenizer: another folder with a tokenizer.
    dtype: "auto" is what the checkpoint says. max_length: tokens that are read at most; None: as
    many as the model reads. max_gen_toks: for tasks that set none. prefix_token_id: what stands
    before a text without context. think_end_token: text, or digits for an id; an answer begins
    behind it. cache_tokens: see compress.open_model.
    """

    pretrained: str
    tokenizer: str | None = None
    dtype: str = "fp32"
    device: str = "auto"
    max_length: int | None = None
    max_gen_toks: int = 256
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    enable_thinking: bool | None = None
    think_end_token: str | None = None
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    cache_tokens: int | None = None


_KINDS: Mapping[str, type] = MappingProxyType(
    {
        "pretrained": str,
        "tokenizer": str,
        "dtype": str,
        "device": str,
        "max_length": int,
        "max_gen_toks": int,
        "add_bos_token": bool,
        "prefix_token_id": int,
        "enable_thinking": bool,
        "think_end_token": str,
        "chat_template_args": Mapping,
        "cache_tokens": int,
    }
)
_AT_LEAST: Mapping[str, int] = MappingProxyType(
    {"max_length": 1, "max_gen_toks": 1, "prefix_token_id": 0, "cache_tokens": 1}
)


def read_arguments(given: Mapping[str, Any]) -> tuple[HarnessArguments, tuple[str, ...]]:
    """The arguments, and a line for each that has no effect.

    RequestError for a name or a value that is none.
    """
    taken, notices = {}, []
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            if value is not None and value not in _WITHOUT_EFFECT[name]:
                notices.append(f"{name}={value} has no effect: {_why(name)}")
        elif name not in _KINDS:
            known = ", ".join(entry.name for entry in fields(HarnessArguments))
            raise RequestError(f"{name}={value} is no argument of compress_model; it has {known}")
        elif value is not None:
            taken[name] = _checked(name, value)
    if "pretrained" not in taken:
        raise RequestError("no pretrained among the model_args; give pretrained=FOLDER")
    arguments = HarnessArguments(**taken)
    if arguments.enable_thinking and arguments.think_end_token is None:
        raise RequestError(
            "enable_thinking=True needs think_end_token=TEXT, the end of what is no answer yet"
        )
    return arguments, tuple(notices)


def dtype_of(asked: str, folder: Path) -> Dtype:
    """ "fp32", "bf16" or "fp16"; "auto" is the one that config.json names, else "fp32"."""
    if asked != "auto":
        return _DTYPES[asked]
    config = read_object(folder / "config.json")
    for source in (config, text_config(config)[1]):
        found = str(source.get("dtype") or source.get("torch_dtype"))
        if found in _DTYPES:
            return _DTYPES[found]
    return "fp32"


def device_of(asked: str) -> tuple[str, tuple[str, ...]]:
    """The device, and a line where it is another than asked. The harness's command asks for cuda:0
    where nobody names one."""
    import torch

    if asked == "cuda:0" and not torch.cuda.is_available():
        return "cpu", (
            "torch sees no CUDA device, which is the harness's default: the CPU computes",
        )
    found = settle(asked) if asked == AUTO else Device(asked)
    return found.name, found.notices


def max_length_of(arguments: HarnessArguments, context: int) -> int:
    """Tokens that are read at most, of `context` that the model reads."""
    asked = arguments.max_length
    if asked is not None and asked > context:
        raise RequestError(
            f"max_length is {asked}: {arguments.pretrained} reads {context} tokens; leave it out"
        )
    return context if asked is None else asked


def _checked(name: str, value: Any) -> Any:
    kind = _KINDS[name]
    # The harness reads digits as a number and other values as text.
    value = str(value) if kind is str and type(value) in (int, float) else value
    exact = type(value) is kind if kind in (int, bool) else isinstance(value, kind)
    if not exact or (name in _AT_LEAST and value < _AT_LEAST[name]):
        least = f" from {_AT_LEAST[name]} on" if name in _AT_LEAST else ""
        raise RequestError(f"{name}={value!r}: {_WORDS[kind]}{least} is needed")
    if name == "dtype" and value != "auto" and value not in _DTYPES:
        raise RequestError(f"dtype={value}: it is auto or one of {', '.join(_DTYPES)}")
    return value


def _why(name: str) -> str:
    if name == "trust_remote_code":
        return "code that comes with a checkpoint is never run"
    return "the engine fills its steps by itself"
