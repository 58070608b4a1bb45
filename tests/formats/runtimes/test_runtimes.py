from dataclasses import replace
from typing import Any

import pytest

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.formats import FP8_CACHE, INT8_CACHE
from compress.formats.runtimes.judge import runtimes
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from helpers import tiny_models

G4 = QuantScheme(group_size=32)
A8 = ActivationScheme()


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DecoderSpec]:
    found = {}
    for family in ("llama", "phi3", "gpt2", "qwen3_moe", "gpt_neox", "granite"):
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
    for fmt in ("compressed-tensors", "gptq", "fp8"):
        found = verdicts(specs["granite"], G4 if fmt != "fp8" else PRESETS["FP8_BLOCK"], fmt=fmt)
        assert {v for v, _ in found.values()} <= {"unknown", "no"}


def test_of_an_opened_class_transformers_is_expected(specs: dict[str, DecoderSpec]) -> None:
    opened = replace(specs["granite"], unnamed=())
    for fmt in ("compressed-tensors", "gptq"):
        verdict, reason = verdicts(opened, G4, fmt=fmt)["transformers"]
        assert verdict == "expected"
        assert "not loaded with granite yet" in reason
        assert verdicts(opened, G4, fmt=fmt)["vLLM on GPU"][0] == "unknown"
    assert verdicts(replace(specs["llama"], unnamed=()), G4) == verdicts(specs["llama"], G4)


def test_a_yes_is_known_where_the_family_was_tried(specs: dict[str, DecoderSpec]) -> None:
    spec = specs["gpt_neox"]
    found = verdicts(spec, G4)
    assert (found["vLLM on CPU"][0], found["transformers"][0]) == ("expected", "yes")
    assert verdicts(spec, PRESETS["FP8_BLOCK"], fmt="fp8")["transformers"][0] == "yes"
    assert verdicts(spec, G4, fmt="gptq")["transformers"][0] == "expected"
    llama = verdicts(specs["llama"], G4)
    assert (llama["vLLM on CPU"][0], llama["transformers"][0]) == ("yes", "yes")


def test_dense_goes_everywhere(specs: dict[str, DecoderSpec]) -> None:
    integer = QuantScheme(bits=8, granularity="channel", group_size=0, activation=A8)
    for verdict, reason in verdicts(specs["gpt2"], integer, fmt="dense").values():
        assert verdict == "yes"
        assert "activations are not quantized in this format" in reason


FP8, NVFP4 = PRESETS["FP8_DYNAMIC"], PRESETS["NVFP4A16"]
BLOCK = replace(PRESETS["FP8_BLOCK"], group_size=32, activation=None)
TENSOR_INPUTS = ActivationScheme(granularity="tensor")
AFP8 = ActivationScheme(type="float")
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
        (
            "llama",
            replace(FP8, activation=A8),
            "vLLM on GPU",
            "weights go with FP8 activations",
        ),
        ("llama", replace(NVFP4, activation=AFP8), "vLLM on GPU", "unquantized activations"),
        ("llama", replace(BLOCK, group_size=64), "vLLM on GPU", "up_proj: a part of 96 rows"),
        ("phi3", replace(BLOCK, group_size=48), "vLLM on GPU", "part of 128 rows, no multiple of"),
        (
            "llama",
            replace(CHANNEL8, activation=TENSOR_INPUTS),
            "vLLM on GPU",
            "activations together",
        ),
        ("llama", QuantScheme(group_size=32, activation=AFP8), "vLLM on CPU", "Hopper only"),
        ("qwen3_moe", PRESETS["W8A8_STATIC"], "vLLM on GPU", "integer experts are dynamic"),
        ("qwen3_moe", replace(FP8, activation=None), "vLLM on GPU", "no kernel for experts that"),
        ("llama", PRESETS["FP8"], "vLLM on CPU", "cannot round to FP8 with one scale a tensor"),
        ("llama", NVFP4, "vLLM on CPU", "NVFP4 kernels are for CUDA"),
        ("llama", BLOCK, "vLLM on CPU", "FP8 weights with FP8 inputs only"),
        ("llama", PRESETS["FP8_BLOCK"], "transformers", "divide by no group of inputs of 128"),
        ("qwen3_moe", BLOCK, "transformers", "FP8 experts have one scale a tensor or channel"),
        ("qwen3_moe", NVFP4, "transformers", "leaves the global scale out"),
        ("gpt2", FP8, "vLLM on GPU", "its loader would transpose the codes"),
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
    assert experts["transformers"][1] == (
        "its experts are one fused parameter and must all have one scheme:"
        " model.layers.0.mlp.experts.0.gate_proj is int4 sym g32,"
        " model.layers.0.mlp.experts.0.down_proj int8 sym channel"
    )


