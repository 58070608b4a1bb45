"""Tokenizers in GGUF's words: what is said, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CheckpointError
from compress_exporters.gguf.tokenizer.pretokenizers import GPT2, LLAMA3, NAMES, QWEN2, cuts_of
from compress_exporters.gguf.tokenizer.tokenizer import Vocabulary, model_name, vocabulary
from compress_exporters.gguf.tokenizer.tokens import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from helpers import tiny_models
from helpers.exporters.exports import copied
from helpers.exporters.gguf_files import change, sentencepiece, source

REMEDY = ", so take onnx, beside which tokenizer.json lies as it is"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints: `folder` as tiny_models makes it, `pieces` with a sentencepiece's
    tokenizer."""
    base = tmp_path_factory.mktemp("tokenizers")
    tiny_models.make("llama", base / "folder", dtype="fp32")
    sentencepiece(tiny_models.make("llama", base / "pieces", dtype="fp32", vocab_size=320))
    return base


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return copied(made / "folder", tmp_path / "model")


@pytest.fixture
def pieces(made: Path, tmp_path: Path) -> Path:
    return copied(made / "pieces", tmp_path / "pieces")


def said(folder: Path) -> dict[str, Any]:
    return {k.removeprefix("tokenizer.ggml."): v for k, v in vocabulary(source(folder)).fields}


