"""Special files, odd names and vast numbers: each is one line, at once, and leaves nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.cli.commands import chat, generate
from compress.cli.main import main
from compress.errors import RecipeError, RequestError
from compress.recipe.reading.parse import parse
from compress.speed.setting import SpeedSetting
from helpers import tiny_models

Told = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_models.make("llama", folder, num_hidden_layers=1)
    return str(folder)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """The one line of a refusal."""

    def refusal(*args: str) -> str:
        assert main(args) == 2
        captured = capsys.readouterr()
        *before, last = captured.err.splitlines()
        assert captured.out == ""
        assert all(line.startswith("Usage: ") for line in before), captured.err
        assert last.startswith("error: ")
        assert len(last) < 1000
        return last.removeprefix("error: ")

    return refusal


INPUTS = {
    "recipe": ("plan", "INPUT", "--model", "MODEL"),
    "model": ("inspect", "INPUT"),
    "text": ("eval", "MODEL", "--text", "INPUT"),
    "task": ("eval", "MODEL", "--task", "INPUT"),
    "against": ("eval", "MODEL", "--text", "TEXT", "--against", "INPUT"),
}


def command(line: tuple[str, ...], model: str, given: str) -> list[str]:
    """The line with the model and what is tried in their places."""
    text = str(Path(model) / "config.json")
    words = {"INPUT": given, "MODEL": model, "TEXT": text}
    return [words.get(word, word) for word in line]


@pytest.mark.parametrize("kind", INPUTS)
def test_devices_and_pipes(kind: str, model: str, told: Told, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path / "pipe", "a pipe; write what"), ("/dev/zero", "a device")):
        said = told(*command(INPUTS[kind], model, str(path)))
        folder = kind in ("model", "against")
        assert (f"{path} is no folder" if folder else f"it is {reason}") in said


NAMES = {
    "long": ("n" * 256, "a name in it has 256 bytes; 255 are possible"),
    "huge": ("n/" * 50_000, "bytes; 4095 are possible"),
    "circle": ("circle", "its links lead in a circle; mend them"),
    "bytes": ("caf\udce9", "its name is not UTF-8; rename it"),
    "nothing": ("", "a path is needed"),
}
OUTPUTS = {
    "run": ("run", "int8-rtn", "--model", "MODEL", "--out", "INPUT"),
    "export": ("export", "MODEL", "--to", "onnx", "--out", "INPUT"),
    "eval": ("eval", "MODEL", "--text", "TEXT", "--out", "INPUT"),
    "importance": (
        *("export", "MODEL", "--to", "gguf", "--dry-run", "--text", "TEXT"),
        *("--imatrix-out", "INPUT"),
    ),
    "roofline": ("roofline", "MODEL", "--out", "INPUT"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [*INPUTS, *OUTPUTS])
def test_names(
    kind: str, name: str, model: str, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    os.mkdir(b"caf\xe9")
    given, reason = NAMES[name]
    if kind == "recipe" and name in ("circle", "bytes", "long"):
        given = f"./{given}"
    said = told(*command((INPUTS | OUTPUTS)[kind], model, given))
    if name == "nothing" and kind in ("text", "task"):
        reason = "path is missing" if kind == "text" else "is ''; it takes a file"
    assert reason in said
    assert sorted(os.listdir(tmp_path)) == ["caf\udce9", "circle"]


def test_calibration_files(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for kind in ("text", "jsonl"):
        source = f"calibration.sources=[{{{kind}: {tmp_path / 'pipe'}}}]"
        options = ["--set", source, "--set", "stages[0].group_size=32"]
        assert main(["plan", "int4-gptq", "--model", model, "--json", *options]) == 1
        assert any("it is a pipe" in x for x in json.loads(capsys.readouterr().out)["problems"])


def test_shards_of_impossible_names(model: str, told: Told, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    (tmp_path / "loop").symlink_to("loop")
    for file in ("n" * 256 + ".safetensors", "loop/x.safetensors", "caf\udce9.safetensors"):
        index = {"weight_map": {"a": file}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        told("inspect", str(tmp_path))


NUMBERS = {
    "outputs": ("generate MODEL a -n 100000000", "n is 100000000: a whole number from 1 to 1024"),
    "threads": ("roofline MODEL --threads 100000", "threads is 100000: this machine has"),
    "vast threads": (f"roofline MODEL --threads {10**20}", "is not in the range 1<=x<="),
    "batch": (f"bench MODEL --batch {2**63}", "is not in the range 1<=x<="),
    "documents": (f"eval MODEL --text TEXT --max-documents {2**63}", "is not in the range"),
    "items": (f"eval MODEL --task TEXT --max-items {2**63}", "is not in the range"),
    "math": ("eval MODEL --text TEXT --math int16", "its weights are not stored as codes"),
    "math of tasks": ("eval MODEL --task TEXT --math int8", "is measured on texts, and there is"),
    "context": (f"export MODEL --to onnx --dry-run --max-context {10**20}", "is not in the range"),
    "tokens": (f"generate MODEL a --max-tokens {10**20}", "the model reads"),
    "target": (
        f"plan smallest --model MODEL --set stages[0].target={{bytes:_{2**63}}}",
        "it takes a size",
    ),
    "seed": (f"plan int4-rtn --model MODEL --set seed={2**63}", f"{2**63 - 1} is the most"),
    "digits": ("plan int4-rtn --model MODEL --set seed=" + "9" * 5000, "a whole number"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers(case: str, model: str, told: Told) -> None:
    line, reason = NUMBERS[case]
    words = [word.replace("_", " ") if ":_" in word else word for word in line.split()]
    assert reason in told(*command(tuple(words), model, ""))


@pytest.mark.parametrize("threads", [0, -1, 2**63, 10**20, 1.5, True])
def test_threads_from_python(threads: int) -> None:
    with pytest.raises(RequestError, match="threads is"):
        SpeedSetting(threads=threads)


HALVES = [
    'name: "\\ud800"',
    'name: x\ndescription: "a \\udfff"',
    '"\\ud800": 1',
    'name: "\\ud83d\\ude00"',
]


@pytest.mark.parametrize("text", HALVES)
def test_half_characters_of_a_recipe(text: str) -> None:
    with pytest.raises(RecipeError, match=r"r\.yaml:\d: .*\\ud[8-9a-f]\w\w is half a character"):
        parse(text, label="r.yaml")


def test_input_without_an_end(model: str, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (generate, chat):
        monkeypatch.setattr(module, "LONGEST", 1000)
    with open("/dev/zero") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        assert "more than 1000 characters" in told("generate", model)
        with pytest.raises(Exception, match="more than 1000 characters"):
            next(chat._lines())