def test_the_layer_that_transformers_dequantizes_is_named(specs: dict[str, DecoderSpec]) -> None:
    zeros = QuantScheme(group_size=32, symmetric=False)
    found = verdicts(specs["llama"], lambda x: zeros if x.role == "down" else G4)
    assert found["transformers"][0] == "no"
    assert found["transformers"][1] == (
        "model.layers.0.mlp.down_proj: packed zero points load with dequantize=True only, and that"
        " takes one scheme a model: model.layers.0.mlp.down_proj is int4 asym g32,"
        " model.layers.0.self_attn.q_proj int4 sym g32"
    )
    floats = QuantScheme(group_size=32, activation=AFP8)
    found = verdicts(specs["llama"], lambda x: floats if x.role == "o" else G4)
    assert "o_proj: packed integers that go with float inputs load" in found["transformers"][1]


@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "NVFP4A16", "W8A8_STATIC"])
def test_presets_go_to_a_gpu_and_to_transformers(specs: dict[str, DecoderSpec], name: str) -> None:
    found = verdicts(specs["llama"], PRESETS[name])
    assert found["vLLM on GPU"][0] == "expected"
    assert found["transformers"][0] == "yes"
    assert ("in bfloat16" in found["transformers"][1]) == (name == "NVFP4A16")


def test_columns_of_a_block(specs: dict[str, DecoderSpec]) -> None:
    large = replace(BLOCK, group_size=64)
    found = verdicts(specs["llama"], lambda x: large if x.role == "down" else G4)
    assert "down_proj: its 96 columns divide by no block of 64" in found["vLLM on GPU"][1]
    assert found["transformers"][0] == "yes"


def test_a_cpu_takes_channels_with_dynamic_inputs(specs: dict[str, DecoderSpec]) -> None:
    assert verdicts(specs["llama"], FP8)["vLLM on CPU"][0] == "yes"
    assert verdicts(specs["llama"], PRESETS["W8A8_STATIC"])["vLLM on CPU"][0] == "yes"


def test_experts_with_float_inputs(specs: dict[str, DecoderSpec]) -> None:
    found = verdicts(specs["qwen3_moe"], FP8)
    assert found["transformers"] == (
        "yes",
        "dequantized at the first forward; inputs of experts are not quantized",
    )
    assert found["vLLM on GPU"][0] == "expected"


def test_integers_with_float_inputs_are_for_hopper(specs: dict[str, DecoderSpec]) -> None:
    found = verdicts(specs["llama"], QuantScheme(group_size=32, activation=AFP8))
    assert found["vLLM on GPU"] == ("expected", "on Hopper only, by the rules of vLLM 0.32")
    assert found["transformers"][1].startswith("with CompressedTensorsConfig(dequantize=True), inp")


def test_quantized_caches(specs: dict[str, DecoderSpec]) -> None:
    for choose in (G4, lambda linear: None):
        found = verdicts(specs["llama"], choose, kv_cache=FP8_CACHE)
        assert [found[name][0] for name in found] == ["expected", "yes", "yes"]
        assert "transformers 5.24 leaves the cache as it is" in found["transformers"][1]
    assert "cache" not in verdicts(specs["llama"], G4)["transformers"][1]
    found = verdicts(specs["llama"], G4, kv_cache=INT8_CACHE)
    assert found["vLLM on GPU"] == ("no", "its cache takes fp8, not a8 static")
    assert found["transformers"][0] == "yes"
    found = verdicts(specs["gpt2"], lambda linear: None, kv_cache=FP8_CACHE)
    assert "it finds no attention around" in found["transformers"][1]
    assert "its GPT-2 loader has no place" in found["vLLM on GPU"][1]
    found = verdicts(
        specs["llama"], QuantScheme(group_size=32, symmetric=False), kv_cache=FP8_CACHE
    )
    assert found["transformers"][1] == (
        "model.layers.0.self_attn.q_proj: packed zero points load with dequantize=True only, which"
        " leaves the cache unquantized"
    )
