"""Verdicts on GPTQ and AWQ: yes where tests/peers saw it, and every reason for a no."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.formats.runtimes.judge import runtimes
from compress.quant.scheme import QuantScheme
from helpers import tiny_models

G4 = QuantScheme(group_size=32)
ASYMMETRIC = replace(G4, symmetric=False)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DecoderSpec]:
    made: dict[str, DecoderSpec] = {}

    def spec(family: str) -> DecoderSpec:
        if family not in made:
            sizes = {} if family == "gpt2" else {**SIZES, "head_dim": 32}
            folder = tiny_models.make(family, tmp_path_factory.mktemp(family), **sizes)
            tensors = load_file(folder / "model.safetensors")
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            made[family] = describe(json.loads((folder / "config.json").read_text()), shapes)
        return made[family]

    return spec


def verdicts(
    spec: DecoderSpec,
    fmt: str,
    choose: Callable[[LinearSpec], QuantScheme | None],
    **options: Any,
) -> dict[str, tuple[str, str]]:
    """(verdict, reason) by runtime; `choose` is not asked about routers and embeddings."""
    chosen = {x.tensor: choose(x) for x in spec.all_linears() if x.role not in _LEFT_OUT}
    schemes = {name: scheme for name, scheme in chosen.items() if scheme is not None}
    return {v.runtime: (v.verdict, v.reason) for v in runtimes(fmt, schemes, spec, **options)}


_LEFT_OUT = ("router", "embedding")


def inside(scheme: QuantScheme) -> Callable[[LinearSpec], QuantScheme | None]:
    return lambda linear: None if linear.role == "head" else scheme


@pytest.mark.parametrize(
    ("fmt", "scheme"), [("gptq", G4), ("gptq_v2", G4), ("awq", ASYMMETRIC), ("awq", G4)]
)
def test_plain_results_load_everywhere(specs: Any, fmt: str, scheme: QuantScheme) -> None:
    found = verdicts(specs("llama"), fmt, inside(scheme))
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "vLLM on GPU": "expected",
        "vLLM on CPU": "yes",
        "transformers": "yes",
    }


def _split(linear: LinearSpec) -> QuantScheme | None:
    return None if linear.role in ("q", "head") else G4


def _down_dense(linear: LinearSpec) -> QuantScheme | None:
    return None if linear.role in ("down", "head") else G4


@pytest.mark.parametrize(
    ("family", "fmt", "choose", "options", "runtime", "reason"),
    [
        ("llama", "gptq_v2", inside(ASYMMETRIC), {}, "vLLM on CPU", "symmetric weights of 4 or 8"),
        ("llama", "gptq", inside(G4), {"g_idx": True}, "vLLM on GPU", "use act_order 'static'"),
        ("llama", "gptq", inside(replace(G4, bits=8)), {}, "vLLM on CPU", "4-bit weights only"),
        ("llama", "gptq", inside(QuantScheme(group_size=16)), {}, "vLLM on CPU", "not of 16"),
        ("gpt2", "gptq", inside(QuantScheme()), {}, "vLLM on GPU", "no group of 128"),
        ("llama", "gptq", _split, {}, "vLLM on CPU", "is fused with have different schemes"),
        ("llama", "awq", _split, {}, "vLLM on GPU", "is fused with have different schemes"),
        ("llama", "gptq", _down_dense, {}, "transformers", "down_proj unquantized"),
        ("llama", "gptq", lambda linear: G4, {}, "transformers", "optimum replaces linears of"),
        ("llama", "awq", lambda linear: G4, {}, "transformers", "leaves output heads as they are"),
        ("gpt2", "awq", inside(G4), {}, "transformers", "is a Conv1D"),
        ("gpt2", "gptq", inside(G4), {}, "vLLM on CPU", "no attention kernel for head_dim 16"),
        ("qwen3_moe", "gptq", inside(G4), {}, "vLLM on CPU", "no kernels for quantized experts"),
        ("qwen3_moe", "awq", inside(G4), {}, "transformers", "experts are one parameter"),
    ],
)
def test_what_is_refused_and_why(
    specs: Any, family: str, fmt: str, choose: Any, options: Any, runtime: str, reason: str
) -> None:
    verdict, said = verdicts(specs(family), fmt, choose, **options)[runtime]
    assert verdict == "no"
    assert reason in said


def test_dense_layers_load_in_transformers_with_awq(specs: Any) -> None:
    assert verdicts(specs("llama"), "awq", _down_dense)["transformers"][0] == "yes"
