"""Windows by layer against transformers' own classes: what a config.json says is what they do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.arch.forward.forward import describe_forward
from compress.arch.forward.windows import SLIDING
from compress.arch.resize.carriers import MISTRAL
from compress.arch.resize.windowed import MINISTRAL, WINDOWED, windowed
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.formats.runtimes.attention_rules import with_attention
from compress.formats.runtimes.verdicts import Verdict
from helpers.engine.flat_runs import Runs
from helpers.engine.flat_runs import load as load_decoder
from helpers.resizing.resized_models import IDS, Source, load, logits, read, shapes, write

LAYERS, CONTEXT = 4, 128
# Layers of both kinds, with one rotation for both.
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": CONTEXT},
    "cwm": {"layer_types": [SLIDING, *["full_attention"] * 3]},
    "ministral": {"layer_types": ["full_attention"] * LAYERS, "sliding_window": 64},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "gemma2": {"layer_types": [SLIDING, *["full_attention"] * 3], "sliding_window": 7},
    "gemma3_text": {
        "layer_types": [SLIDING, *["full_attention"] * 3],
        "sliding_window": 7,
        "rope_parameters": {SLIDING: ROPE, "full_attention": ROPE},
    },
}
MIXED = tuple(family for family, row in WINDOWED.items() if row.mixed)
MORE = [x for x in WINDOWED if x not in ("llama", "mistral", "qwen3")]
KINDS = ["llama", "mistral", "qwen3", *(pytest.param(x, marks=pytest.mark.long) for x in MORE)]


def source_of(tiny: Any, family: str, **options: Any) -> Source:
    given = {"dtype": "fp32", "num_hidden_layers": LAYERS, **OPTIONS.get(family, {}), **options}
    return read(tiny(family, **given))


def made(source: Source, width: int, layers: list[int]) -> dict[str, Any]:
    return windowed(source.config, source.spec, shapes(source.state), width, layers).config


def by_hand(model: Any, windows: list[int | None]) -> Tensor:
    """Logits of the source's own class, each layer under a mask that is written down here."""
    length = IDS.shape[1]
    ago = torch.arange(length)[:, None] - torch.arange(length)

    def masking(window: int | None) -> Any:
        seen = (ago >= 0) & (ago < (window or length))
        bias = torch.zeros(length, length).masked_fill(~seen, -torch.inf)

        def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "attention_mask": bias.expand(len(IDS), 1, -1, -1)}

        return before

    layers = model.model.layers
    hooks = [
        layer.self_attn.register_forward_pre_hook(masking(window), with_kwargs=True)
        for layer, window in zip(layers, windows, strict=True)
    ]
    found = logits(model)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", KINDS)
def test_windows_of_the_whole_context_change_nothing(
    tiny: Any, tmp_path: Path, family: str
) -> None:
    """In a fresh model of the class that the config names."""
    source = source_of(tiny, family, **({"sliding_window": CONTEXT} if family in MIXED else {}))
    write(tmp_path / "out", made(source, CONTEXT, [1, 3]), source.state)
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(source.model))


@pytest.mark.parametrize("family", KINDS)
def test_layers_see_what_the_config_says(tiny: Any, tmp_path: Path, family: str) -> None:
    """The class that it names, eager and sdpa, and our engine, against masks written by hand."""
    source = source_of(tiny, family, **({"sliding_window": 7} if family in MIXED else {}))
    config = made(source, 7, [1, 3])
    windows = [7 if family in MIXED else None, 7, None, 7]
    write(tmp_path / "out", config, source.state)
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    layers = describe_forward(config, weights.spec).layers
    assert [layer.window for layer in layers] == windows
    model, wanted = load(tmp_path / "out"), by_hand(source.model, windows)
    carrier = WINDOWED[family].landing
    assert model.config.model_type == (family if carrier is None else carrier.model_type)
    assert (wanted - logits(source.model)).abs().max() > 1e-3
    for kind in ("eager",) if family == "gemma2" else ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        torch.testing.assert_close(logits(model), wanted, atol=1e-5, rtol=1e-5)
    runs = Runs(load_decoder(tmp_path / "out"), texts=len(IDS), most=IDS.shape[1])
    ours = torch.stack([runs.whole(row, i) for i, row in enumerate(IDS.tolist())])
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def test_ministral_assumes_what_llama_does_but_for_what_is_written() -> None:
    from transformers import LlamaConfig, MinistralConfig, MistralConfig

    llama, mistral, ministral = (
        x().to_dict() for x in (LlamaConfig, MistralConfig, MinistralConfig)
    )
    own = {key for key in ministral if ministral[key] != mistral.get(key)}
    # The width of heads is written always.
    assert own == {"model_type", "layer_types", "head_dim"}
    assert {key: llama[key] for key in MINISTRAL.fill} == dict(MINISTRAL.fill) == dict(MISTRAL.fill)
    assert set(MINISTRAL.drop) | {"layer_types"} == set(MISTRAL.drop)


