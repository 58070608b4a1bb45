"""4 bits in the engine beside llama.cpp and onnxruntime-genai: prompts and outputs, by batch.

    python -m benchmarks.runtime.four_bits [400m] [--batches 1 8] [--threads 1] [--rounds 5]

One model in groups of 32, the head too, rounded by us; the same codes go into a GGUF file (Q4_0)
and a folder for onnxruntime-genai, so all read the same weights. Sides take turns: the engine in
each math, and in fp32 from the source's 16 bits and from its weights stored in 32; llama.cpp and
onnxruntime-genai as they come, which round inputs to 8 bits. A batch is of texts of one length that
begin together. `decode` is tokens behind the first of all texts by seconds, `prefill` tokens of the
prompts by the seconds to the first of all texts; medians of the rounds. ratios: the engine's decode
over the fastest of the two peers, and over the engine's from 16 and from 32 bits. A longer prompt
is for the engine alone: its prefill, over that from 16 and from 32 bits. The result goes to
benchmarks/results. llama.cpp needs its environment (benchmarks/peers/README.md,
$LLAMA_CPP_PYTHON).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.export.genai_speed import ENDS, HEAD
from benchmarks.models import SHAPES, make
from benchmarks.processes import REPO, run, threads_suffix, write_result
from benchmarks.runtime.batches import Batch, Prompts, Serve, engine_side, in_turn
from benchmarks.runtime.setting import setting
from compress_kernels.panels import Math

PROMPT, OUTPUT = 128, 64
LONG = 512
SCRIPT = Path(__file__).with_name("llama_serve.py")
PYTHON = REPO / ".venv-peers" / "llama-cpp-python" / "bin" / "python"
PEERS = ("llama.cpp", "onnxruntime-genai")
MATHS: tuple[Math, ...] = ("exact", "int16", "int8")


def llama_side(file: Path, threads: int, texts: int, stack: ExitStack) -> tuple[Serve, str]:
    """And its version."""
    python = os.environ.get("LLAMA_CPP_PYTHON", str(PYTHON))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [python, str(SCRIPT), str(file), str(threads), str(PROMPT + OUTPUT), str(texts)]
    log = stack.enter_context(file.with_suffix(".log").open("wb"))
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        words, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True
    )
    stack.callback(process.kill)

    def answer() -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("llama.cpp died: " + file.with_suffix(".log").read_text()[-2000:])

    version = str(answer()["version"])

    def serve(prompts: Prompts, output: int) -> dict[str, float]:
        assert process.stdin is not None
        print(json.dumps([prompts, output]), file=process.stdin, flush=True)
        return {"more": len(prompts) * (output - 1), **answer()}

    return serve, version


def genai_side(folder: Path, threads: int) -> Serve:
    import onnxruntime_genai as genai

    from benchmarks.export.generate import opened

    model = opened(str(folder), threads)

    def serve(prompts: Prompts, output: int) -> dict[str, float]:
        parameters, length = genai.GeneratorParams(model), len(prompts[0]) + output
        asked = {"max_length": length, "min_length": length, "batch_size": len(prompts)}
        parameters.set_search_options(do_sample=False, **asked)
        generator = genai.Generator(model, parameters)
        start = time.perf_counter()
        generator.append_tokens([token for ids in prompts for token in ids])
        generator.generate_next_token()
        first, cpu = time.perf_counter(), time.process_time()
        for _ in range(output - 1):
            generator.generate_next_token()
        rest, spent = time.perf_counter() - first, time.process_time() - cpu
        more = len(prompts) * (output - 1)
        return {"first_s": first - start, "rest_s": rest, "cpu_s": spent, "more": more}

    return serve


def widened(model: Path, out: Path) -> Path:
    """The same weights, stored in fp32."""
    out.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, out)
            continue
        wide = {name: tensor.float() for name, tensor in load_file(file).items()}
        save_file(wide, out / file.name, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    for index in out.glob("*.index.json"):
        listed = json.loads(index.read_text())
        listed["metadata"] = {}  # its total_size is of 16 bits
        index.write_text(json.dumps(listed))
    return out


def made(name: str, work: Path) -> dict[str, Path]:
    """The source, and its codes in each form."""
    model = REPO / "examples" / name if name == "tale-6m" else work / name
    if name != "tale-6m":
        make(model, SHAPES[name])
    ends = ENDS if name == "tale-6m" else HEAD
    recipe, codes = work / "int4.yaml", work / "int4"
    stage = "{method: rtn, scheme: W4A16, group_size: 32}"
    recipe.write_text(f"name: int4\ndescription: int4\nstages:\n  - {stage}\n{ends}")
    cli = [sys.executable, "-m", "compress.cli"]
    run([*cli, "run", str(recipe), "--model", str(model), "--out", str(codes)], work / "run.log")
    for form in ("gguf", "onnx-genai"):
        command = [*cli, "export", str(codes), "--to", form, "-o", str(work / form)]
        run([*command, "--no-verify"], work / f"{form}.log")
    (file,) = (work / "gguf").glob("*.gguf")
    wide = widened(model, work / "fp32")
    genai = work / "onnx-genai"
    return {"source": model, "wide": wide, "codes": codes, "gguf": file, "genai": genai}


def measure(sides: Mapping[str, Serve], texts: int, rounds: int) -> dict[str, Any]:
    of = in_turn(sides, Batch(texts, PROMPT, OUTPUT), rounds)
    others = {
        "the faster peer": max(of[name]["decode"] for name in PEERS),
        "16 bits": of["engine, 16 bits"]["decode"],
        "32 bits": of["engine, 32 bits"]["decode"],
    }
    ratios = {
        f"{math} over {name}": round(of[f"engine, {math}"]["decode"] / other, 2)
        for math in MATHS
        for name, other in others.items()
    }
    return {"texts": texts, **of, "ratios": ratios}


def long_prompt(sides: Mapping[str, Serve], rounds: int) -> dict[str, Any]:
    """Prefill of one text; sides of the engine."""
    of = in_turn(sides, Batch(1, LONG, 2), rounds)
    rates = {name: rate["prefill"] for name, rate in of.items()}
    ratios = {
        f"{math} over {bits} bits": round(
            rates[f"engine, {math}"] / rates[f"engine, {bits} bits"], 2
        )
        for math in MATHS
        for bits in (16, 32)
    }
    return {"prompt": LONG, "prefill": rates, "ratios": ratios}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="400m", choices=["tale-6m", "400m"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="one more, not counted, comes first")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        files = made(options.model, Path(folder))
        sides = {f"engine, {math}": engine_side(files["codes"], math)[0] for math in MATHS}
        sides["engine, 16 bits"] = engine_side(files["source"])[0]
        sides["engine, 32 bits"] = engine_side(files["wide"])[0]
        alone = long_prompt(sides, options.rounds)
        texts = max(options.batches)
        llama, version = llama_side(files["gguf"], options.threads, texts, stack)
        sides["llama.cpp"] = llama
        sides["onnxruntime-genai"] = genai_side(files["genai"], options.threads)
        result = {
            **setting("benchmarks.runtime.four_bits"),
            "model": options.model,
            "prompt": PROMPT,
            "output": OUTPUT,
            "rounds": options.rounds,
            "peers": {PEERS[0]: version, PEERS[1]: metadata.version(PEERS[1])},
            "gguf_bytes": files["gguf"].stat().st_size,
            "cases": [measure(sides, batch, options.rounds) for batch in options.batches],
            "long_prompt": alone,
        }
    suffix = threads_suffix(options.threads)
    write_result(f"runtime_four_bits_{options.model}{suffix}", result)


if __name__ == "__main__":
    main()
