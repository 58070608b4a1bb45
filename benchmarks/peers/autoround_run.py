"""AutoRound as a whole process, run by a python that has auto-round; nothing of ours.

    python autoround_run.py MODEL OUT --rows ROWS [--iters 200] [--group-size 128]

ROWS: safetensors file with `ids` [samples, length], tokenized already. OUT: folder for the result,
symmetric 4 bits in the GPTQ format. All options that are not named here are auto-round's defaults.
"""

import argparse
import shutil
from pathlib import Path

from auto_round import AutoRound
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--group-size", type=int, default=128)
    options = parser.parse_args()
    ids = load_file(options.rows)["ids"]
    rounding = AutoRound(
        AutoModelForCausalLM.from_pretrained(options.model, dtype="auto"),
        AutoTokenizer.from_pretrained(options.model),
        bits=4,
        group_size=options.group_size,
        sym=True,
        iters=options.iters,
        dataset=DataLoader(ids, batch_size=1),
        nsamples=len(ids),
        seqlen=ids.shape[1],
        device_map="cpu",
    )
    rounding.quantize_and_save(str(options.out), format="auto_gptq")
    found = [path.parent for path in options.out.rglob("config.json")]
    if found and found[0] != options.out:  # it may name a folder below after the scheme
        for path in found[0].iterdir():
            shutil.move(path, options.out / path.name)


if __name__ == "__main__":
    main()
