"""A written file in other projects' programs: transformers' reader, and llama.cpp where it is."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from compress.arch.text_config import config_at
from compress.errors import CheckpointError
from compress.quant.ggml_kinds import KINDS
from compress_exporters.gguf.plan import GgufPlan
from compress_exporters.packages import installed
from compress_exporters.reference import Reference

TOKENS = 8  # that are generated and compared
# Largest difference of a logit beside the largest logit: where no number is rounded; where numbers
# or scales are, to fp16; and where llama.cpp rounds inputs, or takes GELU from a table.
EXACT, ROUNDED, COARSE = 1e-4, 2e-2, 1e-1
_SECONDS = 600  # that llama.cpp may take
RUN = Path(__file__).with_name("llamacpp_run.py")
PROMPTS = (6, 24)  # tokens of the prompts that llama.cpp gets


@dataclass(frozen=True, slots=True)
class LoaderResult:
    """error: largest difference of a logit. tokens: greedy ones are the same. line: both, said."""

    error: float
    tokens: bool
    line: str


def in_transformers(
    plan: GgufPlan, path: Path, reference: Reference, ids: Sequence[int]
) -> LoaderResult:
    """Logits and greedy tokens of the file's weights in transformers, with config.json's settings,
    as its reader knows few of the file's. CheckpointError where they differ."""
    model = _model(plan, path)
    want = reference.logits(ids)
    with torch.no_grad():
        error = float((model(torch.tensor([ids])).logits[0] - want).abs().max())
    limit = (EXACT if plan.exact else ROUNDED) * max(1.0, float(want.abs().max()))
    if not error <= limit:
        raise _differ("transformers", error, limit)
    prompt = list(ids[: max(1, len(ids) // 4)])
    chosen = _greedy(model, prompt, _room(ids, prompt))
    same = reference.apart(prompt, chosen, 2 * error) is None
    return LoaderResult(error, same, f"transformers: logits within {error:.2g}, {_told(same)}")


def _model(plan: GgufPlan, path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # its bars cannot be switched off
        return AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=_config(plan),
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        ).eval()


def _config(plan: GgufPlan) -> Any:
    from transformers import AutoConfig

    assert plan.arch.read_as is not None
    source = plan.source
    text = config_at(source.checkpoint.config, source.spec.text_config)
    kept = {k: v for k, v in text.items() if k not in ("model_type", "quantization_config")}
    kept["tie_word_embeddings"] = not any(x.name == "output.weight" for x in plan.pieces)
    return AutoConfig.for_model(plan.arch.read_as, **kept)


def why_not_in_transformers(plan: GgufPlan) -> str | None:
    """Why its reader does not open the file: it takes several kinds of models for one class, which
    may refuse what theirs takes (a mistral whose heads do not divide hidden is read as a llama)."""
    if plan.arch.read_as is None:
        return f"transformers reads no GGUF files of {plan.source.spec.model_type}"
    # Late: a plan of an export runs no block.
    from compress.blocks.model import short_reason

    try:
        _config(plan)
    except Exception as error:  # transformers' classes check in many ways
        return f"transformers reads the file as {plan.arch.read_as}: {short_reason(error)}"
    return None


def _room(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens behind a prompt that are generated and compared, 1 at least: `ids` are as many as the
    file has positions for, of which the last token takes none, and beyond a window it says nothing
    of what lies outside."""
    return min(TOKENS, len(ids) + 1 - len(prompt))


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _told(same: bool) -> str:
    return f"greedy tokens are {'the same' if same else 'not all the same'}"


def has_accelerate() -> bool:
    """Whether transformers can read GGUF files."""
    return installed("accelerate")


def has_llamacpp() -> bool:
    return installed("xllamacpp")


def in_llamacpp(
    plan: GgufPlan,
    path: Path,
    reference: Reference,
    ids: Sequence[int],
    python: str = sys.executable,
) -> LoaderResult:
    """Log-probabilities and greedy tokens in llama.cpp, in a process of its own, which a fault in
    it would end. ids: 2 at least. CheckpointError where it does not open the file, or they
    differ."""
    # It reads no prompt that fills the file's positions.
    prompts = [list(ids[:n]) for n in PROMPTS if n < len(ids)] or [list(ids[:-1])]
    found = ask_llamacpp(path, prompts, plan.source.spec.embedding_shape[0], python=python)
    wanted = [reference.logits(prompt)[-1].log_softmax(-1) for prompt in prompts]
    rows = zip(found["logprobs"], wanted, strict=True)
    error = max(float((torch.tensor(row) - want).abs().max()) for row, want in rows)
    largest = max(1.0, *(float(want.abs().max()) for want in wanted))
    limit = largest * (EXACT if _fp32(plan) else COARSE)
    if not error <= limit:
        raise _differ("llama.cpp", error, limit)
    chosen = (
        (prompt, x[: _room(ids, prompt)])
        for prompt, x in zip(prompts, found["greedy"], strict=True)
    )
    same = all(reference.apart(prompt, x, 2 * error) is None for prompt, x in chosen)
    how = _rounding(set(plan.kinds))
    line = f"llama.cpp: log-probabilities within {error:.2g}{how}, {_told(same)}"
    return LoaderResult(error, same, line)


def _rounding(kinds: set[str]) -> str:
    """What it does to inputs of products."""
    if any(KINDS[kind].block > 1 for kind in kinds):
        return " (it rounds inputs of blocks to 8 bits)"
    halves = sorted(kinds & {"F16", "BF16"})
    return f" (it rounds inputs of products to {' and '.join(halves)})" if halves else ""


def ask_llamacpp(
    path: Path,
    prompts: Sequence[Sequence[int]],
    vocab: int,
    *,
    texts: Sequence[str] = (),
    python: str = sys.executable,
    seconds: float = _SECONDS,
) -> dict[str, Any]:
    """What llamacpp_run.py answers. CheckpointError where llama.cpp does not open the file, or has
    no answer after some seconds."""
    job = {"model": str(path), "vocab": vocab, "context": 128, "greedy": TOKENS}
    with TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(job | {"prompts": prompts, "texts": list(texts)}))
        try:
            done = subprocess.run(
                [python, str(RUN), str(asked), str(answer)],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(
                f"llama.cpp did not answer within {seconds:g} seconds; --no-verify leaves it out"
            ) from error
        if done.returncode or not answer.is_file():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise CheckpointError(f"llama.cpp does not open the file: {last[:200]}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def _fp32(plan: GgufPlan) -> bool:
    """Whether llama.cpp computes in fp32 throughout: its GELU is a table in fp16."""
    return set(plan.kinds) == {"F32"} and plan.how.activation == "silu"


def _differ(program: str, error: float, limit: float) -> CheckpointError:
    return CheckpointError(
        f"the file's logits in {program} are not those of the weights: they differ by {error:.3g},"
        f" and {limit:.3g} is allowed; please report this with the model"
    )
