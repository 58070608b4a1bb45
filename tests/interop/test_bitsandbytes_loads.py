"""Our LLM.int8() checkpoints in transformers through the real bitsandbytes, on CPU.

The reference is transformers' own model in the same dtype with our dequantized weights, its inputs
quantized by compress.quant.activations. In fp32 both differ by rounding only: bitsandbytes
multiplies by 6.200124e-05 in place of 1 / 127² (2e-5 off), and an input that this moves across a
rounding boundary changes by one step of 1 / 127 of its token's largest.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.formats.bitsandbytes.codec import SIDE_FILE
from compress.quant.activations import fake_quantize, quantize_inputs
from compress.verbs import make_plan, run
from helpers import tiny_models
from helpers.short_runs import recipe, text_source

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("bitsandbytes")]

IDS = torch.arange(48).view(2, 24)
DYNAMIC = {"method": "llm_int8", "scheme": "LLM_INT8"}
CALIBRATED = {"method": "llm_int8", "scheme": "LLM_INT8_CALIBRATED"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def reference(result: Path, source: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of the source's model with the result's weights and inputs as we read them."""
    weights = open_weights(Checkpoint.open(result))
    model = load(source, dtype)
    state = {name: weights.read(name) for name in Checkpoint.open(source).tensors}
    inside = any(name in model.state_dict() for name in state)
    prefix = "" if inside else f"{model.base_model_prefix}."
    for linear in weights.spec.all_linears():
        inputs = weights.activation(linear.name)
        if inputs is None:
            continue
        module = model.get_submodule(prefix + linear.name)
        module.weight.data = state[linear.tensor].to(dtype)
        quantize_inputs(module, inputs)
    return logits(model)


def make(family: str, folder: Path, *stages: Any, **options: Any) -> tuple[Path, Path]:
    """(source, result) of a run whose inputs have outliers: norms of some channels are large."""
    from safetensors.torch import load_file, save_file

    source, out = folder / "source", folder / "out"
    tiny_models.make(family, source, **options)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("layernorm.weight", "ln_1.weight", "ln_2.weight")):
            tensor[[3, min(40, len(tensor) - 1)]] *= 16
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    calibrated = any(stage["scheme"] == "LLM_INT8_CALIBRATED" for stage in stages)
    data = {"calibration": text_source(folder)} if calibrated else {}
    run(recipe(*stages, **data), source, out)
    return source, out


def differ(a: Tensor, b: Tensor) -> float:
    """Root of the mean squared difference, in parts of b's spread."""
    return float((a - b).square().mean().sqrt() / b.std())


def check_linears(model: Any, out: Path) -> int:
    """Each layer by itself, on inputs with outliers: where nothing adds up, both agree closely."""
    weights = open_weights(Checkpoint.open(out))
    checked = 0
    for name, module in model.named_modules():
        if type(module).__name__ != "Linear8bitLt":
            continue
        (linear,) = (x for x in weights.spec.all_linears() if name.endswith(x.name))
        q, inputs = weights.quantized(linear.tensor), weights.activation(linear.name)
        assert q is not None, linear.name
        assert inputs is not None, linear.name
        x = torch.randn(3, 5, linear.shape[1], generator=torch.Generator().manual_seed(checked))
        x[..., ::17] *= 20
        expected = fake_quantize(x, inputs) @ q.dequantize().T
        expected += 0.0 if module.bias is None else module.bias
        with torch.no_grad():
            torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
        checked += 1
    return checked


# Of what two dtypes of arithmetic may differ, in parts of the logits' spread; quantizing moves them
# by 0.025 to 0.06.
BOUNDS = {"fp32": 0.01, "bf16": 0.04}


# What a stage leaves as it is, because bitsandbytes does not read its inputs.
LEFT = {"deepseek_v3": {"ignore": ["*.kv_b_proj", "lm_head"]}}


