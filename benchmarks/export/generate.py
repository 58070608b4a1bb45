"""Folders in onnxruntime-genai, taking turns: prompts read and tokens generated a second.

    python -m benchmarks.export.generate ours=FOLDER builder=FOLDER PROMPT TOKENS ROUNDS THREADS

Threads of ONNX Runtime spin for a while when a text is done, and halve the speed of what another
model begins meanwhile (on two cores, prompts of tale-6m: 8,600 tokens/s for 19,000): before a turn
comes a pause, and a short text that is not counted. Prints JSON. ratios are those of each folder
over the last, medians over the rounds.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")
PAUSE = 0.2  # seconds
WARM = 8  # tokens, read and generated


def opened(folder: str, threads: int) -> Any:
    import onnxruntime_genai as genai

    config = genai.Config(folder)
    session = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": session}}))
    return genai.Model(config)


def served(model: Any, prompt: list[int], tokens: int) -> dict[str, float]:
    """One text, greedily, as long as asked whatever ends it."""
    import onnxruntime_genai as genai

    parameters, length = genai.GeneratorParams(model), len(prompt) + tokens
    parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = genai.Generator(model, parameters)
    start = time.perf_counter()
    generator.append_tokens(prompt)
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(tokens - 1):
        generator.generate_next_token()
    end = time.perf_counter()
    return dict(
        zip(RATES, (len(prompt) / (first - start), (tokens - 1) / (end - first)), strict=True)
    )


def warmed(model: Any, prompt: list[int]) -> None:
    time.sleep(PAUSE)
    served(model, prompt[:WARM], WARM)


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Of the rates of the same rounds."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        rate: round(statistics.median(a[rate] / b[rate] for a, b in pairs), 3) for rate in RATES
    }


def main(arguments: list[str]) -> None:
    folders = dict(pair.split("=", 1) for pair in arguments[:-4])
    prompt, tokens, rounds, threads = map(int, arguments[-4:])
    models = {name: opened(folder, threads) for name, folder in folders.items()}
    config = json.loads((Path(folders[next(iter(folders))]) / "genai_config.json").read_text())
    vocab = config["model"]["vocab_size"]
    ids = np.random.default_rng(0).integers(1, vocab, prompt).tolist()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for number in range(rounds + 1):
        # The first goes last in half of the rounds.
        names = list(models)[:: 1 if number % 2 else -1]
        for name in names:
            warmed(models[name], ids)
            found = served(models[name], ids, tokens)
            if number:
                runs[name].append(found)
    result: dict[str, Any] = {
        name: {rate: round(statistics.median(x[rate] for x in found), 1) for rate in RATES}
        for name, found in runs.items()
    }
    *ours, last = runs
    result["ratios"] = {name: ratios(runs[name], runs[last]) for name in ours}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
