"""A sound line of every command, and its options as click knows them."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType

import click

from attacks import recipes, stock
from attacks.case import Case
from compress.cli.commands.export import TARGETS
from compress.cli.main import cli

RECIPE, MODEL, SOURCE, OUT = "recipe.yaml", "model", "source", "out"
Options = dict[str, click.Option]


@cache
def options(command: str) -> Options:
    """Long name -> option, of all that a command has."""
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return {
        next(word for word in param.opts if word.startswith("--")): param
        for param in found.params
        if isinstance(param, click.Option)
    }


def takes_number(option: click.Option) -> bool:
    return isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType))


def takes_path(option: click.Option) -> bool:
    return option.metavar in ("FOLDER", "FILE")


def _lay(case: Case, source: Path, name: str, role: str = "model") -> None:
    path = {"model": MODEL, "source": SOURCE}.get(role, name)
    stock.lay(source, name, case.folder / path)
    case.roles[path] = role


def _recipe(rng: Random, case: Case, source: Path, light: bool) -> None:
    """A recipe with the files that it names; now and then the calibration is jsonl."""
    chosen = recipes.pick(rng, light)
    if "calibration" in chosen and rng.random() < 0.2:
        rows = [json.dumps({"text": stock.WORDS * 3})] * 5
        (case.folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
        case.roles["rows.jsonl"] = "jsonl"
        chosen = {**chosen, "calibration": {**recipes.DATA, "sources": [{"jsonl": "rows.jsonl"}]}}
    (case.folder / RECIPE).write_text(recipes.text_of(chosen))
    case.roles[RECIPE] = "recipe"
    text = recipes.text_of(chosen)
    for name, role in ((stock.TEXT, "text"), ("choice.jsonl", "task")):
        if name in text:
            _lay(case, source, name, role)


def _compressing(rng: Random, case: Case, source: Path, light: bool) -> None:
    _recipe(rng, case, source, light)
    names = ["llama", "llama", "sharded", *stock.DENSE]
    text = (case.folder / RECIPE).read_text()
    # Not for experts, and a name that only the family of llama has.
    names = names[:3] if "LLM_INT8" in text or "down_proj" in text else names
    _lay(case, source, rng.choice(names))
    case.argv = [case.command, RECIPE, "--model", MODEL]


def run(rng: Random, case: Case, source: Path) -> None:
    _compressing(rng, case, source, light=rng.random() < 0.5)
    case.argv += ["--out", OUT]
    case.roles[OUT] = "out"
    if rng.random() < 0.25:
        case.argv.append("--dry-run")


def plan(rng: Random, case: Case, source: Path) -> None:
    _compressing(rng, case, source, light=False)


def inspect(rng: Random, case: Case, source: Path) -> None:
    _lay(case, source, rng.choice([*stock.DENSE, *stock.QUANTIZED, "sharded"]))
    case.argv = ["inspect", MODEL]


def evaluate(rng: Random, case: Case, source: Path) -> None:
    _lay(case, source, rng.choice(["llama", "ct", "gptq", "nvfp4", "gpt2"]))
    case.argv = ["eval", MODEL]
    if rng.random() < 0.6:
        _lay(case, source, stock.TEXT, "text")
        case.argv += ["--text", stock.TEXT, "--max-tokens", "16", "--window", "16"]
    if len(case.argv) == 2 or rng.random() < 0.3:
        name = rng.choice(list(stock.TASKS))
        _lay(case, source, name, "task")
        case.argv += ["--task", name]
    if rng.random() < 0.3:
        _lay(case, source, "llama", "source")
        case.argv += ["--against", SOURCE]
    if rng.random() < 0.3:
        case.argv += ["--out", OUT]
        case.roles[OUT] = "out"


def export(rng: Random, case: Case, source: Path) -> None:
    dense = {name: tuple(TARGETS) for name in ("llama", "gpt2")}
    name = rng.choice([*dense, *dense, *stock.QUANTIZED])
    to = rng.choice(dense[name] if name in dense else ("dense", *stock.QUANTIZED[name][1]))
    _lay(case, source, name)
    case.argv = ["export", MODEL, "--to", to]
    if to == "onnx" and rng.random() < 0.5:
        case.argv.append("--in-place")
    else:
        case.argv += ["--out", OUT]
        case.roles[OUT] = "out"
    if to in TARGETS and rng.random() < 0.7:
        case.argv.append("--no-verify")
    if rng.random() < 0.2:
        case.argv.append("--dry-run")


def generate(rng: Random, case: Case, source: Path) -> None:
    _lay(case, source, rng.choice(["llama", "gpt2", "moe", "ct", "gptq", "nvfp4", "int8"]))
    case.argv = [
        "generate",
        MODEL,
        rng.choice(["once", "a dog", "-", "", "é"]),
        "--max-tokens",
        "3",
    ]
    case.stdin = "text:once upon" if case.argv[2] == "-" else "null"


def chat(rng: Random, case: Case, source: Path) -> None:
    _lay(case, source, "llama")
    case.argv = ["chat", MODEL, "--max-tokens", "3"]
    case.stdin = rng.choice(["text:hi\n", "text:hi\nagain\n", "text:\n\n x"])


def _speed(rng: Random, case: Case, source: Path) -> None:
    _lay(case, source, rng.choice(["llama", "ct"]))
    case.argv = [case.command, MODEL, "--batch", "1", "--prompt", "8", "--output", "4"]


def listed(rng: Random, case: Case, source: Path) -> None:
    case.argv = ["recipes", *rng.choice([[], ["int4-gptq"], ["demo"]])]


def doctor(rng: Random, case: Case, source: Path) -> None:
    case.argv = ["doctor"]


LINES: Mapping[str, Callable[[Random, Case, Path], None]] = MappingProxyType(
    {
        "run": run,
        "plan": plan,
        "inspect": inspect,
        "eval": evaluate,
        "export": export,
        "generate": generate,
        "chat": chat,
        "roofline": _speed,
        "bench": _speed,
        "recipes": listed,
        "doctor": doctor,
    }
)
