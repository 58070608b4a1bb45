import pytest

from compress.arch.text_config import TEXT_CONFIGS
from compress.checkpoint.detect import detect, find_block, without_block


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "AWQ"}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"producer": {"name": "modelopt"}, "quant_algo": "NVFP4"}, "modelopt"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"bits": 4}, "an unnamed format"),
    ],
)
def test_by_config(block: dict[str, object], name: str) -> None:
    assert detect({"quantization_config": block}, ()) == name
    assert detect({"compression_config": block}, ()) == name


@pytest.mark.parametrize("block", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("key", TEXT_CONFIGS)
def test_in_the_decoders_own_config(key: str, block: str) -> None:
    said = {"quant_method": "awq", "bits": 4}
    config = {"model_type": "some_vlm", key: {"model_type": "llama", block: said}}
    assert detect(config, ()) == "awq"
    assert find_block(config) == (f"{key}.{block}", said)
    plain = {"model_type": "some_vlm", key: {"model_type": "llama"}}
    assert without_block({**config, block: said}) == without_block(config) == plain
    outer = {**config, "quantization_config": {"quant_method": "gptq"}}
    assert detect(outer, ()) == "gptq", "the top goes before"


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("a.weight_packed", "compressed-tensors"),
        ("a.weight_global_scale", "compressed-tensors"),
        ("a.qweight", "gptq or awq"),
        ("a.SCB", "bitsandbytes"),
        ("a.weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("a.weight_scale_inv", "fp8"),
        ("a.weight_scale", "an unnamed format with weight_scale tensors"),
    ],
)
def test_by_names(tensor: str, name: str) -> None:
    assert detect({}, ["a.weight", tensor]) == name


def test_dense() -> None:
    assert detect({"quantization_config": None}, ["a.weight", "a.bias", "x_blocks"]) is None
    assert detect({}, ["x_blocks", "x_scales"]) == "mxfp4"
