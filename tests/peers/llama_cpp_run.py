"""Run by a python that has llama-cpp-python: llama.cpp on one GGUF file. Usage: JOB RESULT.

JOB: {model, ids, greedy: tokens, texts: [text]}. RESULT: {logits: a row a token of ids; greedy: ids
behind them; tokens: ids of each text; metadata: of the file, as the reader has it; ends: of texts
and turns}.
"""

import json
import sys
from pathlib import Path
from typing import Any

from llama_cpp import GGML_TYPE_F32, Llama, llama_vocab_is_eog

CONTEXT = 256


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    # fp32 throughout, as the reference: the cache is fp16 by default.
    model = Llama(
        job["model"],
        n_ctx=CONTEXT,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        flash_attn=False,
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        verbose=False,
    )
    logits, greedy = chosen(model, job["ids"], job["greedy"])
    result = {
        "logits": logits,
        "greedy": greedy,
        "tokens": [model.tokenize(text.encode(), special=True) for text in job["texts"]],
        "metadata": model.metadata,
        "ends": [i for i in range(model.n_vocab()) if ends(model, i)],
    }
    Path(result_file).write_text(json.dumps(result))


def chosen(model: Any, ids: list[int], count: int) -> tuple[list[list[float]], list[int]]:
    """Logits of ids in one step, and the likeliest tokens behind them, one step each."""
    model.eval(ids)
    logits = model.scores[: len(ids)].tolist()
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(tokens[-1:])
    return logits, tokens


def ends(model: Any, token: int) -> bool:
    """Whether llama.cpp stops at it."""
    return bool(llama_vocab_is_eog(model._model.vocab, token))


if __name__ == "__main__":
    main(*sys.argv[1:])
