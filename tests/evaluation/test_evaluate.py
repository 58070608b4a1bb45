"""The streamed evaluation against transformers' plain forward of the whole model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compress.blocks.sample import OwnText, generate
from compress.blocks.skeleton import Skeleton
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError, DataError
from compress.evaluation.text_quality import TextScores, evaluate, source_final_states
from compress.evaluation.texts import read_windows
from compress.evaluation.windows import TokenWindows, WindowRule, cut_windows
from compress.evaluation.workspace import Workspace
from compress.events import Event
from compress.formats import Weights, open_weights
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.text.tokenizer import load_tokenizer
from helpers import compressed_models
from helpers.tiny_models import make


def weights(path: Path) -> Weights:
    return open_weights(Checkpoint.open(path))


def random_windows(vocab: int, name: str = "random", seed: int = 0) -> TokenWindows:
    random = torch.Generator().manual_seed(seed)
    sizes = (3, 90, 41, 64, 2)
    documents = [torch.randint(vocab, (n,), generator=random).tolist() for n in sizes]
    return cut_windows(name, documents, WindowRule(32, 12), settings={"window": 32})


def whole(path: Path, windows: TokenWindows) -> tuple[Tensor, Tensor]:
    """fp64 log-probabilities [tokens, vocab] by a plain forward per window, and the targets."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows, targets = [], []
    for ids, length, first in zip(windows.ids, windows.lengths, windows.first, strict=True):
        with torch.inference_mode():
            logits = model(ids[None, :length]).logits[0]
        rows.append(logits[first - 1 : length - 1].double().log_softmax(-1))
        targets.append(ids[first:length])
    return torch.cat(rows), torch.cat(targets)


def whole_quality(source: Path, result: Path, windows: TokenWindows) -> dict[str, float]:
    (log_p, targets), (log_q, _) = whole(source, windows), whole(result, windows)
    each = torch.arange(len(targets))
    return {
        "tokens": len(targets),
        "ppl_source": math.exp(-log_p[each, targets].mean()),
        "ppl_result": math.exp(-log_q[each, targets].mean()),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "top1_agreement": float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()),
    }


def assert_equal(quality: TextScores, wanted: dict[str, float]) -> None:
    assert quality.tokens == wanted["tokens"]
    for key in ("ppl_source", "ppl_result"):
        assert getattr(quality, key) == pytest.approx(wanted[key], rel=1e-5)
    assert quality.kl == pytest.approx(wanted["kl"], rel=1e-4)
    assert quality.top1_agreement == pytest.approx(wanted["top1_agreement"], abs=1e-9)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mixtral", *(pytest.param(x, marks=pytest.mark.long)
                                             for x in ("qwen3", "gemma2"))]
)  # fmt: skip
def test_equals_plain_forwards(tmp_path: Path, family: str) -> None:
    source = make(family, tmp_path / "a", dtype="fp32", tied=family == "llama")
    result = make(family, tmp_path / "b", dtype="fp32", tied=family == "llama", seed=1)
    texts = [random_windows(256), random_windows(256, "other", seed=5)]
    config = EvaluationConfig(batch_tokens=100)
    found = evaluate(weights(result), weights(source), texts, config, Workspace(tmp_path))
    for quality, windows in zip(found, texts, strict=True):
        assert quality.name == windows.name
        assert_equal(quality, whole_quality(source, result, windows))
        assert quality.settings == {"window": 32, "dtype": "fp32"}


def test_compressed_checkpoints_count_as_their_dequantized_weights(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "a", dtype="fp32")
    scheme = QuantScheme(bits=4, group_size=32)
    written = compressed_models.write(source, tmp_path / "b", scheme)
    dense = tmp_path / "dense"
    dense.mkdir()
    save_file(written.reference(), dense / "model.safetensors", metadata={"format": "pt"})
    (dense / "config.json").write_bytes((source / "config.json").read_bytes())
    windows = random_windows(256)
    (found,) = evaluate(
        weights(written.folder), weights(source), [windows], EvaluationConfig(), Workspace(tmp_path)
    )
    # int4 of a random model: clearly another distribution.
    assert found.kl is not None
    assert found.kl > 1e-3
    assert_equal(found, whole_quality(source, dense, windows))


OUTLIERS = ActivationScheme(outliers="dynamic", threshold=2.0)
WHOLE = ActivationScheme(granularity="tensor", dynamic=True)


