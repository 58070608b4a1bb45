"""What llama.cpp's types cost a model: rounded by us, and by llama-quantize with llama-imatrix.

    python -m benchmarks.export.k_quants --tools FOLDER --work FOLDER

FOLDER of the tools has llama-quantize and llama-imatrix (../peers/README.md says how they are
built). Both sides see the same text (CALIBRATION tokens of tales, 512 at a time) and make every
matrix of tale-6m one type, so that all files are equal in bytes. Both are decoded by the same code,
ours, and run in fp32 by transformers over the first 120 tales of the test text: KL divergence from
the source in nats a token, and perplexity.

What the search costs is `benchmarks.export.k_quants_speed`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.processes import SHARED, package_versions, setting, write_result
from compress.methods.k_quants import KQuantsConfig, RoundedBlocks, round_weights
from compress.methods.observed import Observed
from compress_kernels import decode_blocks

MODEL = SHARED / "models/tale-6m"
TALES = SHARED / "text/tinystories"
TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
# The names by which llama-quantize takes a file that is of one type; --pure leaves no other.
ASKED = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}
# Where the tools lie is nobody else's business.
COMMAND = "python -m benchmarks.export.k_quants --tools FOLDER --work FOLDER"
CALIBRATION, LENGTH = 512 * 256, 512
TESTED, BETWEEN = 120, "<|endoftext|>"
LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SHARING = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
EMBEDDING = "token_embd"


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """model: in fp32. hessians: of what each matrix reads, by its name in GGUF without ".weight".
    tested: token ids of each text. wanted: log-probabilities of the source there."""

    model: nn.Module
    source: Mapping[str, Tensor]
    hessians: Mapping[str, Tensor]
    tested: list[Tensor]
    wanted: list[Tensor]


def matrices(model: Any) -> dict[str, nn.Module]:
    """By name in GGUF; the embedding is the head."""
    found: dict[str, nn.Module] = {EMBEDDING: model.lm_head}
    for i, layer in enumerate(model.model.layers):
        found |= {f"blk.{i}.{ours}": layer.get_submodule(at) for ours, at in LINEARS.items()}
    return found


def texts(name: str, count: int) -> list[str]:
    whole = (TALES / name).read_text().split(BETWEEN)
    return [text.strip() for text in whole if text.strip()][:count]


@torch.no_grad()
def prepare(work: Path, tokens: int = CALIBRATION) -> Bench:
    """The source, what its matrices read of the calibration text, and what it says of the other.

    tokens: of the calibration text, which lies in `work`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    text = "\n".join(texts("tinystories_train.txt", 800))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids[:tokens])
    (work / "calibration.txt").write_text(tokenizer.decode(ids))
    begin = model.config.bos_token_id
    rows = ids.view(-1, LENGTH).clone()
    rows[:, 0] = begin  # as llama-imatrix begins each chunk
    tested = [
        torch.tensor([begin, *tokenizer(x, add_special_tokens=False).input_ids])[:LENGTH]
        for x in texts("tinystories_test.txt", TESTED)
    ]
    source = {name: module.weight.detach().clone() for name, module in matrices(model).items()}
    wanted = [log_shares(model, x) for x in tested]
    return Bench(model, source, observe(model, rows), tested, wanted)


