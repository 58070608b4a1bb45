"""Run by gptqmodel's own python: what its torch kernels make of many checkpoints.

usage: matrix_gptqmodel_run.py PROMPTS NEW_TOKENS CHECKPOINT ...
PROMPTS: safetensors with ids, int64 [rows, tokens]. Beside each checkpoint comes NAME.outputs,
safetensors with logits and tokens. What gptqmodel refuses is opened by transformers with its
kernels, and NAME.error has what gptqmodel said; without NAME.outputs transformers failed as well.
"""

import sys
from pathlib import Path
from typing import Any

from gptqmodel_run import is_awq  # sets os.cpu_count, which gptqmodel reads when it is imported

sys.path.append(str(Path(__file__).resolve().parents[1]))


def by_itself(checkpoint: str) -> Any:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    backend = BACKEND.AWQ_TORCH if is_awq(checkpoint) else BACKEND.GPTQ_TORCH
    return GPTQModel.load(checkpoint, backend=backend, device="cpu", dtype=torch.float16).model


def in_transformers(checkpoint: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GPTQConfig

    config = GPTQConfig(bits=4, backend="gptq_torch")  # bits are those of the checkpoint
    options = {"quantization_config": config, "dtype": torch.float16}
    return AutoModelForCausalLM.from_pretrained(checkpoint, **options)


def run(model: Any, checkpoint: str, ids: Any, count: int) -> None:
    """In fp32, but for AWQ, whose kernel is in fp16 only."""
    import torch
    from safetensors.torch import save_file

    from helpers.greedy import greedy

    if not is_awq(checkpoint):
        torch.nn.Module.float(model)  # transformers' own refuses quantized models
    with torch.no_grad():
        logits = model.eval()(ids).logits.float().contiguous()
    tokens, _ = greedy(model, ids, count)
    save_file({"logits": logits, "tokens": tokens}, f"{checkpoint}.outputs")


def main() -> None:
    from safetensors.torch import load_file

    prompts, count, *checkpoints = sys.argv[1:]
    ids = load_file(prompts)["ids"]
    for checkpoint in checkpoints:
        for opened in (by_itself, in_transformers):
            try:
                run(opened(checkpoint), checkpoint, ids, int(count))
            except Exception as problem:  # a refusal of theirs, of whatever type, is a cell
                with open(f"{checkpoint}.error", "a") as file:
                    print(f"{type(problem).__name__}: {problem}", file=file)
            else:
                break


if __name__ == "__main__":
    main()
