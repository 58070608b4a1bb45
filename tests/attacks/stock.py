"""Sound models, texts and tasks that cases begin with: made once, copied into a case's folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from compress_kernels.cpu import build, library
from helpers import tiny_models
from helpers.fuzzing import Sound

WORDS = "once upon a time a small dog and an old cat sat by the door in the rain . "
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DENSE = ("llama", "moe", "gpt2")  # to compress
GRAPHS = ("onnx", "onnx-genai")
# Name -> kind of fuzzing.KINDS, and what it can be exported to beside dense; all have one block.
QUANTIZED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "ct": ("ct-sym", ("gptq", "gptq_v2", "awq", "modelopt", *GRAPHS, "gguf")),
        "mixed": ("ct-mixed", ()),
        "w8a8": ("ct-w8a8", ("modelopt",)),
        "gptq": ("gptq-asym", ("compressed-tensors", "gptq_v2", "awq", *GRAPHS)),
        "awq": ("awq-asym", ("compressed-tensors", "gptq", "gptq_v2")),
        "fp8": ("fp8-block", ("compressed-tensors",)),
        "nvfp4": ("modelopt-nvfp4", ("compressed-tensors",)),
        "int8": ("bitsandbytes", ()),
    }
)
TASKS: Mapping[str, object] = MappingProxyType(
    {
        "choice.jsonl": {"query": "the dog", "choices": ["sat by the door", "rain"], "gold": 0},
        "partial.jsonl": {"context_options": ["a dog", "a cat"], "continuation": "sat", "gold": 1},
        "next.jsonl": {"context": "once upon a", "continuation": "time"},
        "answer.jsonl": {"context": "one and one", "answer": "2"},
    }
)
TEXT = "words.txt"
CACHE = "cache"


def make(folder: Path) -> Path:
    """All of it, below `folder`."""
    layers = {"num_hidden_layers": 1}
    tiny_models.make("llama", folder / "llama", num_hidden_layers=2)
    (folder / "llama" / "chat_template.jinja").write_text(TEMPLATE)
    tiny_models.make("mixtral", folder / "moe", **layers)
    tiny_models.make("gpt2", folder / "gpt2", n_layer=1)
    tiny_models.make("llama", folder / "sharded", max_shard_size="60KB", **layers)
    for name, (kind, _) in QUANTIZED.items():
        Sound.make(kind, folder / "made" / name)
        shutil.move(folder / "made" / name, folder / name)
        shutil.rmtree(folder / "made")
    (folder / TEXT).write_text("".join(WORDS[i:] + WORDS[:i] for i in range(0, 60, 3)))
    for name, row in TASKS.items():
        (folder / name).write_text(f"{json.dumps(row)}\n" * 3)
    if library.native().library is not None:  # compiled kernels, for processes of their own
        kept = folder / CACHE / "compress-model"
        kept.mkdir(parents=True)
        shutil.copy(build.library_path(), kept)
    return folder


def lay(stock: Path, name: str, target: Path) -> None:
    """A copy of one of them."""
    if (stock / name).is_dir():
        shutil.copytree(stock / name, target)
    else:
        shutil.copy(stock / name, target)
