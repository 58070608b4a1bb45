"""Run by vLLM's own python: serve a load, and say when each token came.

Arguments: the checkpoint's folder, dtype, the longest text in tokens, "eager" or "compiled".
stdin: a line of JSON a load: [[prompt ids, tokens of output], ...].
stdout: a line of JSON for each: {"tokens": [[seconds, ...], ...], "cpu_s"}; the first line says
{"version"} when the engine is up.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's time is this process's time


def main(folder: str, dtype: str, longest: str, mode: str) -> None:
    import vllm

    model = vllm.LLM(
        model=folder,
        dtype=dtype,
        enforce_eager=mode == "eager",
        max_model_len=int(longest),
        max_num_seqs=256,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )
    answer({"version": vllm.__version__})
    for number, line in enumerate(sys.stdin):
        answer(serve(model.llm_engine, json.loads(line), number))


def answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), file=sys.__stdout__, flush=True)


def serve(engine: Any, jobs: list[tuple[list[int], int]], number: int) -> dict[str, Any]:
    from vllm import SamplingParams

    times: dict[str, list[float]] = {f"{number}-{i}": [] for i in range(len(jobs))}
    start, cpu = time.perf_counter(), time.process_time()
    for name, (prompt, output) in zip(times, jobs, strict=True):
        settings = SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        engine.add_request(name, {"prompt_token_ids": prompt}, settings)
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter() - start
        for output in outputs:
            own = times[output.request_id]
            own += [now] * (len(output.outputs[0].token_ids) - len(own))
    return {"tokens": list(times.values()), "cpu_s": time.process_time() - cpu}


if __name__ == "__main__":
    main(*sys.argv[1:])
