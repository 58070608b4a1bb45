"""Run by llama-cpp-python's own python: serve batches from a GGUF file, and say how long they took.

Arguments: the file, threads, tokens of a text at most, texts of a batch at most. stdin: a line of
JSON a batch: [[prompt ids, ...], tokens of output]. stdout: a line for each, {"first_s", "rest_s",
"cpu_s"}: until all have their first token, from there to the last, and processor time of the
latter; the first line says {"version"} when the model is open.
"""

import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np


class Server:
    """Keys and values are fp16, as llama.cpp has them by default."""

    def __init__(self, file: str, threads: int, longest: int, texts: int) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = longest * texts
        settings.n_ubatch, settings.n_seq_max = 512, texts
        settings.n_threads = settings.n_threads_batch = threads
        plain = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), plain)
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(longest * texts, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.width = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def serve(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        start = time.perf_counter()
        chosen = self.step(prompts, 0)
        first, cpu = time.perf_counter(), time.process_time()
        for more in range(tokens - 1):
            chosen = self.step([[token] for token in chosen], len(prompts[0]) + more)
        spent = time.process_time() - cpu
        return {
            "first_s": first - start,
            "rest_s": time.perf_counter() - first,
            "cpu_s": spent,
        }

    def step(self, texts: list[list[int]], position: int) -> list[int]:
        """The likeliest next token of each text; all begin at one position."""
        batch, asked = self.batch, []
        batch.n_tokens = 0
        for number, ids in enumerate(texts):
            for offset, token in enumerate(ids):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, position + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                batch.logits[at] = offset == len(ids) - 1
                batch.n_tokens += 1
            asked.append(batch.n_tokens - 1)
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama.cpp did not take a batch")
        return [self.likeliest(at) for at in asked]

    def likeliest(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, at)
        return int(np.ctypeslib.as_array(logits, shape=(self.width,)).argmax())


def answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def main(file: str, threads: str, longest: str, texts: str) -> None:
    server = Server(file, int(threads), int(longest), int(texts))
    answer({"version": llama_cpp.__version__})
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        answer(server.serve(prompts, tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
