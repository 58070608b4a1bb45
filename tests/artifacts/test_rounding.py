"""Exports whose weights are rounded by what they read of a text."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.artifacts.export import export_artifact as exported
from compress.artifacts.plan import plan_artifact
from compress.artifacts.rounding import walk
from compress.artifacts.rounding.block_file import block_file
from compress.artifacts.rounding.of_export import data_of, told
from compress.artifacts.rounding.prepare import RoundingTokens, block_rounding, chain_of
from compress.artifacts.rounding.walk import (
    BlockRounding,
    RoundedTensor,
    round_alone,
    round_along,
    units,
)
from compress.blocks.skeleton import Skeleton
from compress.blocks.walk import Chain
from compress.cli.main import main
from compress.errors import DataError, OutputError, RecipeError
from compress.methods.k_quants import KQuantsConfig
from compress.methods.outcome import relative_error
from compress.text.tokenizer import load_tokenizer
from compress.verbs import ArtifactTarget, dry_artifact, export_artifact
from compress_calibration.dataset import build
from compress_exporters.exporter import Options
from compress_exporters.gguf.target import PlannedGguf
from compress_kernels import decode_blocks, round_blocks
from helpers import tiny_models

STORY = "the old cat sat by the door and looked at the rain for a long time\n"
TYPE = "IQ4_NL"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("rounding") / "model", dtype="fp32")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "story.txt"
    file.write_text(STORY * 40)
    return file


def asked(text: Path) -> ArtifactTarget:
    return ArtifactTarget("gguf", Options(type=TYPE, text=str(text)))


def rounding(model: Path, text: Path, folder: Path) -> tuple[BlockRounding, Chain]:
    """What is rounded of a model, and its way over the tokens."""
    plan = plan_artifact(model, asked(text))
    assert isinstance(plan.planned, PlannedGguf)
    source = plan.source
    tokenizer = load_tokenizer(source.checkpoint.small)
    data = data_of(str(text), source.spec.context)
    found = build(data, tokenizer, generate=None, vocab=source.spec.vocab, fewest=1)
    tokens = RoundingTokens(found.ids, found.mask, 1 << 26, scratch=1 << 26)
    folder.mkdir(exist_ok=True)
    work = block_rounding(source, plan.planned.plan.to_round, folder, KQuantsConfig())
    skeleton = Skeleton(source.checkpoint.config, source.spec, dtype=torch.float32)
    return work, chain_of(source, skeleton, tokens, folder)


def decoded(work: BlockRounding, tensor: str) -> Tensor:
    kind, (rows, _) = work.to_round.weights[tensor]
    return decode_blocks(kind, work.blocks.rows(tensor, 0, rows))


def read_by(model: Any, ids: Tensor, module: str) -> Tensor:
    """What a module reads, [tokens, K]."""
    seen: list[Tensor] = []
    hook = model.get_submodule(module).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, -2))
    )
    with torch.no_grad():
        model(ids)
    hook.remove()
    return torch.cat(seen)


def test_errors_are_those_of_what_the_rounded_model_reads(
    model: Path, text: Path, tmp_path: Path
) -> None:
    work, chain = rounding(model, text, tmp_path / "work")
    found = {x.tensor: x for _, made in round_along(work, chain) for x in made}
    assert set(found) == set(work.to_round.weights)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in whole.named_parameters()}

    def check(tensor: str, module: str) -> None:
        x = read_by(whole, chain.batches[0].ids, module)
        wanted = relative_error(weights[tensor], decoded(work, tensor), x.T @ x / len(x))
        assert found[tensor].error == pytest.approx(wanted, rel=1e-3)
        assert found[tensor].tokens == len(x)

    # A block is looked at as it was, behind those that are rounded.
    whole.get_input_embeddings().weight.data = decoded(work, "model.embed_tokens.weight")
    for i in range(2):
        for module in ("self_attn.k_proj", "mlp.down_proj"):
            name = f"model.layers.{i}.{module}"
            check(f"{name}.weight", name)
        for tensor in (x for x in weights if x.startswith(f"model.layers.{i}.") and x in found):
            whole.get_parameter(tensor).data = decoded(work, tensor)
    check("lm_head.weight", "lm_head")


def test_it_loses_less_than_rounding_alone(model: Path, text: Path, tmp_path: Path) -> None:
    work, chain = rounding(model, text, tmp_path / "work")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = chain.batches[0].ids
    with torch.no_grad():
        wanted = whole(ids).logits.log_softmax(-1)

    def divergence(weights: Mapping[str, Tensor]) -> float:
        changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for name, weight in weights.items():
            changed.get_parameter(name).data = weight
        with torch.no_grad():
            found = changed(ids).logits.log_softmax(-1)
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    lost = []
    for walked in (round_along(work, chain), round_alone(work)):
        for _ in walked:
            pass
        lost.append(divergence({name: decoded(work, name) for name in work.to_round.weights}))
    assert lost[0] < 0.8 * lost[1]


def test_without_a_text_rows_are_those_of_plain_rounding(
    model: Path, text: Path, tmp_path: Path
) -> None:
    work, _ = rounding(model, text, tmp_path / "work")
    found = [(unit, made) for unit, made in round_alone(work)]
    assert [unit for unit, _ in found] == units(work.spec)
    for made in (x for _, several in found for x in several):
        weight = work.weights.read(made.tensor).float()
        wanted = round_blocks(made.kind, weight, None)
        assert torch.equal(work.blocks.rows(made.tensor, 0, len(weight)), wanted)
        assert (made.method, made.kept, made.tokens) == ("k_quants", None, None)
    assert sum(len(made) for _, made in found) == len(work.to_round.weights)
    assert [x for x, _ in round_alone(work, units(work.spec)[:2])] == units(work.spec)[2:]


def test_a_walk_goes_on_from_any_unit(model: Path, text: Path, tmp_path: Path) -> None:
    whole, chain = rounding(model, text, tmp_path / "whole")
    names = units(whole.spec)
    assert [unit for unit, _ in round_along(whole, chain)] == names
    for stop in range(1, len(names)):
        work, chain = rounding(model, text, tmp_path / f"until {stop}")
        assert [unit for unit, _ in islice(round_along(work, chain), stop)] == names[:stop]
        assert [unit for unit, _ in round_along(work, chain, names[:stop])] == names[stop:]
        assert work.blocks.path.read_bytes() == whole.blocks.path.read_bytes()


def test_hessians_of_a_wide_block_are_not_held_at_once(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, chain = rounding(model, text, tmp_path / "whole")
    linears = whole.spec.blocks[0].linears
    assert len(list(walk.observed_together(linears))) == 1
    for _ in round_along(whole, chain):
        pass
    monkeypatch.setattr(walk, "HESSIAN_BYTES", 1)
    runs = list(walk.observed_together(linears))
    assert [len(run) for run in runs] == [3, 1, 2, 1]
    parts, chain = rounding(model, text, tmp_path / "parts")
    for _ in round_along(parts, chain):
        pass
    assert parts.blocks.path.read_bytes() == whole.blocks.path.read_bytes()


def test_rows_lie_where_they_were_written(tmp_path: Path) -> None:
    file = block_file(tmp_path / "rows", {"a": ("Q8_0", (3, 64)), "b": ("Q4_0", (5, 32))})
    a = torch.randint(256, (3, 68), dtype=torch.uint8)
    b = torch.randint(256, (5, 18), dtype=torch.uint8)
    file.write("b", b[2:], 2)
    file.write("a", a)
    file.write("b", b[:2])
    file.flush()
    assert file.nbytes == file.path.stat().st_size == 3 * 68 + 5 * 18
    assert torch.equal(file.rows("a", 1, 3), a[1:])
    assert torch.equal(file.rows("b", 0, 5), b)
    file.path.unlink()
    with pytest.raises(OutputError) as problem:
        file.rows("a", 0, 1)
    assert str(problem.value).endswith(f"; remove {tmp_path} and start again")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma2", "gpt_neox"])
def test_files_hold_the_rounded_rows(family: str, text: Path, tmp_path: Path) -> None:
    """Turned weights, rows that change places, experts that are stacked, a head that is tied."""
    source = tiny_models.make(family, tmp_path / "model", dtype="fp32", **TIED.get(family, {}))
    target = asked(text)
    report = export_artifact(source, target, tmp_path / "out", verify=False)
    beside = {x.name for x in source.iterdir()} - {"model.safetensors", "README.md"}
    left = {x.name for x in (tmp_path / "out").iterdir()}
    assert left == {"README.md", "model.gguf", "report", *beside}
    work, chain = rounding(source, text, tmp_path / "work")
    layers = [x for _, made in round_along(work, chain) for x in made]
    assert report.notes[-len(told(layers)) :] == told(layers)
    from compress_exporters.gguf.in_file import InFile

    planned = plan_artifact(source, target).planned
    assert isinstance(planned, PlannedGguf)
    found = InFile.of(planned.plan, tmp_path / "out" / "model.gguf")
    turned = {x.tensor for x in work.spec.linears() if x.transposed}
    assert bool(turned) == (family == "gpt2")
    for name in work.to_round.weights:
        wanted = decoded(work, name)
        assert torch.equal(found.read(name), wanted.t() if name in turned else wanted), name


TIED: Mapping[str, Any] = {"gemma2": {"tied": True}}


def test_what_came_out_is_told() -> None:
    layers = [
        RoundedTensor("a", TYPE, 0.1, "k_quants+gptq", damping=0.01),
        RoundedTensor("b", TYPE, 0.1, "k_quants", kept="why"),
        RoundedTensor("c", TYPE, 0.1, "k_quants"),
    ]
    assert told(layers) == (
        "in 1 of 3 rounded tensors columns make up for what others lose",
        "1 rounded without that: why",
    )


def test_an_export_that_fails_leaves_nothing(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(walk, "_head", stops)
    with pytest.raises(KeyboardInterrupt):
        exported(model, asked(text), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_text_is_for_types(model: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(RecipeError) as problem:
        dry_artifact(model, ArtifactTarget("gguf", Options(text=str(text))))
    assert str(problem.value) == (
        f"--text is {text}; weights are rounded to --type by it, or importance is measured on it:"
        " give --type, or --imatrix-out FILE"
    )
    both = Options(type=TYPE, text=str(text), imatrix="m.gguf")
    with pytest.raises(RecipeError) as problem:
        dry_artifact(model, ArtifactTarget("gguf", both))
    assert str(problem.value) == (
        f"--text is {text}, and --imatrix m.gguf; weights are rounded by one of the two: leave the"
        " other out"
    )
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError):
        export_artifact(model, asked(tmp_path / "empty.txt"), tmp_path / "out")
    command = ["export", str(model), "--to", "onnx", "--dry-run", "--text", str(text)]
    assert main(command) == 2
    assert "--text is for gguf, and --to is onnx; leave it out" in capsys.readouterr().err


def test_a_plan_has_the_types_of_the_file(model: Path, text: Path, tmp_path: Path) -> None:
    """Where the text says what errors weigh, llama.cpp's choice is another."""
    target = asked(text)
    planned = dry_artifact(model, target).notes
    made = export_artifact(model, target, tmp_path / "out", verify=False).notes
    assert made[: len(planned)] == planned
    alone = dry_artifact(model, ArtifactTarget("gguf", Options(type=TYPE))).notes
    assert alone[-1] == (
        "errors of all columns weigh alike; --text FILE rounds by what they multiply and makes up"
        " for losses, --imatrix FILE weighs them"
    )
