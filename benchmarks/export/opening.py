"""Processor time and memory that ONNX Runtime takes to open a graph. Prints JSON.

python -m benchmarks.export.opening MODEL.onnx
"""

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

STEPS = 15


def opened(model: Path) -> tuple[ort.InferenceSession, dict[str, float]]:
    """The session, and the seconds of processor time that it took; one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    start = time.process_time()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session, {"cpu_s": time.process_time() - start}


def step(session: ort.InferenceSession) -> float:
    """Seconds of a token behind nothing, after one that is not counted."""
    given = {"input_ids": [[1]], "attention_mask": [[1]], "position_ids": [[0]]}
    inputs = {name: np.array(value, np.int64) for name, value in given.items()}
    for value in session.get_inputs():
        if value.name not in inputs:
            inputs[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    seconds = []
    for _ in range(STEPS + 1):
        start = time.process_time()
        session.run(["logits"], inputs)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def peak_mb() -> float:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main(arguments: list[str]) -> None:
    before = peak_mb()
    session, cost = opened(Path(arguments[0]))
    peaks = {"peak_rss_mb_before": before, "peak_rss_mb_open": peak_mb()}
    seconds = step(session)
    print(json.dumps({**cost, "step_cpu_s": seconds, **peaks, "peak_rss_mb": peak_mb()}))


if __name__ == "__main__":
    main(sys.argv[1:])
