"""GGUF files in transformers' reader and in llama.cpp itself: logits, tokens, tokenizers."""

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from compress.errors import CheckpointError
from compress.formats.gguf.layout import Piece
from compress.quant.ggml_mixtures import MIXTURES
from compress.quant.scheme import PRESETS, QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.gguf.loaded import LoaderResult, ask_llamacpp, in_llamacpp, in_transformers
from compress_exporters.gguf.target import GGUF
from compress_exporters.gguf.tokenizer.pretokenizers import BY_ASCII, DIGITS, GPT2, NAMES
from compress_exporters.reference import Reference
from compress_exporters.reference import text as random_ids
from helpers import tiny_models
from helpers.exporters.exports import ASYM, SYM
from helpers.exporters.gguf_files import coded, sentencepiece, source, tiny, written
from helpers.forward_cases import LLAMA3, YARN, rope

pytestmark = pytest.mark.interop
EXACT = Options("fp32")


@pytest.fixture(scope="module", autouse=True)
def _llamacpp() -> None:
    """xllamacpp brings llama.cpp compiled; it runs in a process of its own."""
    if find_spec("xllamacpp") is None:
        message = "needs xllamacpp (pip install compress-model[interop])"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


def longrope(original: int) -> dict[str, Any]:
    """llama.cpp opens files for multiples of 256 positions: 256 is short, 64 is long."""
    factors = {"short_factor": [1.0] * 4 + [1.5] * 4, "long_factor": [2.0] * 4 + [4.0] * 4}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}
    return {
        "rope_parameters": scaling,
        "original_max_position_embeddings": original,
        "max_position_embeddings": 1024,
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{x: (x, {}) for x in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")},
    **{x: (x, {}) for x in ("phi3", "olmo2", "gpt2", "gpt_neox")},
    "llama tied": ("llama", {"tied": True}),
    "llama, MLP as wide as the vocabulary": ("llama", {"intermediate_size": tiny_models.VOCAB}),
    "llama with biases": ("llama", {"bias": True}),
    "llama llama3": ("llama", rope(**LLAMA3)),
    "llama yarn": ("llama", rope(**YARN)),
    "llama linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "qwen2 yarn": ("qwen2", rope(**YARN)),
    "mistral with a window": ("mistral", {"sliding_window": 64}),
    "phi3 half rotated": ("phi3", rope(partial_rotary_factor=0.5)),
    "phi3 longrope": ("phi3", longrope(256)),
    "smollm3": ("smollm3", {"no_rope_layers": None, "num_hidden_layers": 4}),
    "gemma2": ("gemma2", {"tied": True, "sliding_window": 5}),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "layer_types": None, "sliding_window": 5, "tied": True},
    ),
    "gemma3, another pattern": ("gemma3_text", {"sliding_window": 5}),
    "gemma3 stretched": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "layer_types": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False}),
}
# llama.cpp takes GELU from a table in fp16.
PLAIN, TABLE = 1e-5, 3e-3


