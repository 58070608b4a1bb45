"""Importance that we measure, in llama-quantize and beside llama-imatrix's own."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from torch import Tensor

from compress.verbs import ArtifactTarget, export_artifact
from compress_exporters.exporter import Options
from compress_exporters.gguf.imatrix import read_imatrix
from helpers import tiny_models

pytestmark = pytest.mark.peers

REPO = Path(__file__).resolve().parents[2]
STORY = "the old cat sat by the door and looked at the rain for a long time\n"
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 512},
    "mixtral": {"hidden_size": 256, "intermediate_size": 512},
}


def ran(tools: Path, name: str, *words: object) -> str:
    """What a program of llama.cpp says; a failure is a line of it, too."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tools)}
    command = [str(tools / name), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def measured(model: Path, text: Path, out: Path, **options: Any) -> Path:
    """Its weights in a file for llama.cpp, and importance at `out`."""
    how = Options(text=str(text), imatrix_out=str(out), **options)
    folder = out.with_name(f"of {out.name}")
    export_artifact(model, ArtifactTarget("gguf", how), folder, verify=False)
    return folder / "model.gguf"


def stored(path: Path) -> dict[str, Tensor]:
    return {x.name: torch.from_numpy(x.data.copy()) for x in GGUFReader(path).tensors}


@pytest.mark.parametrize("family", WIDE)
def test_llama_quantize_rounds_by_it(family: str, tools: Path, tmp_path: Path) -> None:
    model = tiny_models.make(family, tmp_path / "model", dtype="fp32", **WIDE[family])
    (tmp_path / "story.txt").write_text(STORY * 200)
    texts = tmp_path / "story.txt"
    source = measured(model, texts, tmp_path / "ours.gguf", dtype="fp16")
    measured(model, texts, tmp_path / "ours.dat", dtype="fp16")
    merging = ("-m", source, "--in-file", tmp_path / "ours.gguf", "-o", tmp_path / "theirs.gguf")
    ran(tools, "llama-imatrix", *merging)

    def rounded(kind: str, imatrix: str) -> dict[str, Tensor]:
        target = tmp_path / f"{kind} {imatrix}"
        weighed = ("--imatrix", tmp_path / imatrix) if imatrix else ()
        said = ran(tools, "llama-quantize", *weighed, source, target, kind)
        assert target.is_file(), said
        if imatrix:
            entries = len(read_imatrix(tmp_path / imatrix))
            assert f"have importance matrix data with {entries} entries" in said
        return stored(target)

    # Types of two bits are refused without importance.
    alone = tmp_path / "alone"
    refused = ran(tools, "llama-quantize", source, alone, "IQ2_XS")
    assert "this quantization requires an imatrix" in refused
    for kind in ("IQ2_XS", "Q4_K_S"):
        found = {name: rounded(kind, name) for name in ("ours.gguf", "theirs.gguf", "ours.dat")}
        first = found["ours.gguf"]
        for name, values in first.items():
            assert torch.equal(values, found["theirs.gguf"][name]), name
            # The older form has other fp32 numbers, by a unit in the last place.
            same = values == found["ours.dat"][name]
            assert float(same.double().mean()) > 0.99, name
    plain = rounded("Q4_K_S", "")
    differ = {x for x, y in first.items() if not torch.equal(y, plain[x])}
    assert {"output.weight", "blk.0.attn_q.weight", "blk.1.attn_output.weight"} <= differ
    assert any("ffn_down" in name for name in differ)


def test_it_is_what_llama_imatrix_measures(tools: Path, tmp_path: Path) -> None:
    """In most columns: our text begins with a token of its own, which drives a few very far."""
    (tmp_path / "story.txt").write_text(STORY * 500)
    model, text = REPO / "examples" / "tale-6m", tmp_path / "story.txt"
    source = measured(model, text, tmp_path / "ours.gguf", dtype="fp32")
    theirs = tmp_path / "theirs.gguf"
    ran(tools, "llama-imatrix", "-m", source, "-f", text, "-o", theirs, "-c", 512)
    ours, wanted = read_imatrix(tmp_path / "ours.gguf"), read_imatrix(theirs)
    assert ours.keys() - wanted.keys() == {"token_embd.weight"}
    assert wanted.keys() <= ours.keys()
    for name, values in wanted.items():
        assert values.shape == ours[name].shape
        assert float((ours[name] / values).median()) == pytest.approx(1, abs=0.03), name
