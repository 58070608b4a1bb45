"""Latent attention as a graph: what real transformers computes, from one tensor a layer."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.verbs import ArtifactTarget, export_artifact
from compress_exporters.exporter import Options, Proof, Written
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.onnx.saving import DATA, MODEL
from compress_exporters.table import EXPORTERS
from helpers import compressed_models, tiny_models
from helpers.exporters.onnx_graphs import opened
from helpers.forward_cases import CASES, plain_greedy, rope, text, transformers_model

LATENT = {case: options for case, (family, options) in CASES.items() if family == "deepseek_v3"}
RANK, ROTATED = 32, 8
QUERIES: dict[str, Any] = {"q_lora_rank": 32, "bias": True}
LONG = rope(
    rope_type="longrope",
    short_factor=[1.0, 1.5, 1.0, 2.0],
    long_factor=[2.0, 4.0, 8.0, 9.0],
    original_max_position_embeddings=24,
)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def tiny(folder: Path, **options: Any) -> Path:
    return tiny_models.make("deepseek_v3", folder, **{"dtype": "fp32", **options})


def wanted(folder: Path, ids: torch.Tensor) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return transformers_model(folder)(ids).logits.numpy()


def proved(model: Path, out: Path, options: Options | None = None) -> tuple[Proof, Written]:
    """The proof, and what the export says of itself."""
    out.mkdir()
    source = open_weights(Checkpoint.open(model))
    planned = EXPORTERS["onnx"].plan(source, options or Options())
    written = planned.write(out, lambda *_: None)
    return planned.verify(out), written


@pytest.mark.parametrize("case", LATENT)
def test_a_prompt_and_tokens_behind_it(case: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", **LATENT[case])
    runner, ids = opened(folder, tmp_path / "out"), text(30)[None]
    onnx.checker.check_model(tmp_path / "out" / MODEL, full_check=True)
    past, found, at = None, [], 0
    for size in (17, 1, 1, 11):
        part = ids[:, at : at + size].numpy()
        logits, past = runner.step(part, np.ones((1, at + size), np.int64), past)
        found.append(logits)
        at += size
    assert np.abs(np.concatenate(found, axis=1) - wanted(folder, ids)).max() < 1e-5
    assert past is not None
    # One tensor a layer, and nothing that heads make of it.
    assert {key: x.shape for key, x in past.items()} == {
        f"past_key_values.{i}.latent": (1, 1, 30, RANK + ROTATED) for i in range(2)
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, QUERIES], ids=["plain", "latent of queries"])
def test_padding_on_either_side_changes_nothing(
    options: dict[str, Any], side: str, tmp_path: Path
) -> None:
    """Texts of 20 and of 11 tokens in one batch, then four tokens more of each."""
    folder = tiny(tmp_path / "model", **options)
    runner, texts = opened(folder, tmp_path / "out"), [text(24), text(40)[25:]]
    ids, mask = np.zeros((2, 20), np.int64), np.zeros((2, 20), np.int64)
    for row, (whole, count) in enumerate(zip(texts, (20, 11), strict=True)):
        place = slice(20 - count, 20) if side == "left" else slice(0, count)
        ids[row, place], mask[row, place] = whole[:count].numpy(), 1
    logits, past = runner.step(ids, mask)
    found = [[logits[row][mask[row] == 1]] for row in range(2)]
    for i in range(4):
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
        new = np.array([[int(texts[0][20 + i])], [int(texts[1][11 + i])]])
        logits, past = runner.step(new, mask, past)
        for row in range(2):
            found[row].append(logits[row])
    for row, whole in enumerate(texts):
        want = wanted(folder, whole[None])[0]
        assert np.abs(np.concatenate(found[row]) - want).max() < 1e-5


def test_tokens_beyond_the_length_that_changes_the_frequencies(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", **LONG)
    runner, model = opened(folder, tmp_path / "out"), transformers_model(folder)
    ids = text(14)[None]
    # Both rotate anew what comes behind the 24th token, and leave what is in the past.
    assert runner.greedy(ids.numpy(), 20) == plain_greedy(model, ids[0].tolist(), 20)[14:]
    assert (
        np.abs(runner.whole(text(40)[None].numpy()) - wanted(folder, text(40)[None])).max() < 1e-5
    )


def test_latents_that_fp16_is_too_coarse_for(tmp_path: Path) -> None:
    """As a retrofit stores them: rows of 2^-23 of their size and a weight of 8192 behind."""
    folder = tiny(tmp_path / "model", **QUERIES)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        rows = {"q_a_proj": len(tensor), "kv_a_proj_with_mqa": RANK}.get(name.split(".")[-2], 0)
        tensor[:rows] *= 2.0**-23
        if "a_layernorm" in name:
            tensor.fill_(8192.0)
    assert any(0 < x.abs().mean() < 1e-7 for x in tensors.values())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = text()[None]
    want = wanted(folder, ids)
    for dtype, bound in (("fp32", 1e-5), ("fp16", 1e-2)):
        runner = opened(folder, tmp_path / dtype, Options(dtype=dtype))
        onnx.checker.check_model(tmp_path / dtype / MODEL, full_check=True)
        assert np.abs(runner.whole(ids.numpy()) - want).max() < bound * np.abs(want).max()
        types = {x.name: x.type for x in runner.session.get_inputs()}
        kind = {"fp32": "tensor(float)", "fp16": "tensor(float16)"}[dtype]
        assert types["past_key_values.1.latent"] == kind


def test_proof_of_a_good_graph(tmp_path: Path) -> None:
    proof, written = proved(tiny(tmp_path / "model"), tmp_path / "out")
    assert proof.level == "tokens"
    assert proof.max_logit_error is not None
    assert 0 < proof.max_logit_error < 1e-5
    assert sum("padded" in line for line in proof.detail) == 2
    assert written.fused == {"RotaryEmbedding": 4, "RMSNormalization": 7}
    why = "of latents: heads are rows of one product with all latents"
    assert written.unfused == {"Attention": why}
    assert not written.notes


SCHEMES = {
    "int4": QuantScheme(group_size=32),
    "W8A8": PRESETS["W8A8"],
    "W8A8_STATIC": PRESETS["W8A8_STATIC"],
    "FP8_DYNAMIC": PRESETS["FP8_DYNAMIC"],
    "NVFP4": PRESETS["NVFP4A16"],
}


QUICK = {("int4", "fp16"), ("W8A8", "fp32")}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.long)
        for case in product(SCHEMES, ("fp32", "fp16"))
    ],
)
def test_proof_of_quantized_graphs(scheme: str, dtype: Any, tmp_path: Path) -> None:
    """What is cut into heads is decoded, and latents are rounded as its inputs."""
    dense = tiny(tmp_path / "dense", **QUERIES)
    made = compressed_models.write(dense, tmp_path / "model", SCHEMES[scheme])
    proof, written = proved(made.folder, tmp_path / "out", Options(dtype=dtype))
    assert proof.level in ("logits", "tokens")
    assert "what heads make of latents (kv_b) is written decoded" in written.notes
    assert ("latents are made in fp32 up to their norm" in written.notes) == (dtype == "fp16")
    kind = onnx.TensorProto.FLOAT if dtype == "fp32" else onnx.TensorProto.FLOAT16
    model = onnx.load(tmp_path / "out" / MODEL, load_external_data=False)
    types = {x.name: x.data_type for x in model.graph.initializer}
    at = "model.layers.0.self_attn."
    assert {types[f"{at}kv_b_proj.{x}"] for x in ("keys", "values")} == {kind}
    codes = {types[f"{at}{x}.weight"] for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")}
    assert not codes & {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}


def test_all_but_what_is_cut_stays_where_it_is(tmp_path: Path) -> None:
    folder, ids = tiny(tmp_path / "model", dtype="bf16"), text()[None]
    found = export_artifact(folder, ArtifactTarget("onnx", Options(in_place=True)))
    assert found.exports[0].proof == "tokens"
    cut = 2 * 4 * (16 + 16) * RANK * 4  # layers, heads, numbers of a key and a value, latent
    tables = 2 * 128 * (ROTATED // 2) * 4
    assert (folder / DATA).stat().st_size < cut + tables + 4096
    told = "2 dense weights written anew: what heads make of latents is cut into keys and values"
    assert told in found.notes
    want = wanted(folder, ids)
    assert np.abs(Runner.open(folder / MODEL).whole(ids.numpy()) - want).max() < 1e-5