def stored(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer.json").read_text())


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as problem:
        vocabulary(source(folder))
    text = str(problem.value)
    assert "\n" not in text
    return text.removeprefix(f"{folder / 'tokenizer.json'}: ")


def test_byte_level_tokens_and_merges(folder: Path) -> None:
    found, model = said(folder), stored(folder)["model"]
    assert (found["model"], found["pre"]) == ("gpt2", "gpt-2")
    for text, i in model["vocab"].items():
        assert found["tokens"][i] == text
    assert found["merges"] == tuple(" ".join(pair) for pair in model["merges"])
    assert found["token_type"][0] == CONTROL
    assert (found["bos_token_id"], found["eos_token_id"], found["padding_token_id"]) == (0, 0, 0)
    assert (found["add_bos_token"], found["add_eos_token"]) == (False, False)
    assert "scores" not in found


def test_rows_without_a_token_have_names_of_their_own(folder: Path) -> None:
    count = len(stored(folder)["model"]["vocab"])
    assert count < tiny_models.VOCAB
    added = {"id": count, "content": f"[PAD{count + 1}]", "special": False, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokens = [*stored(folder)["added_tokens"], added | flags]
    change(folder, "tokenizer.json", added_tokens=tokens)
    found = said(folder)
    assert len(found["tokens"]) == len(set(found["tokens"])) == tiny_models.VOCAB
    assert found["tokens"][count : count + 3] == (
        f"[PAD{count + 1}]",
        f"[[PAD{count + 1}]]",
        f"[PAD{count + 2}]",
    )
    assert found["token_type"][count : count + 2] == (USER_DEFINED, UNUSED)


def test_a_turn_may_end_in_another_way_than_a_text(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[0, 7, 9])
    found = said(folder)
    assert [found[f"{x}_token_id"] for x in ("eos", "eot", "eom")] == [0, 7, 9]


def test_ends_that_only_config_json_names(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change(folder, "config.json", eos_token_id=[7, 0, 99999])
    found = said(folder)
    assert [found.get(f"{x}_token_id") for x in ("eos", "eot", "eom")] == [0, 7, None]


def test_more_ends_than_there_are_keys_are_told(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[7, 0, 9, 8, 10])
    assert [said(folder)[f"{x}_token_id"] for x in ("eos", "eot", "eom")] == [0, 7, 9]
    tokens = said(folder)["tokens"]
    (note,) = vocabulary(source(folder)).notes
    assert note == (
        "GGUF has keys for 3 tokens that end a text; llama.cpp may go on behind"
        f" {tokens[8]!r}, {tokens[10]!r}"
    )


def test_the_chat_template_goes_along(folder: Path) -> None:
    assert "chat_template" not in str(said(folder).keys())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert said(folder)["tokenizer.chat_template"] == "{{ messages }}"


def test_pieces_become_scores(pieces: Path) -> None:
    found, model = said(pieces), stored(pieces)["model"]
    assert (found["model"], found["pre"], found["add_space_prefix"]) == ("llama", "default", True)
    assert (found["add_bos_token"], found["add_eos_token"]) == (True, False)
    assert found["token_type"][:4] == (UNKNOWN, CONTROL, CONTROL, BYTE)
    assert found["token_type"].count(BYTE) == 256
    score = {text: found["scores"][i] for text, i in model["vocab"].items()}
    assert score["he"] > score["th"] > score["the"] > score["▁the"] > score["d"]
    assert len(found["scores"]) == len(found["tokens"]) == 320
    assert "merges" not in found


def with_merges(*added: list[str]) -> Any:
    return lambda model: model["merges"].extend(added)


def without_bytes(model: dict[str, Any]) -> None:
    model["vocab"] = {x: i for x, i in model["vocab"].items() if not x.startswith("<0x0")}


PIECES = {
    "order": (
        with_merges(["d", "o"], ["h", "e"]),
        "the merges that make 'he' are apart; GGUF's tokenizers have a score a token",
    ),
    "bytes": (
        without_bytes,
        "16 of the 256 byte tokens are missing; GGUF's tokenizers have a token for every byte",
    ),
}


@pytest.mark.parametrize("case", PIECES)
def test_pieces_that_scores_cannot_say(pieces: Path, case: str) -> None:
    spoil, words = PIECES[case]
    model = stored(pieces)["model"]
    spoil(model)
    model["vocab"].setdefault("do", len(model["vocab"]))
    change(pieces, "tokenizer.json", model=model)
    assert refused(pieces) == words + REMEDY


def test_a_token_that_merges_do_not_reach(pieces: Path) -> None:
    model = stored(pieces)["model"]
    model["vocab"]["do"] = len(model["vocab"])
    change(pieces, "tokenizer.json", model=model)
    assert refused(pieces) == (
        "its merges do not have 'd' + 'o', though 'do' is a token; GGUF's tokenizers have every way"
        " to put a token together" + REMEDY
    )


def test_dropped_spaces_are_told(pieces: Path) -> None:
    normalizer = stored(pieces)["normalizer"]
    drop = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    normalizer["normalizers"].insert(0, drop)
    change(pieces, "tokenizer.json", normalizer=normalizer)
    assert vocabulary(source(pieces)).notes == (
        "the tokenizer drops spaces around texts and doubled ones; llama.cpp keeps them",
    )


def test_gemmas_way_to_write_spaces(pieces: Path) -> None:
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    cut = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    change(pieces, "tokenizer.json", normalizer=normalizer, pre_tokenizer=cut)
    assert said(pieces)["add_space_prefix"] is False


def test_metaspace(pieces: Path) -> None:
    cut = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    change(pieces, "tokenizer.json", normalizer=None, pre_tokenizer=cut)
    assert said(pieces)["add_space_prefix"] is True
    change(pieces, "tokenizer.json", pre_tokenizer=cut | {"split": True})
    assert refused(pieces) == (
        "it does not write spaces as sentencepiece does; GGUF's tokenizers have '▁' for them"
        + REMEDY
    )


LOWER = {"type": "Lowercase"}
OWN = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
KNOWN = ", ".join(dict.fromkeys(NAMES.values()))
OWN_CUTS = rf"\w+ then {GPT2}"[:100]
CUT = "llama.cpp has no name for how its pre_tokenizer cuts texts"
CHANGES = {
    "normalizer": (
        {"normalizer": LOWER},
        "it changes texts first (Lowercase); GGUF's tokenizers have NFC at most",
    ),
    "cut": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [OWN, BYTES]}},
        f"{CUT} ({OWN_CUTS}); GGUF's tokenizers have the cuts of {KNOWN}",
    ),
    "front": (
        {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
        f"{CUT} (it is not byte-level); GGUF's tokenizers have the cuts of {KNOWN}",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_ways_are_refused(folder: Path, case: str) -> None:
    values, words = CHANGES[case]
    change(folder, "tokenizer.json", **values)
    assert refused(folder) == words + REMEDY


MODELS: dict[str, dict[str, Any]] = {
    "WordLevel": {"vocab": {"<|endoftext|>": 0}, "unk_token": "<|endoftext|>"},
    "Unigram": {"vocab": [["<|endoftext|>", 0.0], ["a", -1.0]], "unk_id": 0},
    "WordPiece": {
        "vocab": {"<|endoftext|>": 0},
        "unk_token": "<|endoftext|>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
}


@pytest.mark.parametrize("kind", MODELS)
def test_other_models_are_refused(folder: Path, kind: str) -> None:
    change(
        folder,
        "tokenizer.json",
        model={"type": kind} | MODELS[kind],
        pre_tokenizer={"type": "Whitespace"},
    )
    assert refused(folder) == (
        f"its model is '{kind}'; GGUF's tokenizers have BPE for decoders, byte-level or as"
        f" sentencepiece has it{REMEDY}"
    )


def test_a_template_around_texts(folder: Path) -> None:
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    step = {"type": "TemplateProcessing", "special_tokens": special}
    for single, front, back in (([bos, text], True, False), ([bos, text, bos], True, True)):
        change(folder, "tokenizer.json", post_processor=step | {"single": single, "pair": single})
        found = said(folder)
        assert (found["add_bos_token"], found["add_eos_token"]) == (front, back)
    twice = [bos, bos, text]
    change(folder, "tokenizer.json", post_processor=step | {"single": twice, "pair": twice})
    assert refused(folder).startswith("its template puts [{")
    assert "GGUF's tokenizers have nothing but BOS in front and EOS behind" in refused(folder)


def test_without_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    text = f"{folder} has no tokenizer.json, and a GGUF file carries its tokenizer; "
    assert refused(folder) == text + "copy it from the model that this one was made of"
    for name, needs in (
        ("vocab.json", ""),
        ("tokenizer.model", ", where sentencepiece is installed"),
    ):
        (folder / name).write_text("{}")
        assert refused(folder) == text + (
            f"transformers makes one of {name}{needs}: AutoTokenizer.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')"
        )


def test_more_tokens_than_rows(folder: Path) -> None:
    token = {"id": 300, "content": "<x>", "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    model = stored(folder)["model"]
    model["vocab"]["<x>"] = 300
    added = [*stored(folder)["added_tokens"], token | flags]
    change(folder, "tokenizer.json", added_tokens=added, model=model)
    assert refused(folder) == (
        f"{folder / 'tokenizer.json'} has a token of id 300, and the embedding has 256 rows; take"
        " tokenizer and weights of the same model"
    ).removeprefix(f"{folder / 'tokenizer.json'}: ")


def test_two_tokens_of_a_name(pieces: Path) -> None:
    """Added tokens are written with spaces where the vocabulary has marks."""
    model = stored(pieces)["model"]
    count = len(model["vocab"])
    model["vocab"] |= {"a b": count, "a▁b": count + 1}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = {"id": count + 1, "content": "a▁b"} | flags
    tokens = [*stored(pieces)["added_tokens"], added]
    change(pieces, "tokenizer.json", model=model, added_tokens=tokens)
    assert refused(pieces) == (
        "two tokens are called 'a b'; GGUF's tokenizers have one token of a name" + REMEDY
    )


def split(pattern: str) -> dict[str, Any]:
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [first, BYTES | {"use_regex": False}]}


@pytest.mark.parametrize(
    ("cut", "whole", "name"),
    [
        (BYTES, False, "gpt-2"),
        (split(GPT2), False, "gpt-2"),
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "smaug-bpe"),
        (split(QWEN2), False, "qwen2"),
        (split(QWEN2), True, None),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES],
            },
            False,
            "smollm",
        ),
    ],
)
def test_names_of_cuts(cut: dict[str, Any], whole: bool, name: str | None) -> None:
    cuts = cuts_of(cut)
    assert cuts is not None
    assert NAMES.get((cuts, whole)) == name


def test_a_name_that_would_make_llamacpp_look_for_other_tokens() -> None:
    none, phi = (Vocabulary(frozenset(x), (), ()) for x in ((), PHI))
    assert model_name("Phi-3-mini", none) == "model"
    assert model_name("Phi-3-mini", phi) == "Phi-3-mini"
    assert model_name("tale", none) == "tale"


PHI = ("</s>", "<unk>", "<s>", "<|endoftext|>", "x")
