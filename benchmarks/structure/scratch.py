"""The same shape before it has learned anything.

    python -m benchmarks.structure.scratch RESULT FOLDER

FOLDER gets the config and the tokenizer of a result, and weights as transformers draws them for a
model that is to be trained.
"""

import argparse
import shutil
from pathlib import Path

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def main() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("result", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.result))
    model.to(torch.bfloat16).save_pretrained(options.folder)
    for name in TOKENIZER:
        shutil.copyfile(options.result / name, options.folder / name)


if __name__ == "__main__":
    main()
