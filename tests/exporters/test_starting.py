"""Lines that start a runtime: they are there for every target, and do what they are for."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress_exporters import starting
from compress_exporters.exporter import Options
from compress_exporters.table import EXPORTERS
from helpers import tiny_models

# What the first and the last block begin with.
BLOCKS = {
    "onnx": ("pip install onnxruntime", "import onnxruntime as ort\n"),
    "onnx-genai": ("pip install onnxruntime-genai", "import onnxruntime_genai as og\n"),
    "tensorrt": ("trtexec ", "trtexec "),
    "gguf": ("llama-completion -m ", "llama-server -m "),
}


@pytest.mark.parametrize("target", EXPORTERS)
def test_every_target_has_blocks_with_real_paths(target: str, tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", hidden_size=64)
    planned = EXPORTERS[target].plan(open_weights(Checkpoint.open(model)), Options())
    blocks = planned.start(Path("/my out"))
    first, last = BLOCKS[target]
    assert blocks[0].startswith(first)
    assert blocks[-1].startswith(last)
    assert "/my out" in blocks[-1]
    if last.startswith(("trtexec", "llama")):
        assert any(word.startswith("/my out") or "=/my out/" in word for word in
                   shlex.split(blocks[-1].replace("\\\n", "")))  # fmt: skip


def test_a_session_is_opened_by_its_lines(tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model")
    planned = EXPORTERS["onnx"].plan(open_weights(Checkpoint.open(model)), Options())
    folder = tmp_path / "it's"
    folder.mkdir()
    planned.write(folder, lambda *_: None)
    script = planned.start(folder)[1] + "\nprint(len(session.get_inputs()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "7"


def test_a_graph_that_needs_a_setting_is_opened_with_it() -> None:
    _, script = starting.onnxruntime(Path("a/model.onnx"), {"session.disable_quant_qdq": "1"})
    assert script.splitlines()[1:] == [
        "options = ort.SessionOptions()",
        'options.add_session_config_entry("session.disable_quant_qdq", "1")',
        'session = ort.InferenceSession("a/model.onnx", options)',
    ]


def test_a_model_that_converses_is_not_asked_to_complete() -> None:
    assert starting.llama(Path("a b.gguf"), chats=True) == (
        "llama-cli -m 'a b.gguf'",
        "llama-server -m 'a b.gguf'",
    )
