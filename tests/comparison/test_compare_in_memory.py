"""Results of a model that was in memory: compared as they are, and never measured anew."""

import shutil
from pathlib import Path

import pytest

import compress
from compress.checkpoint.in_memory import told, was_in_memory
from compress.comparison import compare as comparing
from compress.comparison.results import read_finished
from compress.errors import RequestError
from compress.verbs import CompareOptions, compare
from helpers.short_runs import RTN, WORDS, recipe
from helpers.tiny_models import make

TEXTS = {"texts": [{"self": True, "samples": 2, "length": 16}]}
AGAIN = (
    " was a model in memory, tiny, which nobody can read again; save the model in a folder and make"
    " this result of that to have it measured anew"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two results of one model in memory, and a text."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("made")
    model = AutoModelForCausalLM.from_pretrained(make("llama", folder / "tiny", dtype="bf16"))
    compress.run(recipe(RTN, evaluation=TEXTS), model, folder / "a")
    shutil.copytree(folder / "a", folder / "b")
    (folder / "words.txt").write_text(WORDS * 20)
    return folder


def test_the_name_is_told_from_a_path(tmp_path: Path) -> None:
    (saved := tmp_path / "tiny").mkdir()
    assert not was_in_memory(told(saved))
    (tmp_path / "in-memory-model.json").touch()
    assert was_in_memory(told(saved)) is (told(saved) == "tiny (in memory)") is True
    (tmp_path / "in-memory-model.json").unlink()
    (folder := tmp_path / "mine (in memory)").mkdir()
    assert not was_in_memory(told(folder))


def test_on_their_own_tokens_they_are_compared(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is called so is another model."""
    heard: list[Path] = []

    def speeds(folders: list[Path], *rest: object) -> tuple[list[float | None], None]:
        heard.extend(folders)
        return [None] * len(folders), None

    monkeypatch.setattr(comparing, "predicted_speeds", speeds)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny (in memory)").mkdir()
    found = compare([made / "a", made / "b"], tmp_path / "out")
    assert [x.command for x in found.contenders] == ["", ""]
    assert heard == [made / "a", made / "b"]


def test_on_another_text_they_are_refused(made: Path, tmp_path: Path) -> None:
    asked = CompareOptions(text=str(made / "words.txt"))
    with pytest.raises(RequestError) as raised:
        compare([made / "a", made / "b"], tmp_path / "out", asked=asked)
    said = "it was measured on other tokens, and its source"
    assert str(raised.value) == f"{made / 'a'}: {said}{AGAIN}"


def test_an_export_is_refused(made: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(made / "tiny")
    options = compress.ExportOptions(verify=False, dtype="fp32")
    compress.export(model, "gguf", tmp_path / "file", options=options)
    with pytest.raises(RequestError) as raised:
        read_finished(tmp_path / "file")
    assert str(raised.value) == f"{tmp_path / 'file'} holds an export, whose source{AGAIN}"
