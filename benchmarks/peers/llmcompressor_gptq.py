"""GPTQ by llm-compressor as a whole process, run by that peer's own python; nothing of ours here.

    python llmcompressor_gptq.py MODEL ROWS OUT CLOCK [--group-size 128] [--batch-size 1]

ROWS: safetensors file with `ids` [samples, length], tokenized already. OUT: folder for the result.
CLOCK: JSON file for the seconds in `quantize_weight` ("solve") and in everything it does between
two forwards of a block ("method": weight observers, solves, storing the result). All options that
are not named here are llm-compressor's defaults, static act-order among them.
"""

import argparse
import json
from pathlib import Path

import llmcompressor.modifiers.gptq.base as gptq
from clock import clocked  # beside this script: its python knows nothing of this project
from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.numpy import load_file


def modifier(group_size: int) -> GPTQModifier:
    """W4A16 of all linears but the head."""
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = group_size
    return GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "rows", "out", "clock"):
        parser.add_argument(name)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    options = parser.parse_args()
    ids = load_file(options.rows)["ids"]
    spent = {name: {"calls": 0, "wall_s": 0.0, "cpu_s": 0.0} for name in ("solve", "method")}
    gptq.quantize_weight = clocked(gptq.quantize_weight, spent["solve"])
    step = clocked(GPTQModifier.on_sequential_epoch_end, spent["method"])
    GPTQModifier.on_sequential_epoch_end = step
    oneshot(
        model=options.model,
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": ids * 0 + 1}),
        recipe=modifier(options.group_size),
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
        batch_size=options.batch_size,
        save_compressed=True,
        output_dir=options.out,
    )
    Path(options.clock).write_text(json.dumps(spent))


if __name__ == "__main__":
    main()
