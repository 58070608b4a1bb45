"""A latent of 512 + 64 in real vLLM on CPU, and its source, each beside transformers.

    python -m benchmarks.retrofit.in_vllm

runs tests/peers/test_vllm_latents.py and stores what it recorded as
benchmarks/results/retrofit_vllm.json. Needs vLLM's environment (benchmarks/peers/README.md).
"""

import sys

from benchmarks import recorded
from benchmarks.processes import setting, write_result

TEST = "tests/peers/test_vllm_latents.py"


def main() -> None:
    found = recorded.measure([TEST], ("latents", "versions"))
    if not found["versions"]:
        sys.exit("the test was skipped, so nothing is stored")
    made = {**setting("benchmarks.retrofit.in_vllm"), "versions": found["versions"][0]}
    write_result("retrofit_vllm", {"made": made, "cells": found["latents"]})


if __name__ == "__main__":
    main()
