"""Folders of the target onnx-genai in onnxruntime-genai itself: tokens, tokenizers, sampling."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CheckpointError
from compress.quant.scheme import QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.genai import texts
from compress_exporters.genai.config import NAME
from compress_exporters.genai.running import generated
from helpers import compressed_models, tiny_models
from helpers.exporters.genai_graphs import GENAI, source, written
from helpers.forward_cases import HEADS, LONGROPE, plain_greedy, rope, text, transformers_model

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("onnxruntime_genai")]

G32 = QuantScheme(group_size=32)
LAST = "onnxruntime-genai: 16 greedy tokens are the same"


def endless(model: Path) -> Path:
    """The same model, whose texts no token ends."""
    for file in ("config.json", "generation_config.json"):
        if (model / file).is_file():
            said = (model / file).read_text()
            (model / file).write_text(said.replace('"eos_token_id": 0', '"eos_token_id": 255'))
    return model


@pytest.mark.parametrize("case", [*tiny_models.TABLED, "llama dynamic", "gemma3 with a window"])
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, options = HEADS[case]
    model = tiny_models.make(family, tmp_path / "model", **{"dtype": "fp32", **options})
    endless(model)
    written(model, tmp_path / "out")
    prompt = text(12).tolist()
    assert (
        generated(tmp_path / "out", prompt, 20)
        == plain_greedy(transformers_model(model), prompt, 20)[12:]
    )


@pytest.mark.parametrize(
    "options",
    [
        LONGROPE | {"original_max_position_embeddings": 16},
        rope(rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 128},
    ],
    ids=["longrope", "dynamic"],
)
def test_texts_that_grow_beyond_a_length_that_counts(
    options: dict[str, Any], tmp_path: Path
) -> None:
    family = "phi3" if "original_max_position_embeddings" in options else "llama"
    model = endless(tiny_models.make(family, tmp_path / "model", dtype="fp32", **options))
    written(model, tmp_path / "out")
    prompt = text(14).tolist()
    assert (
        generated(tmp_path / "out", prompt, 12)
        == plain_greedy(transformers_model(model), prompt, 12)[14:]
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "scheme",
    [G32, replace(G32, symmetric=False), replace(G32, bits=8), replace(G32, bits=3)],
    ids=["int4", "int4 asymmetric", "int8", "int3"],
)
def test_the_proof_reaches_its_tokens(scheme: QuantScheme, dtype: Any, tmp_path: Path) -> None:
    folder = endless(tiny_models.make("llama", tmp_path / "source"))
    made = compressed_models.write(folder, tmp_path / "model", scheme, head=scheme, embedding=G32)
    options = Options(dtype)
    written(made.folder, tmp_path / "out", options)
    proof = GENAI.plan(source(made.folder), options).verify(tmp_path / "out")
    assert proof.level == "tokens"
    assert proof.detail[-1] == LAST


@pytest.mark.parametrize(
    ("positions", "last"),
    [
        (9, "onnxruntime-genai: 7 greedy tokens are the same"),
        (1, "the folder is for texts of one token, to which onnxruntime-genai adds none"),
    ],
)
def test_it_generates_within_the_positions(positions: int, last: str, tmp_path: Path) -> None:
    folder = endless(tiny_models.make("llama", tmp_path / "model", dtype="fp32"))
    options = Options(max_context=positions)
    written(folder, tmp_path / "out", options)
    assert GENAI.plan(source(folder), options).verify(tmp_path / "out").detail[-1] == last


def test_its_tokenizer_reads_what_is_copied(demo_model: Path, tmp_path: Path) -> None:
    import onnxruntime_genai as genai
    from transformers import AutoTokenizer

    written(demo_model, tmp_path / "out")
    said = "Once upon a time, there was a dog. He didn't like the rain!"
    tokenizer = genai.Tokenizer(genai.Model(str(tmp_path / "out")))
    ids = [int(x) for x in tokenizer.encode(said)]
    assert ids == AutoTokenizer.from_pretrained(demo_model)(said)["input_ids"]
    assert tokenizer.decode(ids) == said


def change(folder: Path, **keys: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


BEGINNING = {"id": "<|endoftext|>", "type_id": 0}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": BEGINNING}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": x, "type_id": 0}} for x in "AB"],
    "special_tokens": {
        BEGINNING["id"]: {"id": BEGINNING["id"], "ids": [0], "tokens": [BEGINNING["id"]]}
    },
}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "onnxruntime-genai cuts a text into the tokens that tokenizer.json says"),
        (
            {"post_processor": TEMPLATE},
            "onnxruntime-genai cuts a text otherwise than tokenizer.json says, from token 51 on",
        ),
        (
            {"normalizer": SPACES},
            "onnxruntime-genai cuts a text otherwise than tokenizer.json says, from token ",
        ),
        ({"model": None}, "onnxruntime-genai makes no tokenizer of the folder, give it tokens: "),
    ],
    ids=["as it is", "a beginning that is an end too", "a normalizer it has not", "broken"],
)
def test_texts_are_cut_as_the_proof_says(
    keys: dict[str, Any], line: str, demo_model: Path, tmp_path: Path
) -> None:
    written(demo_model, tmp_path / "out")
    change(tmp_path / "out", **keys)
    said = texts.told(tmp_path / "out")
    assert said is not None
    assert said.startswith(line)


def test_a_folder_without_a_tokenizer_cuts_no_texts(tmp_path: Path) -> None:
    assert texts.told(tmp_path) is None


def test_a_folder_that_it_does_not_run_is_refused(tmp_path: Path) -> None:
    written(tiny_models.make("llama", tmp_path / "model"), tmp_path / "out")
    (tmp_path / "out" / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"^onnxruntime-genai does not run .*/out: "):
        generated(tmp_path / "out", [1, 2], 3)