@pytest.mark.parametrize("family", [*tiny_models.LINEAR, "gpt2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_families_load_and_agree(family: str, dtype: str, tmp_path: Path) -> None:
    stage = {**DYNAMIC, **LEFT.get(family, {})}
    source, out = make(family, tmp_path, stage, dtype=dtype)
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = load(out, stored)
    assert differ(logits(model), reference(out, source, stored)) < BOUNDS[dtype]
    if dtype == "fp32":
        # Of deepseek_v3 kv_a stays too: bitsandbytes multiplies in fp16, which may lose a latent.
        linears = {"gpt2": 8, "phi3": 8, "gpt_neox": 8, "opt": 12, "deepseek_v3": 10}.get(
            family, 14
        )
        assert check_linears(model, out) == linears
    assert verdict(stage, source) == "yes"


def test_latents_that_bitsandbytes_does_not_read(tmp_path: Path) -> None:
    source, out = make("deepseek_v3", tmp_path, DYNAMIC, dtype="fp32")
    assert verdict(DYNAMIC, source) == "no"
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        logits(load(out))


def verdict(stage: Any, source: Path) -> str:
    found = make_plan(recipe(stage), source).runtimes
    return next(str(v.verdict) for v in found if v.runtime == "transformers")


def test_calibrated_form_is_the_dynamic_one_to_others(tmp_path: Path) -> None:
    source, out = make("llama", tmp_path, CALIBRATED, dtype="fp32", tie_word_embeddings=True)
    found = logits(load(out))
    (out / SIDE_FILE).unlink()
    assert torch.equal(logits(load(out)), found)
    assert differ(found, reference(out, source)) < BOUNDS["fp32"]


def test_a_quantized_head_loads_and_agrees(tmp_path: Path) -> None:
    head = {**DYNAMIC, "targets": ["lm_head"], "ignore": []}
    source, out = make("llama", tmp_path, DYNAMIC, head, dtype="fp32")
    model = load(out)
    assert check_linears(model, out) == 15
    assert differ(logits(model), reference(out, source)) < BOUNDS["fp32"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_with_their_experts_as_they_are(family: str, tmp_path: Path) -> None:
    stage = {**DYNAMIC, "ignore": ["lm_head", "router", "*.experts.*"]}
    source, out = make(family, tmp_path, stage, dtype="fp32")
    model = load(out)
    assert check_linears(model, out) == 8
    assert differ(logits(model), reference(out, source)) < BOUNDS["fp32"]
    assert verdict(stage, source) == "yes"


def test_what_bitsandbytes_saves_opens_here(tmp_path: Path) -> None:
    """Its own int8 of a model, and ours, are the same codes and absmax."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source, out = make("gpt2", tmp_path, DYNAMIC, dtype="fp16")
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float16, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    model.save_pretrained(tmp_path / "theirs")
    theirs = open_weights(Checkpoint.open(tmp_path / "theirs"))
    ours = open_weights(Checkpoint.open(out))
    assert [x.shape for x in theirs.spec.linears()] == [x.shape for x in ours.spec.linears()]
    for a, b in zip(theirs.spec.linears(), ours.spec.linears(), strict=True):
        one, two = theirs.quantized(a.tensor), ours.quantized(b.tensor)
        assert one is not None
        assert two is not None
        assert torch.equal(one.codes, two.codes), a.name
        torch.testing.assert_close(one.scale, two.scale, rtol=2e-7, atol=0)
        assert theirs.scheme(a.name) == ours.scheme(b.name)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_what_bitsandbytes_saves_is_what_it_computes(dtype: str, tmp_path: Path) -> None:
    """Equal in 16 bits. In fp32 it multiplies code by absmax first and then by 1 / 127, so that
    both differ by one rounding."""
    import bitsandbytes as theirs
    from transformers import BitsAndBytesConfig

    stored = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    source = tiny_models.make("llama", tmp_path / "source", dtype=dtype)
    config = BitsAndBytesConfig(load_in_8bit=True)
    load(source, stored, quantization_config=config).save_pretrained(tmp_path / "out")
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    found = load(tmp_path / "out", stored)
    checked = 0
    for name, module in found.named_modules():
        if type(module).__name__ != "Linear8bitLt":
            continue
        absmax = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        plain = theirs.functional.int8_vectorwise_dequant(module.weight.data, absmax)
        bound = 1.3e-7 if dtype == "fp32" else 0.0
        ours = weights.read(f"{name}.weight")
        assert ours.dtype == stored
        assert torch.allclose(ours.double(), plain.to(stored).double(), rtol=bound, atol=0), name
        checked += 1
    assert checked == 14
