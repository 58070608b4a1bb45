"""Run by vLLM's own python: score rows of token ids by one checkpoint after another.

Starting Python and vLLM takes longer than scoring, so one process serves many checkpoints.
stdin: a line of JSON a checkpoint: folder, dtype, rows (lists of ids), new (tokens to continue by),
options (further ones of LLM).
stdout: a line of JSON for each: {"rows": [{"logprobs", "tokens"}, ...]} or {"failure": text}.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or every checkpoint would start a process


def score(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Log-probabilities of the likeliest tokens at every position but the first of each row."""
    from vllm import LLM, SamplingParams

    rows, new = job["rows"], job["new"]
    engine = LLM(
        model=job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=max(map(len, rows)) + new,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **job.get("options", {}),
    )
    settings = SamplingParams(
        temperature=0, max_tokens=new, prompt_logprobs=5, ignore_eos=True, detokenize=False
    )
    prompts: Any = [{"prompt_token_ids": row} for row in rows]
    return [_scored(output) for output in engine.generate(prompts, settings, use_tqdm=False)]


def _scored(output: Any) -> dict[str, Any]:
    scores = [
        {str(token): entry.logprob for token, entry in position.items()}
        for position in output.prompt_logprobs or ()
        if position is not None  # the first token has none
    ]
    return {"tokens": list(output.outputs[0].token_ids), "logprobs": scores}


def answer(line: str) -> dict[str, Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        result: dict[str, Any] = {"rows": score(json.loads(line))}
    except Exception:
        result = {"failure": traceback.format_exc()}
    with contextlib.suppress(AssertionError):  # it failed before there was anything to clean up
        cleanup_dist_env_and_memory()
    gc.collect()
    return result


def main() -> None:
    # vLLM writes to standard output: that goes to standard error, and answers to a copy.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