@pytest.mark.parametrize(
    ("fmt", "inputs"),
    [
        pytest.param("bitsandbytes", OUTLIERS, id="outlier columns of a call"),
        pytest.param(
            "compressed-tensors", WHOLE, id="one scale for a call", marks=pytest.mark.long
        ),
    ],
)
def test_tokens_that_are_rounded_together_are_those_of_a_window(
    tmp_path: Path, fmt: str, inputs: ActivationScheme
) -> None:
    """However many windows go through a block at once, and whatever fills them up."""
    source = make("llama", tmp_path / "a")
    scheme = QuantScheme(bits=8, granularity="channel", group_size=0, activation=inputs)
    result = weights(compressed_models.write(source, tmp_path / "b", scheme, fmt=fmt).folder)
    windows = random_windows(256)

    def losses(text: TokenWindows, batch_tokens: int) -> float:
        config = EvaluationConfig(batch_tokens=batch_tokens)
        (found,) = evaluate(result, None, [text], config, Workspace(tmp_path))
        return found.tokens * math.log(found.ppl_result)

    together = [losses(windows, size) for size in (1, 100, 4096)]
    each = [
        TokenWindows("one", windows.ids[i : i + 1], windows.lengths[i : i + 1], first[None])
        for i, first in enumerate(windows.first)
    ]
    assert together == pytest.approx([sum(losses(text, 4096) for text in each)] * 3, rel=1e-9)


@pytest.mark.parametrize("inputs", [OUTLIERS, WHOLE], ids=["outliers", "one scale"])
def test_samples_do_not_depend_on_each_other(tmp_path: Path, inputs: ActivationScheme) -> None:
    source = make("llama", tmp_path / "a")
    scheme = QuantScheme(bits=8, granularity="channel", group_size=0, activation=inputs)
    fmt = "bitsandbytes" if inputs is OUTLIERS else "compressed-tensors"
    result = weights(compressed_models.write(source, tmp_path / "b", scheme, fmt=fmt).folder)
    skeleton = Skeleton(result.checkpoint.config, result.spec, dtype=torch.float32)
    prompts = torch.randint(256, (6, 8), generator=torch.Generator().manual_seed(2))
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"length": 24, "seed": 0, "temperature": temperature}
        together = generate(result, skeleton, OwnText(count=6, prompt_ids=prompts, **options))
        alone = generate(result, skeleton, OwnText(count=1, prompt_ids=prompts[:1], **options))
        assert torch.equal(together[:1], alone)


def test_spilled_and_shared_states_change_nothing(tmp_path: Path) -> None:
    source = weights(make("llama", tmp_path / "a"))
    result = weights(make("llama", tmp_path / "b", seed=1))
    texts = [random_windows(256)]
    work = tmp_path / "work"
    work.mkdir()
    events: list[Event] = []
    config = EvaluationConfig(batch_tokens=100)
    small = EvaluationConfig(batch_tokens=100, spill_bytes=1)
    plain = evaluate(result, source, texts, config, Workspace(work))
    spilled = evaluate(result, source, texts, small, Workspace(work, progress=events.append))
    assert spilled == plain
    assert [(e.stage, e.unit, e.index, e.total) for e in events] == [
        ("evaluate source", "block 0", 1, 2),
        ("evaluate source", "block 1", 2, 2),
        ("evaluate result", "block 0", 1, 2),
        ("evaluate result", "block 1", 2, 2),
    ]
    with source_final_states(source, texts, small, Workspace(work)) as states:
        again = evaluate(result, source, texts, small, Workspace(work), states)
        assert states.path is not None
        assert states.path.exists()
    assert again == plain
    assert list(work.iterdir()) == []


def test_against_itself_nothing_is_lost(tmp_path: Path) -> None:
    model = weights(make("llama", tmp_path / "a"))
    (quality,) = evaluate(
        model, model, [random_windows(256)], EvaluationConfig(), Workspace(tmp_path)
    )
    assert quality.kl == 0.0
    assert quality.top1_agreement == 1.0
    assert quality.ppl_source == quality.ppl_result


def test_alone_there_is_perplexity_only(tmp_path: Path) -> None:
    model = weights(make("llama", tmp_path / "a"))
    texts = [random_windows(256)]
    (alone,) = evaluate(model, None, texts, EvaluationConfig(), Workspace(tmp_path))
    assert alone.ppl_source is alone.kl is alone.top1_agreement is None
    (both,) = evaluate(model, model, texts, EvaluationConfig(kl=False), Workspace(tmp_path))
    assert both.ppl_source == both.ppl_result == alone.ppl_result
    assert both.kl is both.top1_agreement is None


