"""Runs llama.cpp on one GGUF file, in a Python that has xllamacpp. Arguments: JOB RESULT.

JOB and RESULT are JSON files.
JOB: {model: path, vocab: number of tokens, context: positions, prompts: [[id]], texts: [str],
greedy: number of tokens to write behind each prompt}.
RESULT: {logprobs: [prompts, vocab], natural logarithms for the token after each prompt; tokens:
[[id]] of each text; greedy: [[id]] behind each prompt}.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


def serve(job: dict[str, Any]) -> Any:
    """A server of llama.cpp with the job's model, in this process."""
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_ctx = job["context"]
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # fp32 throughout, as the reference: flash attention and the cache are fp16 by default.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def logprobs(server: Any, ids: list[int], vocab: int) -> list[float]:
    """Log-probability of every token, by id, as the one after `ids`."""
    asked = {"prompt": ids, "max_tokens": 1, "logprobs": vocab, "cache_prompt": False}
    found = server.handle_completions(asked | {"temperature": 0})
    top = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    row = {entry["id"]: entry["logprob"] for entry in top}
    return [row[i] for i in range(vocab)]


def greedy(server: Any, ids: list[int], count: int) -> list[int]:
    """The `count` tokens that llama.cpp writes after `ids` at temperature 0."""
    asked = {"prompt": ids, "max_tokens": count, "logprobs": 1, "temperature": 0}
    found = server.handle_completions(asked | {"cache_prompt": False})
    return [entry["id"] for entry in found["choices"][0]["logprobs"]["content"]]


def tokenize(server: Any, text: str) -> list[int]:
    """Ids of a text. xllamacpp has no function for it, so the server is asked by HTTP."""
    asked = {"content": text, "add_special": True, "parse_special": True}
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        tokens: list[int] = json.loads(answer.read())["tokens"]
    return tokens


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    server = serve(job)
    result = {
        "logprobs": [logprobs(server, ids, job["vocab"]) for ids in job["prompts"]],
        "tokens": [tokenize(server, text) for text in job["texts"]],
        "greedy": [greedy(server, ids, job["greedy"]) for ids in job["prompts"]],
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
