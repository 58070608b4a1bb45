"""Our GGUF files in real llama.cpp, as llama-cpp-python compiles it: logits, tokens, texts, ends.

The reference is our decoder in fp32 on the numbers that codes and scales mean. In fp32 llama.cpp
computes the same; inputs of blocks it rounds to 8 bits, and those of fp16 weights to fp16.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from compress import verbs
from compress.quant.scheme import PRESETS, QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.reference import Reference
from compress_exporters.reference import text as random_ids
from helpers import compressed_models, tiny_models
from helpers.exporters.exports import ASYM, SYM
from helpers.exporters.gguf_files import change, sentencepiece, source

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("llama_cpp_run.py")
GREEDY = 16
TEXTS = (
    "Once upon a time, there was a dog.",
    " it's I'LL we'Re  two  spaces\n\n\tand tabs \n ",
    "1 12 123 1234 12345.67 x1y22",
    "naïve Ünïcode ÉCOLE héLLo été 中文字 русский 🦙 'quoted' _under_ a/b //",
)


def asked(
    python: Path, file: Path, ids: list[int], *, greedy: int = GREEDY, texts: Any = ()
) -> dict[str, Any]:
    """What the script answers; it works beside the file."""
    job, answer = file.with_suffix(".job"), file.with_suffix(".answer")
    given = {"model": str(file), "ids": ids, "greedy": greedy, "texts": list(texts)}
    job.write_text(json.dumps(given))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(SCRIPT), str(job), str(answer)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def exported(folder: Path, out: Path, dtype: Any = "fp32") -> Path:
    """model.gguf of a checkpoint, as `compress-model export --to gguf` writes it."""
    options = Options(dtype=dtype, round_scales=True)
    verbs.export_artifact(folder, verbs.ArtifactTarget("gguf", options), out, verify=False)
    return out / "model.gguf"


def compared(python: Path, folder: Path, file: Path) -> float:
    """Norm of the logits' difference by that of the logits; greedy tokens must be those that our
    decoder chooses, but where its two best are nearer than the difference."""
    weights = source(folder)
    reference, ids = Reference.load(weights), random_ids(weights)
    found = asked(python, file, ids)
    want = reference.logits(ids)
    difference = torch.tensor(found["logits"]) - want
    slack = 2 * float(difference.abs().max())
    assert reference.apart(ids, found["greedy"], slack) is None
    return float(difference.norm() / want.norm())


FAMILIES: dict[str, dict[str, Any]] = {
    **{x: {} for x in ("llama", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe", "olmo2")},
    "gemma2": {"tied": True, "sliding_window": 5},
    "gemma3_text": {"tied": True, "sliding_window": 5},
    "gpt2": {},
}
# llama.cpp takes GELU from a table in fp16.
PLAIN, TABLE = 3e-6, 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_families(llama_cpp_python: Path, family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path / "model", dtype="fp32", **FAMILIES[family])
    error = compared(llama_cpp_python, folder, exported(folder, tmp_path / "out"))
    assert error < (TABLE if family.startswith(("gemma", "gpt2")) else PLAIN)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 3e-6), ("fp16", 1e-3)])
def test_the_demo_model(
    llama_cpp_python: Path, demo_model: Path, dtype: str, bound: float, tmp_path: Path
) -> None:
    file = exported(demo_model, tmp_path / "out", dtype)
    assert compared(llama_cpp_python, demo_model, file) < bound


SCHEMES: dict[str, tuple[QuantScheme, float]] = {
    "Q4_0": (SYM, 0.015),
    "Q4_1": (ASYM, 0.015),
    "Q8_0": (PRESETS["W8A16"], 0.015),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_codes_of_the_demo_model(
    llama_cpp_python: Path, demo_model: Path, kind: str, tmp_path: Path
) -> None:
    scheme, bound = SCHEMES[kind]
    folder = compressed_models.write(demo_model, tmp_path / "coded", scheme).folder
    file = exported(folder, tmp_path / "out")
    assert compared(llama_cpp_python, folder, file) < bound


def test_texts_of_the_demo_model(llama_cpp_python: Path, demo_model: Path, tmp_path: Path) -> None:
    found = asked(llama_cpp_python, exported(demo_model, tmp_path / "out"), [1], texts=TEXTS)
    ours = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert found["tokens"] == [ours.encode(text).ids for text in TEXTS]


def test_texts_of_sentencepiece(llama_cpp_python: Path, tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32", vocab_size=320)
    sentencepiece(folder)
    texts = (*TEXTS, "the dog the thehe he", "hthe", " the")
    found = asked(llama_cpp_python, exported(folder, tmp_path / "out"), [1], texts=texts)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert found["tokens"] == [ours.encode(text).ids for text in texts]


def test_all_ends_and_the_chat_template_arrive(llama_cpp_python: Path, tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    change(folder, "generation_config.json", eos_token_id=[0, 7, 9])
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    found = asked(llama_cpp_python, exported(folder, tmp_path / "out"), [1])
    assert found["metadata"]["tokenizer.chat_template"] == template
    assert found["ends"] == [0, 7, 9]
