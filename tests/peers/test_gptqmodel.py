"""GPTQ and AWQ checkpoints in real gptqmodel: ours in its torch kernels, and its own read by us.

Its kernels' weights must be ours to the bit. Logits in fp32 differ by the order of sums only; AWQ's
kernel computes in fp16.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import QuantScheme
from helpers import compressed_models, tiny_models
from helpers.in_transformers import IDS, load, logits, plain

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).with_name("gptqmodel_run.py")
G4 = QuantScheme(group_size=32)
ASYMMETRIC = replace(G4, symmetric=False)
CHANNEL = QuantScheme(bits=8, granularity="channel", group_size=0)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 320}
BOUND, HALF_BOUND = 1e-4, 2e-2


def run(python: Path, folder: Path, *arguments: str) -> None:
    """Of the script; `folder` is where it works."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python), str(SCRIPT), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def kernels(python: Path, checkpoint: Path, how: str = "load") -> dict[str, Tensor]:
    """What gptqmodel makes of a checkpoint: logits, and the weight [N, K] of every module."""
    out = checkpoint.with_suffix(".out")
    save_file({"ids": IDS}, checkpoint.with_suffix(".rows"))
    run(python, out.parent, how, str(checkpoint), str(checkpoint.with_suffix(".rows")), str(out))
    return load_file(out)


def check(found: dict[str, Tensor], checkpoint: Path, source: Path, bound: float) -> set[str]:
    """Weights as ours to the bit and logits as transformers' with them; the quantized modules."""
    weights = open_weights(Checkpoint.open(checkpoint))
    model = load(source)
    state = {}
    modules = set()
    for name, _ in model.named_parameters():  # a tied head is none of its own
        quantized = weights.quantized(name)
        state[name] = weights.read(name).float()
        if quantized is None:
            continue
        modules.add(name.removesuffix(".weight"))
        kernel = found[name.removesuffix(".weight")]
        assert torch.equal(kernel.half(), quantized.dequantize(torch.float16)), name
        state[name] = quantized.dequantize()
    assert modules == set(found) - {"logits"}
    model.load_state_dict(state, strict=False)
    assert float((logits(model) - found["logits"]).abs().max()) <= bound
    return modules


def halves(source: Path, folder: Path) -> Path:
    """The same checkpoint in fp16, so that scales of its weights are."""
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((source / "config.json").read_text()), "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {k: v.half() for k, v in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _mixed(linear: Any) -> QuantScheme | None:
    """One layer's v in another scheme, every down dense."""
    if linear.role == "v" and ".0." in linear.name:
        return CHANNEL
    return None if linear.role == "down" else G4


def _without_down(linear: Any) -> QuantScheme | None:
    return None if linear.role == "down" else ASYMMETRIC


@pytest.mark.parametrize("fmt", ["gptq", "gptq_v2"])
def test_a_conv1d_turns_twice(gptqmodel_python: Path, fmt: str, tmp_path: Path) -> None:
    """The source stores [K, N], and so does the format."""
    sizes = {"n_embd": 128, "n_inner": 256}
    source = tiny_models.make("gpt2", tmp_path / "source", dtype="fp16", **sizes)
    written = compressed_models.write(source, tmp_path / "out", G4, fmt=fmt)
    found = kernels(gptqmodel_python, written.folder)
    weights: Any = open_weights(Checkpoint.open(written.folder))
    for name, tensor in written.quantized.items():
        assert torch.equal(
            found[name.removesuffix(".weight")].half(), tensor.dequantize(torch.float16)
        )
        assert weights.read(name).shape == written.source[name].shape
    assert (
        float(
            (logits(plain(written, source, tmp_path / "plain", rounded=False)) - found["logits"])
            .abs()
            .max()
        )
        <= BOUND
    )