def test_bf16_blocks_are_close(tmp_path: Path) -> None:
    model = weights(make("llama", tmp_path / "a"))
    texts = [random_windows(256)]
    (exact,) = evaluate(model, None, texts, EvaluationConfig(), Workspace(tmp_path))
    (close,) = evaluate(model, None, texts, EvaluationConfig(dtype="bf16"), Workspace(tmp_path))
    assert close.ppl_result == pytest.approx(exact.ppl_result, rel=0.02)
    assert close.settings["dtype"] == "bf16"


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    a = weights(make("llama", tmp_path / "a"))
    b = weights(make("llama", tmp_path / "b", vocab_size=300))
    with pytest.raises(CheckpointError, match=r"a vocabulary of 300, .* one of 256; only models"):
        evaluate(b, a, [random_windows(256)], EvaluationConfig(), Workspace(tmp_path))


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    a = weights(make("llama", tmp_path / "a"))
    windows = cut_windows("foreign", [[1, 256]], WindowRule(32, 16))
    with pytest.raises(DataError, match=r"'foreign' holds token 256, .*vocabulary has 256"):
        evaluate(a, None, [windows], EvaluationConfig(), Workspace(tmp_path))


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    a = weights(make("llama", tmp_path / "a"))
    windows = cut_windows("short", [[1]], WindowRule(32, 16))
    with pytest.raises(DataError, match="'short' holds no token to score"):
        evaluate(a, None, [windows], EvaluationConfig(), Workspace(tmp_path))


def test_real_model_equals_plain_forwards(shared_dir: Path, tmp_path: Path) -> None:
    """stories260K, strided over real stories: perplexity within 1e-5 of the plain forward."""
    path = shared_dir / "models" / "stories260K"
    text = TextConfig(
        "stories",
        path=str(shared_dir / "text" / "tinystories" / "tinystories_test.txt"),
        max_documents=6,
    )
    config = EvaluationConfig(texts=(text,), window=96, stride=32)
    windows = read_windows(text, config, load_tokenizer(path), 512)
    (quality,) = evaluate(weights(path), weights(path), [windows], config, Workspace(tmp_path))
    wanted = whole_quality(path, path, windows)
    assert quality.ppl_result == pytest.approx(wanted["ppl_result"], rel=1e-5)
    assert quality.kl == 0.0


@pytest.mark.long
def test_published_perplexity_of_the_demo_model(shared_dir: Path, tmp_path: Path) -> None:
    """7.990 on the first 120 stories: ends stripped, BOS in front, only the first 512 tokens."""
    path = shared_dir / "models" / "tale-6m"
    text = TextConfig(
        "stories",
        path=str(shared_dir / "text" / "tinystories" / "tinystories_test.txt"),
        cut=True,
        max_documents=120,
    )
    config = EvaluationConfig(texts=(text,), window=512)
    windows = read_windows(text, config, load_tokenizer(path), 512)
    (quality,) = evaluate(weights(path), None, [windows], config, Workspace(tmp_path))
    assert quality.tokens == 24453
    assert quality.ppl_result == pytest.approx(7.990, abs=0.0005)
    assert quality.settings == {
        "mode": "documents",
        "window": 512,
        "bos": "<|endoftext|>",
        "documents": 120,
        "cut": True,
        "dtype": "fp32",
    }


@pytest.mark.long
def test_published_perplexities_of_long_texts(shared_dir: Path, tmp_path: Path) -> None:
    """The 60 first pieces of 1,500 characters, ends kept, BOS in front, cut at 512 tokens."""
    path = shared_dir / "models" / "tale-6m"
    published = {
        "novels/Stevenson_Treasure_1883.txt": 65.05,
        "wikitext-2/test.txt": 404.8,
        "tiny-shakespeare.txt": 135.4,
    }
    config, texts = EvaluationConfig(window=512), []
    for index, name in enumerate(published):
        whole_text = (shared_dir / "text" / name).read_text()
        pieces = [whole_text[start : start + 1500] for start in range(0, 60 * 1500, 1500)]
        file = tmp_path / f"{index}.jsonl"
        file.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
        text = TextConfig(name, kind="jsonl", path=str(file), cut=True)
        texts.append(read_windows(text, config, load_tokenizer(path), 512))
    for quality in evaluate(weights(path), None, texts, config, Workspace(tmp_path)):
        # Published to four digits.
        assert quality.ppl_result == pytest.approx(published[quality.name], rel=3e-4)
