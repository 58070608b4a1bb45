"""GGUF files as checkpoints: what was written is read, number by number, by its original names."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import FORMATS, Weights, open_weights
from compress.formats.gguf.arches import ARCHES
from compress.formats.gguf_weights import GgufWeights, types_of
from compress.quant.ggml_kinds import KINDS
from compress_exporters.decoded import decoded
from compress_exporters.gguf.imatrix_write import Importance, write_imatrix
from helpers.exporters.gguf_files import tiny
from helpers.exporters.gguf_readings import opened

HOW: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 1]},
    "gemma2": {"tied": True},
    "olmo2": {"tied": True},
    "gemma3_text": {"tied": True},
}
# Their norms have 1 added in fp32, and taken off again.
OFFSET = ("gemma2", "gemma3_text")


def same(found: Weights, source: Weights, name: str, *, near: bool = False) -> None:
    want, got = decoded(source, name).float(), found.read(name, check_finite=True).float()
    assert want.shape == got.shape == found.shapes[name], name
    if near:
        assert torch.allclose(got, want, rtol=0, atol=2.0**-22), name
    else:
        assert torch.equal(got, want), name


@pytest.mark.parametrize("family", ARCHES)
def test_every_family_comes_back(family: str, tmp_path: Path) -> None:
    source = tiny(tmp_path / "model", family, **HOW.get(family, {}))
    found = opened(source, tmp_path)
    assert isinstance(found, GgufWeights)
    assert found.format is FORMATS["gguf"]
    # A head that the architecture must have is stored, though it repeats the embedding.
    head = {"lm_head.weight"} if family == "olmo2" else set()
    assert set(found.shapes) == set(source.shapes) | head
    for name in source.shapes:
        same(found, source, name, near=family in OFFSET and "norm" in name)
    assert [x.name for x in found.spec.all_linears() if x.role != "head"] == [
        x.name for x in source.spec.all_linears() if x.role != "head"
    ]
    assert found.plain_dtype == torch.float32
    assert found.spec.tied == (source.spec.tied and not head)


BIASES = [("llama", True), ("qwen2", None), ("gpt_neox", True)]


@pytest.mark.parametrize(("family", "bias"), BIASES)
def test_biases_come_back(family: str, bias: bool | None, tmp_path: Path) -> None:
    source = tiny(tmp_path / "model", family, bias=bias)
    found = opened(source, tmp_path)
    names = [name for name in source.shapes if name.endswith(".bias")]
    assert names
    for name in names:
        same(found, source, name)


def test_rotations_leave_no_tensor(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = tiny(tmp_path / "model", rope_parameters=llama3)
    found = opened(source, tmp_path)
    assert "rope_freqs.weight" in found.checkpoint.tensors
    assert set(found.shapes) == set(source.shapes)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return tiny(tmp_path_factory.mktemp("wide") / "model", **WIDE, num_hidden_layers=1)


TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")


@pytest.mark.parametrize("name", [*TYPES, "IQ4_NL", "IQ4_XS"])
def test_blocks_are_what_gguf_decodes(name: str, wide: Weights, tmp_path: Path) -> None:
    found = opened(wide, tmp_path, dtype=None, type=name)
    assert isinstance(found, GgufWeights)
    stored = {x.name: x for x in GGUFReader(found.checkpoint.path / "model.gguf").tensors}
    kinds = set()
    for tensor, held in found.held.items():
        raw = stored[held.piece.name]
        values = torch.from_numpy(dequantize(raw.data, raw.tensor_type).copy()).float()
        got = found.read(tensor).float()
        assert torch.equal(got, held.piece.original(values)), tensor
        kinds.add(found.stored_in(tensor))
    assert kinds == {x.tensor_type.name for x in stored.values()}
    assert found.quantized("model.layers.0.mlp.up_proj.weight") is None
    assert found.is_quantized("model.layers.0.mlp.up_proj")
    assert found.plain_dtype == torch.float32  # as config.json says


def test_rows_are_those_of_the_whole(wide: Weights, tmp_path: Path) -> None:
    found = opened(wide, tmp_path, dtype=None, type="Q4_K_M")
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(found.read_rows(name, 3, 9), found.read(name)[3:9])


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    source = tiny(tmp_path / "model", "qwen3_moe")
    found = opened(source, tmp_path)
    assert isinstance(found, GgufWeights)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert found.nbytes(name) == 4 * 64 * 32
    assert torch.equal(found.read_rows(name, 5, 7), decoded(source, name)[5:7])


def test_a_hashed_file_is_held_to_its_hash(wide: Weights, tmp_path: Path) -> None:
    path = opened(wide, tmp_path, dtype=None, type="Q4_K_M").checkpoint.path
    checkpoint = Checkpoint.open(path).sealed()
    found = open_weights(checkpoint)
    name = "model.layers.0.mlp.up_proj.weight"
    before = found.read(name)
    found.checkpoint.require_unchanged()
    assert checkpoint.sha256() == Checkpoint.open(path).sha256()
    info = checkpoint.tensors["blk.0.ffn_up.weight"]
    raw = bytearray((path / "model.gguf").read_bytes())
    raw[info.start + 40] ^= 1
    (path / "model.gguf").write_bytes(raw)
    assert not torch.equal(open_weights(Checkpoint.open(path)).read(name), before)
    changed = f"tensor 'blk.0.ffn_up.weight' in {path / 'model.gguf'} changed after it was hashed"
    for look in (lambda: found.read(name), found.checkpoint.require_unchanged):
        with pytest.raises(CheckpointError, match="changed after") as caught:
            look()
        assert str(caught.value).startswith(changed)


def test_types_are_counted(wide: Weights, tmp_path: Path) -> None:
    found = opened(wide, tmp_path, dtype=None, type="Q4_K_M").checkpoint
    types = types_of(found)
    assert list(types) == ["F32", "Q4_K", "Q6_K"]
    assert sum(x["tensors"] for x in types.values()) == len(found.tensors)
    for kind, each in types.items():
        assert each["bytes"] == KINDS[kind].nbytes(each["numbers"])


def test_a_config_of_a_quantized_source_says_nothing_of_the_file(
    wide: Weights, tmp_path: Path
) -> None:
    folder = opened(wide, tmp_path).checkpoint.path
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    found = open_weights(Checkpoint.open(folder))
    same(found, wide, "model.layers.0.mlp.up_proj.weight")


@pytest.fixture
def folder(wide: Weights, tmp_path: Path) -> Path:
    return opened(wide, tmp_path, dtype=None, type="Q4_K_M").checkpoint.path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_weights(Checkpoint.open(path))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_named_by_its_folder_or_itself(folder: Path, tmp_path: Path) -> None:
    assert Checkpoint.open(folder / "model.gguf").named == folder
    shutil.copy(folder / "model.gguf", folder / "other.gguf")
    assert refusal(folder) == (
        f"{folder} has 2 GGUF files (model.gguf, other.gguf); give one of them"
    )
    other = Checkpoint.open(folder / "other.gguf")
    assert other.files == ("other.gguf",)
    assert other.named == folder / "other.gguf"
    (folder / "model.safetensors").touch()  # where both are, safetensors count
    assert "model.safetensors is truncated" in refusal(folder)


def test_importance_beside_a_model_is_not_meant(folder: Path) -> None:
    known = {"blk.0.attn_q.weight": Importance(torch.ones(1, 256), torch.tensor([512]))}
    for name in ("a.gguf", "z.gguf"):
        write_imatrix(folder / name, known, 512)
    assert Checkpoint.open(folder).files == ("model.gguf",)
    assert Checkpoint.open(folder / "z.gguf").files == ("z.gguf",)
    (folder / "model.gguf").unlink()
    assert "has 2 GGUF files (a.gguf, z.gguf); give one of them" in refusal(folder)


def test_parts_are_to_be_joined(folder: Path) -> None:
    part = folder / "model-00001-of-00002.gguf"
    (folder / "model.gguf").rename(part)
    assert refusal(folder) == (
        f"{part} is one of several parts of a model; join them with llama.cpp's"
        " `llama-gguf-split --merge`"
    )


def test_without_a_config_it_says_what_to_put_there(folder: Path) -> None:
    (folder / "config.json").unlink()
    for asked in (folder, folder / "model.gguf"):
        assert refusal(asked) == (
            f"{folder / 'config.json'} is missing, which says what model model.gguf is of; put"
            " config.json and the tokenizer's files of that model beside it"
        )


def changed(folder: Path, **config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


CONFIGS = {
    "another shape": (
        {"intermediate_size": 512},
        (
            "tensor 'blk.0.ffn_gate.weight' in {} has shape [256, 256], config.json asks for"
            " [512, 256]"
        ),
    ),
    "another depth": (
        {"num_hidden_layers": 2},
        "{} lacks tensor 'blk.1.attn_norm.weight' (and 8 more), which the model of config.json has",
    ),
    "another kind": (
        {"model_type": "qwen3"},
        (
            "{} is of architecture 'llama', and config.json beside it of a qwen3, which is 'qwen3'"
            " there"
        ),
    ),
    "other norms": (
        {"rms_norm_eps": 1e-5},
        "{}: llama.attention.layer_norm_rms_epsilon is 1e-06, and config.json says 1e-05",
    ),
    "other heads": (
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
        "{}: llama.attention.head_count is 4, and config.json says 2",
    ),
    "another rotation": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "{}: llama.rope.freq_base is 10000, and config.json says 500000",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_of_another_model_is_refused(case: str, folder: Path) -> None:
    config, said = CONFIGS[case]
    want = f"{said.format(folder / 'model.gguf')}; take file and config.json of one model"
    assert refusal(changed(folder, **config)) == want


def test_fewer_layers_leave_tensors_over(tmp_path: Path) -> None:
    source = tiny(tmp_path / "model")
    folder = opened(source, tmp_path).checkpoint.path
    assert refusal(changed(folder, num_hidden_layers=1)) == (
        f"{folder / 'model.gguf'} has tensor 'blk.1.attn_norm.weight' (and 8 more), which the model"
        " of config.json has not; take file and config.json of one model"
    )


def test_families_without_an_architecture_are_refused(folder: Path) -> None:
    assert refusal(changed(folder, model_type="granite")) == (
        "config.json: model_type is 'granite', whose tensors are in no table of families; give the"
        " checkpoint in safetensors"
    )


def test_what_is_not_finite_is_found(tmp_path: Path) -> None:
    source = tiny(tmp_path / "model", dtype="fp32")
    found = opened(source, tmp_path)
    file, info = (
        found.checkpoint.path / "model.gguf",
        found.checkpoint.tensors["output_norm.weight"],
    )
    raw = bytearray(file.read_bytes())
    raw[info.start + 8 : info.start + 12] = b"\x00\x00\xc0\x7f"  # a NaN
    file.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        open_weights(Checkpoint.open(file)).read("model.norm.weight", check_finite=True)
    assert str(caught.value) == (
        f"tensor 'output_norm.weight' in {file} has 1 NaN and 0 infinite values, the first at [2];"
        " repair the file or download it again"
    )


def test_ones_that_ggml_leaves_out_fit(wide: Weights, tmp_path: Path) -> None:
    found = opened(wide, tmp_path)
    stored = dict(found.checkpoint.tensors)
    name = "output_norm.weight"
    stored[name] = replace(stored[name], shape=(1, *stored[name].shape))
    raw = replace(found.checkpoint, tensors=stored)
    same(open_weights(raw), wide, "model.norm.weight")
