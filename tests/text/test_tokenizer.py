"""The light tokenizer gives the ids that transformers gives."""

import json
import shutil

import pytest

from compress.arch.text_config import TEXT_CONFIGS
from compress.errors import DataError, DependencyError
from compress.text import tokenizer as module
from compress.text.tokenizer import load_tokenizer

TEXTS = [
    "",
    " ",
    "Once upon a time, there was a little girl named Lily.",
    "Two  blanks,\ttabs\n\nand lines \n",
    "Ümläute, 中文 and 🙂",
    "one<|endoftext|>two</s><s> three<unk>",
]


@pytest.mark.parametrize(
    "name", ["tale-6m", "stories260K", "stories260K-mha-twin", "babyllama-tok105"]
)
def test_equal_to_transformers(shared_dir, name):
    from transformers import AutoTokenizer

    folder = shared_dir / "models" / name
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    story = (shared_dir / "text/tinystories/tinystories_valid.txt").read_text()[:20_000]
    texts = [*TEXTS, story]
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(texts) == expected
    assert ours.encode(story) == expected[-1]
    assert ours.decode(expected[-1]) == theirs.decode(expected[-1])
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


@pytest.fixture
def folder(demo_model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(demo_model / name, tmp_path / name)
    return tmp_path


def settings(folder, **changes):
    path = folder / "tokenizer_config.json"
    held = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not ...}))


def test_null_in_the_tokenizer_config_means_none(folder):
    settings(folder, bos_token=None)
    assert load_tokenizer(folder).bos_id is None


def test_ids_come_from_the_model_config_where_the_tokenizer_is_silent(folder):
    settings(folder, bos_token=..., eos_token=...)
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 7, "eos_token_id": 8}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (7, 9)


def test_a_token_may_be_written_as_a_mapping(folder):
    settings(folder, bos_token={"content": "<|endoftext|>", "lstrip": False})
    assert load_tokenizer(folder).bos_id == 0


def test_special_tokens_are_written_out_unless_skipped(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert ids[1] == 0
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode(ids, skip_special=True) == "ab"


def test_truncation_stored_in_the_file_is_not_applied(folder):
    path = folder / "tokenizer.json"
    held = json.loads(path.read_text())
    held["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(held))
    assert len(load_tokenizer(folder).encode("one two three four five six seven")) > 4


def test_a_token_the_file_does_not_know_goes_through_transformers(folder):
    from transformers import AutoTokenizer

    settings(folder, eos_token="<|new|>")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_id == theirs.eos_token_id == 4096
    assert ours.encode("a<|new|>") == theirs("a<|new|>", add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode("a<|new|>")) == "a<|new|>"


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match=r"has no tokenizer that transformers can load") as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).endswith(
        "copy tokenizer.json and tokenizer_config.json beside the weights"
    )
    assert "of: )" not in str(caught.value)


def test_broken_files_are_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer file"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"holds a list; it must be a JSON object"):
        load_tokenizer(folder)


def sentencepiece_only(shared_dir, folder):
    for name in ("tokenizer.model", "config.json"):
        shutil.copyfile(shared_dir / "models" / "stories260K" / name, folder / name)
    held = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(held))


def test_sentencepiece_alone_names_its_package(shared_dir, tmp_path, monkeypatch):
    sentencepiece_only(shared_dir, tmp_path)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"tokenizer\.model needs sentencepiece: pip install"):
        load_tokenizer(tmp_path)


def test_sentencepiece_alone_goes_through_transformers(shared_dir, tmp_path):
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    sentencepiece_only(shared_dir, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 512)
    text = "Once upon a time, Lily"
    expected = load_tokenizer(shared_dir / "models" / "stories260K").encode(text)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_code_of_a_checkpoint_is_never_run(folder, monkeypatch):
    """Without tokenizer.json transformers is asked; it must neither run a file nor ask to."""
    mark = folder / "executed"
    (folder / "tokenization_own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "of-its-own"}))
    auto_map = {"AutoTokenizer": ["tokenization_own.Own", None]}
    settings(folder, auto_map=auto_map, tokenizer_class="Own")

    asked = []  # transformers catches what the prompt raises
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    with pytest.raises(DataError, match="has no tokenizer that transformers can load") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    assert not asked
    assert not mark.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": {"x": 1}},
        {"added_tokens_decoder": {"x": {"content": "<a>"}}},
        {"added_tokens_decoder": [1]},
        {"bos_token": {"a": 1}},
        {"chat_template": [{"x": 1}]},
        {"chat_template": [5]},
        {"chat_template": 5},
    ],
)
def test_odd_settings_are_one_line(changes, folder):
    settings(folder, **changes)
    with pytest.raises(DataError, match=r"tokenizer files with a value .*wrong kind.*again") as it:
        load_tokenizer(folder)
    assert "\n" not in str(it.value)


@pytest.mark.parametrize("value", [[], {}, "x", 1 << 70, -1])
def test_odd_ids_are_one_line(value, folder):
    settings(folder, bos_token=..., eos_token=...)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": value}))
    with pytest.raises(DataError, match="tokenizer files with a value that is of the wrong kind"):
        load_tokenizer(folder)


def test_a_text_config_that_is_no_mapping(folder):
    """It is none to anyone who reads the config."""
    settings(folder, bos_token=..., eos_token=...)
    (folder / "config.json").write_text('{"text_config": 5, "eos_token_id": 8}')
    assert load_tokenizer(folder).eos_id == 8


@pytest.mark.parametrize("key", TEXT_CONFIGS)
def test_ids_of_the_decoders_own_config(key, folder):
    settings(folder, bos_token=..., eos_token=...)
    said = {"bos_token_id": 7, key: {"bos_token_id": 9, "eos_token_id": 8}}
    (folder / "config.json").write_text(json.dumps(said))
    found = load_tokenizer(folder)
    assert (found.bos_id, found.eos_id) == (7, 8), "the top goes before"


def test_a_template_file_that_is_not_utf8(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"chat_template.jinja cannot be read as UTF-8 text"):
        load_tokenizer(folder)
