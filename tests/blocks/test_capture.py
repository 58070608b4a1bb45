"""What the hooks hand over is what the linears read, and the experts are the fused ones."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress.arch.spec import LinearSpec
from compress.blocks.capture import collect, regroup
from compress.blocks.experts import expert_views
from compress.blocks.linear import linear_weight, set_linear_weight
from compress.blocks.skeleton import Skeleton
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from helpers import tiny_models


class Loaded:
    """Block 0 of a tiny model, with a batch to run it on."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint.open(folder)
        self.weights = open_weights(checkpoint)
        self.skeleton = Skeleton(checkpoint.config, self.weights.spec, dtype=torch.float32)
        self.spec = self.weights.spec.blocks[0]
        self.block = self.skeleton.load_block(self.weights, 0)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, tiny_models.VOCAB, (2, 12), generator=generator)
        self.hidden = self.skeleton.embed(self.weights, self.ids)

    def run(self, mask: Tensor | None = None) -> Tensor:
        context = self.skeleton.context(self.ids, mask)
        return self.skeleton.run_block(self.block, 0, self.hidden, context)

    def inputs(self, mask: Tensor | None = None, **options: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def keep(key: str, x: Tensor) -> None:
            assert key not in found, "one call for each shared input"
            found[key] = x.clone()

        collect(self.block, self.spec.linears, lambda: self.run(mask), keep, mask=mask, **options)
        return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    cache: dict[str, Loaded] = {}

    def load(family: str) -> Loaded:
        if family not in cache:
            folder = tmp_path_factory.mktemp(family)
            cache[family] = Loaded(tiny_models.make(family, folder, dtype="fp32"))
        return cache[family]

    return load


MASK = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])


def test_one_input_each_shared_key(loaded: Callable[[str], Loaded]) -> None:
    model = loaded("llama")
    found = model.inputs()
    assert set(found) == {"attn_in", "attn_out", "mlp_in", "mlp_mid"}
    assert found["mlp_mid"].shape == (24, 96)
    gate, up, down = (item for item in model.spec.linears if item.role in ("gate", "up", "down"))
    x = found["mlp_in"]
    mid = torch.nn.functional.silu(x @ linear_weight(model.block, gate).t())
    mid = mid * (x @ linear_weight(model.block, up).t())
    torch.testing.assert_close(mid, found["mlp_mid"])
    assert linear_weight(model.block, down).shape == down.shape


def test_padding_rows_are_left_out(loaded: Callable[[str], Loaded]) -> None:
    found = loaded("llama").inputs(MASK)
    assert {x.shape[0] for x in found.values()} == {19}


def test_the_forward_ends_before_the_last_projection(loaded: Callable[[str], Loaded]) -> None:
    model = loaded("llama")
    ran: list[bool] = []
    down = model.block.get_submodule("mlp.down_proj")
    handle = down.register_forward_hook(lambda *_: ran.append(True))
    model.inputs(stop_after_last=True)
    assert not ran
    model.inputs()
    assert ran
    handle.remove()


def test_layers_of_one_key_must_read_one_tensor(loaded: Callable[[str], Loaded]) -> None:
    model = loaded("llama")
    wrong = [replace(item, shared_input="same") for item in model.spec.linears]
    with pytest.raises(CheckpointError, match=r"o_proj does not read the same input"):
        collect(model.block, wrong, model.run, lambda key, x: None)


def test_regroup_finds_what_is_shared(loaded: Callable[[str], Loaded]) -> None:
    model = loaded("olmo2")
    alone = [replace(item, shared_input=item.module) for item in model.spec.linears]
    keys = {i.module: i.shared_input for i in regroup(model.block, alone, model.run)}
    assert keys["self_attn.q_proj"] == keys["self_attn.k_proj"] == keys["self_attn.v_proj"]
    assert keys["mlp.gate_proj"] == keys["mlp.up_proj"] != keys["mlp.down_proj"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_weights_are_set_in_logical_order(loaded: Callable[[str], Loaded], family: str) -> None:
    model = loaded(family)
    linear = model.spec.linears[-1]
    before = linear_weight(model.block, linear).clone()
    assert before.shape == linear.shape
    seen: list[Tensor] = []
    module = model.block.get_submodule(linear.module)
    handle = module.register_forward_hook(lambda m, args, out: seen.extend((args[0], out)))
    set_linear_weight(model.block, linear, 2 * before)
    views = list(expert_views(model.block))
    for view in views:
        view.all_tokens = True
    model.run()
    handle.remove()
    bias = getattr(module, "bias", None)
    want = nn.functional.linear(seen[0], 2 * before, bias)
    torch.testing.assert_close(seen[1], want)
    set_linear_weight(model.block, linear, before)
    for view in views:
        view.all_tokens = False


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_all_tokens_reach_all_experts_and_change_nothing(
    loaded: Callable[[str], Loaded], family: str, mask: Tensor | None
) -> None:
    model = loaded(family)
    (view,) = expert_views(model.block)
    real = 24 if mask is None else int(mask.sum())
    want = model.run(mask)
    routed = model.inputs(mask)
    sent = {key: x.shape[0] for key, x in routed.items() if re.fullmatch(r"experts\.\d+\.in", key)}
    assert sum(sent.values()) == 2 * real  # top 2 of 4
    assert len(set(sent.values())) > 1  # else it would not be the router's choice
    view.all_tokens = True
    try:
        everything = model.inputs(mask)
        got = model.run(mask)
    finally:
        view.all_tokens = False
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert {x.shape[0] for x in everything.values()} == {real}
    torch.testing.assert_close(everything["experts.3.in"], everything["mlp_in"])


def test_a_block_with_nan_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_models.make("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = Loaded(folder)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' in .* has 1 NaN .* at \[3, 5\]"):
        model.skeleton.load_block(model.weights, 1)


def test_a_layer_of_no_table_that_is_no_linear_is_refused(
    loaded: Callable[[str], Loaded],
) -> None:
    from compress.blocks.linear import check_linear

    model = loaded("gpt2")
    turned: LinearSpec = replace(model.spec.linears[0], transposed=False)
    with pytest.raises(CheckpointError, match="is a Conv1D"):
        check_linear(model.block, turned)


def test_unknown_model_types_cannot_be_run(loaded: Callable[[str], Loaded]) -> None:
    spec = replace(loaded("llama").weights.spec, model_type="neverheardof")
    with pytest.raises(CheckpointError, match="'neverheardof' is unknown to this transformers"):
        Skeleton({"model_type": "neverheardof"}, spec, dtype=torch.float32)
