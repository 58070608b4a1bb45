"""A folder in onnxruntime-genai, and which kernels ONNX Runtime runs of a graph."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from compress.errors import CheckpointError
from compress_exporters.onnx.proof.running import SILENT, Runner


def generated(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt, up to `count`, as onnxruntime-genai chooses them.
    CheckpointError where it does not take the folder."""
    import onnxruntime_genai as genai

    try:
        model = genai.Model(str(folder))
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(
            do_sample=False, repetition_penalty=1.0, max_length=len(prompt) + count
        )
        generator = genai.Generator(model, parameters)
        generator.append_tokens(list(prompt))
        while not generator.is_done():
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
    except Exception as error:  # onnxruntime-genai's own types have no common base
        reason = " ".join(str(error).split())
        raise CheckpointError(f"onnxruntime-genai does not run {folder}: {reason}") from error


def kernels(model: Path, ids: Sequence[int]) -> Counter[str]:
    """How many nodes of each kind ONNX Runtime runs in one step, behind all its optimisations."""
    options = ort.SessionOptions()
    options.log_severity_level = SILENT
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        Runner(session).whole(np.array([ids]))
        events = json.loads(Path(session.end_profiling()).read_text())
    times = [x for x in events if x.get("cat") == "Node" and x["name"].endswith("_kernel_time")]
    return Counter(x["args"]["op_name"] for x in times)