@pytest.mark.parametrize("case", CASES)
def test_both_compute_what_the_checkpoint_computes(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    checkpoint = tiny(tmp_path / "model", family, **options)
    plan, path = written(checkpoint, tmp_path)
    reference, ids = Reference.load(checkpoint), random_ids(checkpoint)
    seen = in_llamacpp(plan, path, reference, ids)
    assert seen.error < (PLAIN if plan.how.activation == "silu" else TABLE)
    assert seen.tokens
    if plan.arch.read_as is not None:
        seen = in_transformers(plan, path, reference, ids)
        assert seen.error < PLAIN
        assert seen.tokens


@pytest.mark.parametrize("context", [1, 2, 6, 24])
def test_files_for_few_positions(context: int, tmp_path: Path) -> None:
    """llama.cpp reads no prompt that fills them."""
    checkpoint, options = tiny(tmp_path / "model", "llama"), Options("fp32", max_context=context)
    GGUF.plan(checkpoint, options).write(tmp_path, lambda *_: None)
    proof = GGUF.plan(checkpoint, options).verify(tmp_path)
    assert proof.level == "tokens"
    said = "llama.cpp: log-probabilities" if context > 1 else "llama.cpp was not asked; it reads no"
    assert any(line.startswith(said) for line in proof.detail)


def test_long_texts_have_other_factors(tmp_path: Path) -> None:
    """Opened for more positions than the model read once, llama.cpp computes what our decoder does
    in a text that long."""
    checkpoint = tiny(tmp_path / "model", "phi3", **longrope(64))
    plan, path = written(checkpoint, tmp_path)
    reference, ids = Reference.load(checkpoint), random_ids(checkpoint)[:12]
    (row,) = ask_llamacpp(path, [ids], tiny_models.VOCAB)["logprobs"]
    want = reference.logits(ids, 65)[-1].log_softmax(-1)
    assert (torch.tensor(row) - want).abs().max() < PLAIN
    with pytest.raises(CheckpointError, match=r"logits in llama\.cpp are not those of the weights"):
        in_llamacpp(plan, path, reference, ids)


def test_tokens_are_compared_as_far_as_a_window_reaches(tmp_path: Path) -> None:
    """The file knows no windows, so behind its last position tokens may be others."""
    checkpoint = tiny(tmp_path / "model", "mistral", sliding_window=7)
    written(checkpoint, tmp_path)
    proof = GGUF.plan(checkpoint, EXACT).verify(tmp_path)
    assert proof.level == "tokens", proof.detail


SCHEMES = {
    "int4": (SYM, "llama"),
    "int4 with zero points": (ASYM, "llama"),
    "int8 a row": (PRESETS["W8A16"], "llama"),
    "int6": (QuantScheme(bits=6, group_size=32, symmetric=False), "llama"),
    "turned": (SYM, "gpt2"),
    "fused": (SYM, "phi3"),
    "fused by head": (QuantScheme(bits=8, group_size=32), "gpt_neox"),
    "experts": (SYM, "mixtral"),
    "experts with zero points": (ASYM, "qwen3_moe"),
}


@pytest.mark.parametrize("case", SCHEMES)
def test_codes_in_blocks(case: str, tmp_path: Path) -> None:
    scheme, family = SCHEMES[case]
    checkpoint = coded(tmp_path, scheme, family)
    plan, path = written(checkpoint, tmp_path / "out", round_scales=True)
    assert {"Q4_0", "Q4_1", "Q8_0"} & set(plan.kinds)
    reference, ids = Reference.load(checkpoint), random_ids(checkpoint)
    assert in_llamacpp(plan, path, reference, ids).error < 0.1
    if plan.arch.read_as is not None:
        error = in_transformers(plan, path, reference, ids).error
        assert error < (PLAIN if plan.exact else 2e-2)


@pytest.mark.parametrize("look", [in_transformers, in_llamacpp])
def test_rows_that_did_not_change_places_are_seen(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny(tmp_path / "model")
    monkeypatch.setattr(Piece, "rows", lambda piece: None)
    plan, path = written(checkpoint, tmp_path)
    with pytest.raises(CheckpointError, match="are not those of the weights: they differ by"):
        look(plan, path, Reference.load(checkpoint), random_ids(checkpoint))


def test_what_is_no_gguf_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(CheckpointError, match=r"llama\.cpp does not open the file: \w+") as problem:
        ask_llamacpp(path, [[1, 2]], 4)
    assert "\n" not in str(problem.value)


def test_the_demo_is_proved_by_both(demo_model: Path, tmp_path: Path) -> None:
    checkpoint, told = source(demo_model), EXACT
    GGUF.plan(checkpoint, told).write(tmp_path, lambda *_: None)
    proof = GGUF.plan(checkpoint, told).verify(tmp_path)
    assert proof.level == "tokens"
    assert proof.max_logit_error is not None
    assert proof.max_logit_error < 1e-4
    assert [line.split(":")[0].split(" ")[0] for line in proof.detail] == [
        "gguf",
        "transformers",
        "llama.cpp",
    ]


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_read_by_both(name: str, demo_model: Path, tmp_path: Path) -> None:
    """Real rows of 256 and 768 numbers, in super-blocks."""
    export = GGUF.plan(source(demo_model), Options(type=name))
    export.write(tmp_path, lambda *_: None)
    proof = export.verify(tmp_path)
    said = [line.split(":")[0] for line in proof.detail[-2:]]
    assert said == ["transformers", "llama.cpp"]
    assert proof.max_logit_error is not None
    assert proof.max_logit_error < 5e-3  # norms and what stays dense are in fp16


def test_rows_that_fill_no_super_block_are_read_by_both(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path / "model", "mixtral")
    export = GGUF.plan(checkpoint, Options(type="Q4_K_M"))
    export.write(tmp_path, lambda *_: None)
    assert any(line.startswith("llama.cpp") for line in export.verify(tmp_path).detail)


TEXTS = (
    "Once upon a time, there was a dog.",
    " it's I'LL we'Re  two  spaces\n\n\tand tabs \n ",
    "1 12 123 1234 12345.67 x1y22",
    "naïve Ünïcode ÉCOLE héLLo été 中文字 русский 🦙 'quoted' _under_ a/b //",
    "snake_case camelCase HTTPServer e.g. 3.14 -- ... !!! ??!",
)


def same_tokens(folder: Path, path: Path, texts: Sequence[str] = TEXTS) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = ask_llamacpp(path, [], 0, texts=texts)["tokens"]
    for text, ids in zip(texts, found, strict=True):
        assert ids == ours.encode(text).ids, text


def trained(folder: Path, cuts: tuple[str, ...], whole: bool) -> None:
    """A byte-level tokenizer of the folder's model, whose texts are cut that way."""
    steps: list[Any] = []
    for cut in cuts:
        if cut == DIGITS:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif cut != GPT2:
            steps.append(pre_tokenizers.Split(_regex(cut), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT2 in cuts))
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([x for x in TEXTS for _ in range(5)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


@pytest.mark.parametrize(("cuts", "whole"), NAMES, ids=NAMES.values())
def test_texts_are_cut_alike(cuts: tuple[str, ...], whole: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny(folder, vocab_size=2000)
    trained(folder, cuts, whole)
    plan, path = written(source(folder), tmp_path)
    assert ("tokenizer.ggml.pre", NAMES[cuts, whole]) in plan.fields
    plain = [x for x in TEXTS if x.isascii()]
    same_tokens(folder, path, plain if NAMES[cuts, whole] in BY_ASCII else TEXTS)
    if NAMES[cuts, whole] in BY_ASCII:
        assert plan.notes[0].endswith("but for words with capital letters that are not ASCII")


def test_scores_join_as_merges_do(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny(folder, vocab_size=320)
    sentencepiece(folder)
    _, path = written(source(folder), tmp_path)
    same_tokens(folder, path, (*TEXTS, "the dog the thehe he", "hthe", " the"))


def test_a_real_sentencepiece_tokenizer(shared_dir: Path, tmp_path: Path) -> None:
    folder = shared_dir / "models" / "stories260K"
    plan, path = written(source(folder), tmp_path)
    texts = [x for x in TEXTS if "  " not in x and x == x.strip()]
    same_tokens(folder, path, texts)
    reference, ids = Reference.load(plan.source), random_ids(plan.source)
    seen: LoaderResult = in_llamacpp(plan, path, reference, ids)
    assert seen.error < PLAIN
    assert seen.tokens


def test_added_tokens_are_found_in_texts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    first = len(stored["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for i, text in enumerate(("<|turn|>", "<note>"), first):
        token = {"id": i, "content": text, "special": text == "<|turn|>"}
        stored["added_tokens"].append(token | flags)
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    _, path = written(source(folder), tmp_path)
    same_tokens(folder, path, ("the dog<|turn|>a cat", "the <note> dog", "<|turn|><note>"))