def observe(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """The mean of x xᵀ of every matrix's input, fp32 [K, K]."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            sums[name] = sums.get(name, torch.zeros(())) + (x.T @ x).double()

        return add

    hooks = [m.register_forward_pre_hook(hook(name)) for name, m in matrices(model).items()]
    for part in rows.split(4):
        model(part)
    for one in hooks:
        one.remove()
    return {name: (found / rows.numel()).float() for name, found in sums.items()}


def log_shares(model: Any, ids: Tensor) -> Tensor:
    return torch.as_tensor(model(ids[None]).logits[0].log_softmax(-1))


@torch.no_grad()
def quality(bench: Bench, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """KL divergence in nats a token, and perplexity, with these in place of the source's."""
    for name, module in matrices(bench.model).items():
        module.weight.data = weights[name]
    bench.model.get_input_embeddings().weight.data = weights[EMBEDDING]
    apart = lost = 0.0
    for ids, wanted in zip(bench.tested, bench.wanted, strict=True):
        found = log_shares(bench.model, ids)
        apart += float((wanted.exp() * (wanted - found)).sum())
        lost -= float(found[:-1].gather(1, ids[1:, None]).sum())
    tokens = sum(len(ids) for ids in bench.tested)
    guessed = tokens - len(bench.tested)
    return {"kl": apart / tokens, "perplexity": float(torch.tensor(lost / guessed).exp())}


def ours(bench: Bench, kind: str, config: KQuantsConfig) -> dict[str, RoundedBlocks]:
    """Blocks of every matrix."""
    found = dict(_rounded(bench, (EMBEDDING,), kind, config))
    layers = len(bench.source) // len(LINEARS)
    for i in range(layers):
        for group in SHARING:
            found |= _rounded(bench, [f"blk.{i}.{name}" for name in group], kind, config)
    return found


def _rounded(
    bench: Bench, names: Any, kind: str, config: KQuantsConfig
) -> Iterator[tuple[str, RoundedBlocks]]:
    weights = [bench.source[name] for name in names]
    observed = Observed(bench.hessians[names[0]])
    yield from zip(names, round_weights(weights, kind, config, observed), strict=True)


def theirs(path: Path, kind: str, heads: int) -> tuple[dict[str, Tensor], int]:
    """Matrices of a file, rows of queries and keys where transformers has them, and their bytes."""
    from gguf import GGUFReader

    found, size = {}, 0
    for tensor in GGUFReader(path).tensors:
        name = tensor.name.removesuffix(".weight")
        if name != EMBEDDING and name.rpartition(".")[2] not in LINEARS:
            continue
        assert tensor.tensor_type.name == kind, f"{name} is {tensor.tensor_type.name}"
        weight = decode_blocks(kind, torch.from_numpy(tensor.data.copy()))
        if name.endswith(("attn_q", "attn_k")):
            rows, columns = weight.shape
            weight = weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2)
        found[name] = weight.reshape(-1, weight.shape[-1]).contiguous()
        size += tensor.n_bytes
    return found, size


def tool(folder: Path, name: str, *arguments: object) -> None:
    """Runs one of llama.cpp's tools; SystemExit with its last lines where it fails."""
    command = [str(folder / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} gave {done.returncode}: {done.stderr[-2000:]}")


def compare(bench: Bench, kind: str, tools: Path, work: Path) -> dict[str, Any]:
    """Both sides of one type."""
    source, target = work / "source.gguf", work / f"{kind}.gguf"
    asked = ASKED.get(kind, kind)
    options = ("--pure", "--imatrix", work / "imatrix.gguf")
    tool(tools, "llama-quantize", *options, source, target, asked, 1)
    heads = bench.model.config.num_attention_heads
    weights, size = theirs(target, kind, heads)
    row: dict[str, Any] = {"bytes": size, "llama-quantize": quality(bench, weights)}
    for label, compensated in (("ours", True), ("ours, rounding alone", False)):
        found = ours(bench, kind, KQuantsConfig(compensate=compensated))
        assert sum(one.data.numel() for one in found.values()) == size
        decoded = {name: decode_blocks(kind, one.data) for name, one in found.items()}
        row[label] = quality(bench, decoded)
    row["kl_ratio"] = row["ours"]["kl"] / row["llama-quantize"]["kl"]
    return row


def weigh(tools: Path, work: Path) -> None:
    """llama-imatrix over the calibration text, into the work folder."""
    text, made = work / "calibration.txt", work / "imatrix.gguf"
    tool(tools, "llama-imatrix", "-m", work / "source.gguf", "-f", text,
         "-o", made, "-c", LENGTH, "-t", 1, "--no-ppl")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--types", nargs="*", default=TYPES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    bench = prepare(options.work)
    write_source(options.work / "source.gguf")
    weigh(options.tools, options.work)
    rows = {}
    for kind in options.types:
        rows[kind] = compare(bench, kind, options.tools, options.work)
        print(kind, json.dumps(rows[kind]), flush=True)
    result = {
        **setting("benchmarks.export.k_quants"),
        "command": COMMAND,
        "versions": package_versions(sys.executable, ("torch", "transformers", "gguf")),
        "tokens": sum(map(len, bench.tested)),
        "types": rows,
    }
    write_result("export_k_quants", result)


def write_source(path: Path) -> None:
    """The source as a GGUF file in fp32."""
    from compress import verbs
    from compress.artifacts.plan import ArtifactTarget
    from compress_exporters.exporter import Options

    target = ArtifactTarget("gguf", Options(dtype="fp32"))
    with tempfile.TemporaryDirectory() as work:
        verbs.export_artifact(MODEL, target, Path(work) / "source", verify=False)
        shutil.move(next(Path(work).rglob("*.gguf")), path)


if __name__ == "__main__":
    main()
