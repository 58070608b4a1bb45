"""Any method of llm-compressor as a whole process, run by that peer's own python; nothing of ours.

    python llmcompressor_run.py MODEL OUT --scheme W4A16 [--group-size 64 | --channel]
        [--fold awq|smoothquant] [--strength 0.8] [--round rtn|gptq] [--cache] [--rows ROWS]

ROWS: safetensors file with `ids` [samples, length], tokenized already; left out for methods that
see no data. OUT: folder for the result. All options that are not named here are llm-compressor's
defaults; lm_head is kept.
"""

import argparse
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from safetensors.numpy import load_file

ROUNDS = {"rtn": QuantizationModifier, "gptq": GPTQModifier}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def scheme(options: argparse.Namespace) -> Any:
    """The preset, with other groups where asked for."""
    found = preset_name_to_scheme(options.scheme, ["Linear"])
    if options.channel:
        found.weights.strategy, found.weights.group_size = QuantizationStrategy.CHANNEL, None
    elif options.group_size:
        found.weights.group_size = options.group_size
    return found


def modifiers(options: argparse.Namespace) -> list[Any]:
    """What to do, in order: a fold where asked for, then the rounding."""
    folds: dict[str, Any] = {
        "awq": AWQModifier,
        "smoothquant": lambda: SmoothQuantModifier(smoothing_strength=options.strength),
    }
    before = [folds[options.fold]()] if options.fold else []
    groups = {"group_0": scheme(options)}
    cache = {"kv_cache_scheme": CACHE} if options.cache else {}
    return [*before, ROUNDS[options.round](config_groups=groups, ignore=["lm_head"], **cache)]


def calibration(rows: str | None) -> dict[str, Any]:
    """Arguments of `oneshot` about the data, batches of one row as is its default."""
    if rows is None:
        return {}
    ids = load_file(rows)["ids"]
    return {
        "dataset": Dataset.from_dict({"input_ids": ids, "attention_mask": ids * 0 + 1}),
        "num_calibration_samples": len(ids),
        "max_seq_length": ids.shape[1],
        "batch_size": 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--rows")
    parser.add_argument("--scheme", required=True)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--channel", action="store_true")
    parser.add_argument("--fold", choices=("awq", "smoothquant"))
    parser.add_argument("--strength", type=float, default=0.5, help="of smoothquant")
    parser.add_argument("--round", choices=tuple(ROUNDS), default="rtn")
    parser.add_argument("--cache", action="store_true", help="scales of an FP8 cache too")
    options = parser.parse_args()
    # AWQ pins its cache in memory for a GPU, which fails on a machine that has none.
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    oneshot(
        model=options.model,
        recipe=modifiers(options),
        save_compressed=True,
        output_dir=options.out,
        **calibration(options.rows),
    )


if __name__ == "__main__":
    main()
