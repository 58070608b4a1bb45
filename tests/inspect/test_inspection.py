"""`inspect` says what is there, to the byte, and what it could not find out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.cli.main import main
from compress.errors import CheckpointError
from compress.inspect.facts import architecture_of
from compress.verbs import inspect_checkpoint, inspect_table, run
from helpers.engine import hybrids
from helpers.short_runs import RTN, recipe


def test_inspecting_a_source_and_a_result(tiny, tmp_path: Path) -> None:
    facts = inspect_checkpoint(tiny("llama"))
    assert facts["quantization"] is None
    head = {"name": "lm_head", "role": "head", "shape": [256, 64], "stored": "bf16"}
    assert head | {"bytes": 2 * 256 * 64} in facts["layers"]
    assert "damaged" not in facts
    run(recipe(RTN), tiny("llama"), tmp_path / "out")
    facts = inspect_checkpoint(tmp_path / "out", verify=True)
    assert facts["quantization"] == "compressed-tensors"
    assert facts["schemes"] == {"int4 sym g32": 14, "bf16": 2}
    assert facts["damaged"] == {}
    table = inspect_table(facts)
    assert "stored as     14 x int4 sym g32, 2 x bf16" in table
    assert "values        all finite" in table
    assert "q          64 x 64   2      int4 sym g32  " in table
    assert "lm_head" not in table
    json.dumps(facts)
    # Every stored byte but those of norms and headers is that of a layer.
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    norms = sum(x.nbytes for name, x in tensors.items() if "norm" in name)
    assert sum(x["bytes"] for x in facts["layers"]) + norms == sum(
        x.nbytes for x in tensors.values()
    )


def test_inspecting_layer_by_layer(tiny, tmp_path: Path) -> None:
    run(recipe(RTN), tiny("llama"), tmp_path / "out")
    table = inspect_table(inspect_checkpoint(tmp_path / "out"), modules=True).splitlines()
    start = table.index(next(line for line in table if line.startswith("layer ")))
    assert table[start].split() == ["layer", "shape", "stored", "as", "bytes"]
    assert len(table) - start - 1 == 16
    assert table[start + 1].split() == [
        *("model.layers.0.self_attn.q_proj", "64", "x", "64", "int4", "sym", "g32"),
        str(64 * 64 // 2 + 2 * 64 * 2 + 16),
    ]


def test_a_latent_is_what_keys_and_values_are_made_of(tiny) -> None:
    source = tiny("deepseek_v3")
    facts = inspect_checkpoint(source)
    assert facts["decoder"]["latent"] == {"rank": 32, "rotated": 8}
    assert "hidden 64, 4 heads of 24, latent 32 + 8, ffn 96" in inspect_table(facts)
    checkpoint = Checkpoint.open(source)
    said = architecture_of(describe(checkpoint.config, checkpoint.shapes))
    assert "hidden 64, 4 heads, latent 32 + 8, ffn 96" in said


def test_inspecting_names_every_damaged_tensor(tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny("llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    tensors["lm_head.weight"][5, 7] = float("inf")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    facts = inspect_checkpoint(source, verify=True)
    assert facts["damaged"] == {
        "lm_head.weight": "0 NaN and 1 infinite values, the first at [5, 7]",
        "model.norm.weight": "1 NaN and 0 infinite values, the first at [3]",
    }
    assert "damaged       lm_head.weight: 0 NaN and 1 infinite" in inspect_table(facts)


def test_inspecting_what_cannot_be_described(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny("llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "bits": 4}
    (source / "config.json").write_text(json.dumps(config))
    facts = inspect_checkpoint(source)
    assert facts["quantization"] == "hqq"
    assert "'hqq'" in facts["decoder"]
    shown = inspect_table(facts)
    assert "decoder       not described:" in shown
    assert "layers        not listed, for want of the decoder; the rest is whole" in shown
    assert "layers" not in facts
    assert main(["inspect", str(source)]) == 1
    assert "quantization  hqq" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect_checkpoint(tmp_path / "nowhere")


def test_a_dense_checkpoint_is_told_without_torch(tiny) -> None:
    script = (
        "import sys; from compress.cli.main import main;"
        f"code = main(['inspect', {str(tiny('llama'))!r}, '--modules']);"
        "sys.exit(code or ', '.join({'torch', 'numpy', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "model.layers.1.mlp.down_proj" in done.stdout


def test_sizes_that_differ_are_told_block_by_block(tiny, tmp_path: Path) -> None:
    """Those of the decoder are the largest then."""
    assert "by_block" not in inspect_checkpoint(tiny("llama"))["decoder"]
    with hybrids.known():
        facts = inspect_checkpoint(hybrids.make(tmp_path, "two kinds"))
    assert facts["decoder"]["by_block"] == {
        "heads": [8, 4, 8, 4],
        "kv_heads": [4, 2, 4, 2],
        "key_width": [16, 24, 16, 24],
        "value_width": [16, 24, 16, 24],
        "intermediate": [96, 64, 32, 96],
    }
    assert facts["kv_bytes_per_token"] == 4 * 2 * (2 * 4 * 16 + 2 * 2 * 24)
    table = inspect_table(facts)
    assert "4 blocks, hidden 64, 8 heads (4 KV) of 24, ffn 96" in table
    assert "by block      kv_heads 2 to 4" in table