def test_a_config_that_leaves_out_what_its_class_assumes(tiny: Any, tmp_path: Path) -> None:
    folder = tiny("llama", dtype="fp32", num_key_value_heads=4, num_hidden_layers=LAYERS)
    source = read(folder)
    for key in ("num_key_value_heads", "max_position_embeddings", "head_dim"):
        del source.config[key]
    config = made(source, 7, [0])
    said = [config[x] for x in ("num_key_value_heads", "max_position_embeddings", "head_dim")]
    assert said == [4, 2048, 16]
    write(tmp_path / "out", config, source.state)
    wanted = by_hand(source.model, [7, None, None, None])
    torch.testing.assert_close(logits(load(tmp_path / "out")), wanted, atol=1e-5, rtol=1e-5)


def test_readers_of_the_first_layers_number_do_not_take_it_for_a_model_without_windows(
    tiny: Any,
) -> None:
    source = source_of(tiny, "qwen3")
    config = made(source, 7, [1, 3])
    assert config["use_sliding_window"] is True
    assert config["max_window_layers"] == 1
    plain = [Verdict("vLLM on CPU", "yes", ""), Verdict("transformers", "yes", "")]
    assert with_attention(plain, source.config, source.spec) == plain
    told = with_attention(plain, config, source.spec)
    assert [x.verdict for x in told] == ["no", "yes"]
    assert "refuses windows in some layers" in told[0].reason


# One layer with a window.
QWEN = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": [*["full_attention"] * 3, SLIDING],
}
LINES = [
    ("llama", {"attention_bias": True}, "llama with attention_bias has no class in which some"),
    ("mistral", {"sliding_window": 64}, "layers of this mistral have windows already"),
    ("ministral", {"sliding_window": 7, "layer_types": None}, "have windows already; leave hybrid"),
    ("qwen2", QWEN, "layers of this qwen2 have windows already"),
    ("gemma2", {}, "window is 8; layers of this gemma2 have windows of 7, and config.json has one"),
    ("deepseek_v3", {}, "has latent attention, and no class has that with windows"),
    ("phi3", {}, "phi3 has no class in which some layers have a window and others none; llama, "),
    ("qwen3_moe", {}, "qwen3_moe has no class in which some layers have a window"),
    (
        "gemma3_text",
        {"sliding_window": 8, "rope_parameters": None},
        "layer 1 of this gemma3_text would rotate its keys by other frequencies with a window",
    ),
]


@pytest.mark.parametrize(("family", "changes", "line"), LINES, ids=[x[0] for x in LINES])
def test_what_has_no_windows_by_layer_is_refused(
    tiny: Any, family: str, changes: dict[str, Any], line: str
) -> None:
    options = {} if family == "deepseek_v3" else {"num_hidden_layers": LAYERS}
    folder = tiny(family, **options, **OPTIONS.get(family, {}))
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    checkpoint = Checkpoint.open(folder)
    spec = open_weights(checkpoint).spec
    with pytest.raises(CheckpointError) as refused:
        windowed(config, spec, checkpoint.shapes, 8, [1])
    assert line in str(refused.value)
