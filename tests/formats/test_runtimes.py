from typing import Any

import pytest

import tiny_models
from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.formats import runtimes
from compress.quant.scheme import ActivationScheme, QuantScheme

G4 = QuantScheme(group_size=32)
A8 = ActivationScheme()


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DecoderSpec]:
    found = {}
    for family in ("llama", "gpt2", "qwen3_moe", "gpt_neox"):
        sizes = {} if family == "gpt2" else {"hidden_size": 128}
        folder = tiny_models.make(family, tmp_path_factory.mktemp(family), **sizes)
        checkpoint = Checkpoint.open(folder)
        found[family] = describe(checkpoint.config, checkpoint.shapes)
    return found


def verdicts(spec: DecoderSpec, choose: Any, **options: Any) -> dict[str, tuple[str, str]]:
    schemes = {}
    for linear in spec.linears():
        scheme = choose if isinstance(choose, QuantScheme) else choose(linear)
        if scheme is not None and linear.role != "router":
            schemes[linear.tensor] = scheme
    found = runtimes(options.pop("fmt", "compressed-tensors"), schemes, spec, **options)
    return {v.runtime: (v.verdict, v.reason) for v in found}


def test_the_usual_case(specs: dict[str, DecoderSpec]) -> None:
    found = verdicts(specs["llama"], G4)
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "vLLM on GPU": "expected",
        "vLLM on CPU": "yes",
        "transformers": "yes",
    }


def test_an_unknown_family_is_never_a_plain_yes(specs: dict[str, DecoderSpec]) -> None:
    assert {v for v, _ in verdicts(specs["gpt_neox"], G4).values()} <= {"expected", "no"}


def test_dense_goes_everywhere(specs: dict[str, DecoderSpec]) -> None:
    integer = QuantScheme(bits=8, granularity="channel", group_size=0, activation=A8)
    for verdict, reason in verdicts(specs["gpt2"], integer, fmt="dense").values():
        assert verdict == "yes"
        assert "activations are not quantized in this format" in reason


CHANNEL8 = QuantScheme(bits=8, granularity="channel", group_size=0)


@pytest.mark.parametrize(
    ("family", "scheme", "runtime", "reason"),
    [
        ("llama", QuantScheme(bits=3, group_size=32), "vLLM on GPU", "Humming kernels take 3"),
        ("llama", QuantScheme(group_size=16), "vLLM on GPU", "groups of 32, 64 or 128"),
        ("llama", QuantScheme(bits=8, group_size=32, symmetric=False), "vLLM on GPU", "4 bits"),
        ("llama", QuantScheme(granularity="tensor", group_size=0), "vLLM on GPU", "one scale a"),
        ("llama", QuantScheme(group_size=32, activation=A8), "vLLM on GPU", "8-bit weights"),
        ("llama", QuantScheme(group_size=64), "vLLM on GPU", "96 columns divide by no group of 64"),
        ("llama", CHANNEL8, "vLLM on CPU", "4-bit weights only"),
        ("gpt2", G4, "vLLM on CPU", "head_dim 16"),
        ("qwen3_moe", G4, "vLLM on CPU", "no attention kernel for head_dim 16"),
        ("gpt2", G4, "transformers", "Conv1D"),
        ("llama", QuantScheme(group_size=64), "transformers", "96 columns divide by no group"),
        ("qwen3_moe", QuantScheme(group_size=32, symmetric=False), "transformers", "symmetric"),
    ],
)
def test_what_is_in_the_way(
    specs: dict[str, DecoderSpec], family: str, scheme: QuantScheme, runtime: str, reason: str
) -> None:
    verdict, why = verdicts(specs[family], scheme)[runtime]
    assert verdict == "no"
    assert reason in why


def test_fused_linears_that_differ(specs: dict[str, DecoderSpec]) -> None:
    found = verdicts(specs["llama"], lambda x: None if x.role == "k" else G4)
    assert "k_proj and the linears it is fused with" in found["vLLM on GPU"][1]
    assert found["transformers"][0] == "yes"


def test_g_idx_goes_nowhere(specs: dict[str, DecoderSpec]) -> None:
    for verdict, reason in verdicts(specs["llama"], G4, g_idx=True).values():
        assert verdict == "no"
        assert "use act_order 'static'" in reason


def test_transformers_with_two_schemes(specs: dict[str, DecoderSpec]) -> None:
    eight = QuantScheme(bits=8, group_size=32)
    found = verdicts(specs["llama"], lambda x: eight if x.role == "o" else G4)
    assert "not with dequantize=True" in found["transformers"][1]
    experts = verdicts(specs["qwen3_moe"], lambda x: G4 if x.role != "down" else CHANNEL8)
    assert "experts are one fused parameter" in experts["transformers"][1]
