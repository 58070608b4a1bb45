"""Importance of columns that an export measures, and the file that llama-quantize gets of it."""

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from compress.artifacts.export import export_artifact
from compress.artifacts.plan import ArtifactTarget, plan_artifact
from compress.artifacts.rounding.measured import measured_file
from compress.artifacts.rounding.of_export import tokens_of_text
from compress.artifacts.rounding.prepare import block_rounding, chain_of
from compress.artifacts.rounding.walk import BlockRounding, round_along, units
from compress.blocks.skeleton import Skeleton
from compress.blocks.walk import Chain
from compress.formats.gguf.layout import ENDS
from compress.methods.k_quants import KQuantsConfig
from compress.quant.scheme import QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.gguf.imatrix import read_imatrix
from compress_exporters.gguf.in_file import InFile
from compress_exporters.gguf.plan import ToRound
from compress_exporters.gguf.target import PlannedGguf
from compress_kernels import decode_blocks, round_blocks
from helpers import compressed_models, tiny_models

STORY = "the old cat sat by the door and looked at the rain for a long time\n"
TYPE = "IQ4_NL"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("measured") / "model", dtype="fp32")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "story.txt"
    file.write_text(STORY * 40)
    return file


def asked(text: Path, out: Path, **options: Any) -> ArtifactTarget:
    return ArtifactTarget("gguf", Options(text=str(text), imatrix_out=str(out), **options))


def measured(model: Path, text: Path, out: Path, **options: Any) -> dict[str, Tensor]:
    """What an export writes there, beside its folder."""
    target = asked(text, out, **options)
    export_artifact(model, target, folder_of(out), verify=False)
    return dict(read_imatrix(out))


def folder_of(out: Path) -> Path:
    return out.with_name(f"of {out.name}")


def planned(model: Path, text: Path, **options: Any) -> PlannedGguf:
    made = plan_artifact(model, asked(text, Path("x.gguf"), **options)).planned
    assert isinstance(made, PlannedGguf)
    return made


def ids_of(model: Path, text: Path) -> Tensor:
    return tokens_of_text(plan_artifact(model, asked(text, Path("x.gguf")))).ids


def reads(model: Any, ids: Tensor, paths: dict[str, str]) -> dict[str, Tensor]:
    """What modules read by plain hooks, [tokens, K], by name in GGUF."""
    seen: dict[str, list[Tensor]] = {name: [] for name in paths}

    def hook(name: str) -> Any:
        return lambda _, args: seen[name].append(args[0].detach().flatten(0, -2))

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(hook(name))
        for name, path in paths.items()
    ]
    with torch.no_grad():
        model(ids)
    for each in hooks:
        each.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