@pytest.mark.parametrize(
    ("fmt", "choose", "options"),
    [
        ("gptq", G4, {}),
        ("gptq", G4, {"act_order": True}),
        ("gptq", QuantScheme(group_size=128), {}),  # 320 columns: the last group is short
        ("gptq", QuantScheme(bits=3, group_size=64), {}),
        ("gptq", CHANNEL, {"head": G4}),
        ("gptq", _mixed, {}),
        ("gptq_v2", ASYMMETRIC, {}),
        ("gptq_v2", QuantScheme(bits=2, group_size=16, symmetric=False), {"act_order": True}),
        ("gptq_v2", QuantScheme(bits=3, group_size=32, symmetric=False), {}),
        ("awq", ASYMMETRIC, {}),
        ("awq", G4, {}),
        ("awq", _without_down, {}),
        ("awq", QuantScheme(symmetric=False, granularity="channel", group_size=0), {}),
    ],
)
def test_its_kernels_have_our_weights(
    gptqmodel_python: Path, fmt: str, choose: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp16", **SIZES)
    written = compressed_models.write(source, tmp_path / "out", choose, fmt=fmt, **options)
    found = kernels(gptqmodel_python, written.folder)
    modules = check(found, written.folder, source, HALF_BOUND if fmt == "awq" else BOUND)
    assert modules == {name.removesuffix(".weight") for name in written.quantized}


@pytest.mark.parametrize(("fmt", "scheme"), [("gptq", G4), ("gptq_v2", ASYMMETRIC), ("awq", G4)])
def test_demo_model(
    gptqmodel_python: Path, demo_model: Path, fmt: str, scheme: QuantScheme, tmp_path: Path
) -> None:
    source = halves(demo_model, tmp_path / "source")
    written = compressed_models.write(source, tmp_path / "out", scheme, fmt=fmt)
    found = kernels(gptqmodel_python, written.folder)
    check(found, written.folder, source, 0.1 if fmt == "awq" else 1e-3)


@pytest.mark.parametrize(
    ("fmt", "choose"),
    [("gptq", G4), ("gptq_v2", ASYMMETRIC), ("awq", ASYMMETRIC), ("awq", _without_down)],
)
def test_in_transformers(gptqmodel_python: Path, fmt: str, choose: Any, tmp_path: Path) -> None:
    """transformers takes them with gptqmodel's kernels, for GPTQ with optimum."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp16", **SIZES)
    written = compressed_models.write(source, tmp_path / "out", choose, fmt=fmt)
    found = kernels(gptqmodel_python, written.folder, "transformers")
    check(found, written.folder, source, HALF_BOUND if fmt == "awq" else BOUND)


@pytest.mark.parametrize(
    ("settings", "fmt"),
    [
        ({"bits": 4, "group_size": 32}, "gptq"),
        (
            {
                "bits": 3,
                "group_size": 32,
                "sym": False,
                "desc_act": True,
                "format": "gptq_v2",
                "dynamic": {"-:.*down_proj": {}, "+:.*o_proj": {"bits": 8}},
            },
            "gptq_v2",
        ),
        ({"bits": 2, "group_size": 64, "sym": False, "format": "gptq_v2"}, "gptq_v2"),
        ({"bits": 8, "group_size": 128}, "gptq"),  # 320 columns: the last group is short
        ({"bits": 8, "group_size": -1, "desc_act": True}, "gptq"),
        ({"bits": 4, "group_size": 32, "sym": False, "format": "gemm"}, "awq"),
    ],
    ids=["v1", "v2 with rules", "2 bits", "short group", "8 bits a channel", "awq"],
)
def test_what_it_writes_reads_the_same(
    gptqmodel_python: Path, settings: dict[str, Any], fmt: str, tmp_path: Path
) -> None:
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp16", **SIZES)
    generator = torch.Generator().manual_seed(0)
    save_file({"ids": torch.randint(0, 120, (8, 64), generator=generator)}, tmp_path / "rows")
    arguments = [str(source), str(tmp_path / "rows"), str(tmp_path / "out"), json.dumps(settings)]
    run(gptqmodel_python, tmp_path, "quantize", *arguments)
    found = kernels(gptqmodel_python, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    weights: Any = open_weights(checkpoint)
    assert weights.format.name == fmt
    check(found, tmp_path / "out", source, HALF_BOUND if fmt == "awq" else BOUND)
    ordered = [n for n in checkpoint.shapes if n.endswith(".g_idx")]
    if settings.get("desc_act") and settings["group_size"] > 0:  # one group has no order
        assert any(
            weights.quantized(n.replace("g_idx", "weight")).g_idx is not None for n in ordered
        )
