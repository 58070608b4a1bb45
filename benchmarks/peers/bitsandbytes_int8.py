"""LLM.int8() by bitsandbytes as a whole process, run by that peer's own python; nothing of ours.

    python bitsandbytes_int8.py MODEL OUT [--threshold 6.0]

Loads the model in 8 bit as transformers does it, lm_head kept, and saves it. Sees no data.
"""

import argparse

from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--threshold", type=float, default=6.0)
    options = parser.parse_args()
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=options.threshold)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=config, dtype="auto", device_map="cpu"
    )
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