LLAMA = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
DENSE = LLAMA | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
GPT2 = {
    "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}  # fmt: skip
PATHS = {
    "llama": ("model.layers", DENSE, ENDS[1], {}),
    "qwen2": ("model.layers", DENSE, ENDS[0], {"tied": True}),
    "gpt2": ("transformer.h", GPT2, ENDS[1], {}),
}


def is_near(found: Tensor, rows: Tensor) -> None:
    """The mean squares of rows [tokens, K], to fp32's precision."""
    wanted = rows.double().square().mean(0)[None]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", PATHS)
@pytest.mark.parametrize("suffix", [".gguf", ".dat"])
def test_without_a_type_it_is_the_mean_square_of_what_the_model_reads(
    family: str, suffix: str, text: Path, tmp_path: Path
) -> None:
    """Rows that change places, turned weights, heads that are tied: columns stay."""
    stack, parts, head, sizes = PATHS[family]
    source = tiny_models.make(family, tmp_path / "model", dtype="fp32", **sizes)
    found = measured(source, text, tmp_path / f"found{suffix}")
    paths = {
        f"blk.{i}.{name}.weight": f"{stack}.{i}.{path}"
        for i in range(2)
        for name, path in parts.items()
    }
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = ids_of(source, text)
    for name, rows in reads(whole, ids, paths | {head: "lm_head"}).items():
        assert len(rows) == ids.numel()
        is_near(found[name], rows)
    assert set(found) == {*paths, head}
    assert found.keys() == {x.name for x in planned(source, text).plan.multiplied}


def test_experts_have_the_tokens_that_their_router_sends(text: Path, tmp_path: Path) -> None:
    source = tiny_models.make("mixtral", tmp_path / "model", dtype="fp32")
    found = measured(source, text, tmp_path / "found.gguf")
    read = planned(source, text).plan.source.read
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    where = {"mlp": "model.layers.0.mlp", "gate": "model.layers.0.mlp.gate"}
    seen = reads(whole, ids_of(source, text), where)
    prefix, counts = "model.layers.0.block_sparse_moe", list[int]()
    chosen = (seen["gate"] @ read(f"{prefix}.gate.weight").T).topk(2).indices
    for expert in range(4):
        rows = seen["mlp"][(chosen == expert).any(-1)]
        gate, up = (read(f"{prefix}.experts.{expert}.{x}.weight") for x in ("w1", "w3"))
        inner = silu(rows @ gate.T) * (rows @ up.T)
        for part, wanted in (("gate", rows), ("up", rows), ("down", inner)):
            values = found[f"blk.0.ffn_{part}_exps.weight"]
            assert values.shape == (4, wanted.shape[1])
            is_near(values[expert][None], wanted)
        counts.append(len(rows))
    assert sum(counts) == 2 * len(seen["mlp"])
    assert len(set(counts)) > 1
    stored = {x.name: x.data for x in GGUFReader(tmp_path / "found.gguf").tensors}
    assert stored["blk.0.ffn_down_exps.weight.counts"].reshape(-1).tolist() == counts
    assert stored["blk.0.attn_q.weight.counts"].reshape(-1).tolist() == [len(seen["mlp"])]
    assert not any("ffn_gate_inp" in name for name in stored)


def along(model: Path, text: Path, folder: Path, *, rounds: bool) -> tuple[BlockRounding, Chain]:
    """A walk that keeps what columns multiply."""
    plan = plan_artifact(model, asked(text, Path("x.gguf"), type=TYPE))
    assert isinstance(plan.planned, PlannedGguf)
    source = plan.source
    folder.mkdir(exist_ok=True)
    to_round = plan.planned.plan.to_round if rounds else ToRound({}, None)
    kept = measured_file(plan.planned.plan, folder)
    work = replace(block_rounding(source, to_round, folder, KQuantsConfig()), measured=kept)
    skeleton = Skeleton(source.checkpoint.config, source.spec, dtype=torch.float32)
    return work, chain_of(source, skeleton, tokens_of_text(plan), folder)


@pytest.mark.parametrize("rounds", [True, False])
def test_what_units_found_is_there_when_a_walk_goes_on(
    rounds: bool, model: Path, text: Path, tmp_path: Path
) -> None:
    whole, chain = along(model, text, tmp_path / "whole", rounds=rounds)
    names = units(whole.spec)
    assert [unit for unit, _ in round_along(whole, chain)] == names
    assert whole.measured is not None
    wanted = whole.measured.rows.path.read_bytes()
    for stop in range(1, len(names)):
        work, chain = along(model, text, tmp_path / f"until {stop}", rounds=rounds)
        for _ in islice(round_along(work, chain), stop):
            pass
        for _ in round_along(work, chain, names[:stop]):
            pass
        assert work.measured is not None
        assert work.measured.rows.path.read_bytes() == wanted


def test_with_a_type_blocks_read_what_rounded_ones_give(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """And the weights are those of an export that measures nothing."""
    found = measured(model, text, tmp_path / "found.gguf", type=TYPE)
    plain = ArtifactTarget("gguf", Options(text=str(text), type=TYPE))
    export_artifact(model, plain, tmp_path / "plain", verify=False)
    file = folder_of(tmp_path / "found.gguf") / "model.gguf"
    assert file.read_bytes() == (tmp_path / "plain" / "model.gguf").read_bytes()
    rounded = InFile.of(planned(model, text, type=TYPE).plan, file)
    whole, ids = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        ids_of(model, text),
    )
    whole.get_input_embeddings().weight.data = rounded.read("model.embed_tokens.weight")
    for i in range(2):
        paths = {f"blk.{i}.{n}.weight": f"model.layers.{i}.{p}" for n, p in DENSE.items()}
        for name, rows in reads(whole, ids, paths).items():
            is_near(found[name], rows)
        for name in block_weights(i):
            whole.get_parameter(name).data = rounded.read(name).float()
    (rows,) = reads(whole, ids, {ENDS[1]: "lm_head"}).values()
    is_near(found[ENDS[1]], rows)


def block_weights(index: int) -> list[str]:
    return [f"model.layers.{index}.{path}.weight" for path in DENSE.values()]


@pytest.mark.parametrize("suffix", [".gguf", ".dat"])
def test_what_is_written_weighs_errors_again(
    suffix: str, model: Path, text: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"found{suffix}"
    known = measured(model, text, file)
    target = ArtifactTarget("gguf", Options(type=TYPE, imatrix=str(file)))
    report = export_artifact(model, target, tmp_path / "again", verify=False)
    assert "errors of 15 of 16 rounded tensors weigh what their columns multiply" in report.notes
    plan = planned(model, text, type=TYPE).plan
    stored = InFile.of(plan, tmp_path / "again" / "model.gguf")
    assert len(plan.multiplied) == 15
    for piece in plan.multiplied:
        (tensor,), weight = piece.sources, plan.source.read(piece.sources[0]).float()
        kind, values = plan.to_round.weights[tensor][0], known[piece.name][0]
        wanted = decode_blocks(kind, round_blocks(kind, weight, values))
        assert torch.equal(stored.read(tensor), wanted), piece.name


def test_both_forms_say_the_same(model: Path, text: Path, tmp_path: Path) -> None:
    new, old = (measured(model, text, tmp_path / x) for x in ("a.gguf", "b.dat"))
    assert new.keys() == old.keys()
    for name, values in new.items():
        torch.testing.assert_close(values, old[name], rtol=1e-6, atol=0)


def test_one_input_gives_one_file(model: Path, text: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = Path(shutil.copy(text, elsewhere))
    for suffix in (".gguf", ".dat"):
        first, second = tmp_path / f"a{suffix}", elsewhere / f"b{suffix}"
        measured(model, text, first, type=TYPE)
        measured(model, moved, second, type=TYPE)
        assert first.read_bytes() == second.read_bytes()


def test_a_quantized_checkpoint_is_measured_as_it_is(text: Path, tmp_path: Path) -> None:
    original = tiny_models.make("llama", tmp_path / "original", tied=True, dtype="fp32")
    coded = compressed_models.write(original, tmp_path / "coded", QuantScheme(group_size=32))
    found = measured(coded.folder, text, tmp_path / "found.gguf", round_scales=True)
    whole = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    plan = planned(coded.folder, text, round_scales=True).plan
    for name in block_weights(0):
        whole.get_parameter(name).data = plan.source.read(name).float()
    paths = {"blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj"}
    ((name, rows),) = reads(whole, ids_of(original, text), paths).items()
    is_near(found[name], rows)
