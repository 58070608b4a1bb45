"""Commands parse, call one function of the verbs, and print; mistakes are one line.

The verbs is replaced here: what it does is tested in tests/run.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import compress
from compress.cli.main import COMMANDS, main
from compress.errors import CheckpointError
from compress.report import codec, schema
from compress.verbs import EvaluationOptions, RunOptions

Call = tuple[tuple[Any, ...], dict[str, Any]]


def report() -> schema.Report:
    return schema.Report(
        tool="compress-model",
        versions={},
        recipe=schema.RecipeInfo("int4-rtn", ""),
        seed=0,
        source=schema.Source("models/tiny", "0" * 64, 100, 400),
        result=schema.Result("out", 100, 100, 4.125, None),
        stages=(),
        machine=schema.Machine("cpu", 2, 1, "avx2"),
        started="2026-01-01T00:00:00+00:00",
        finished="2026-01-01T00:00:01+00:00",
    )


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for compress.verbs that records its calls."""
    fake = ModuleType("compress.verbs")
    fake.calls = []
    fake.RunOptions, fake.EvaluationOptions = RunOptions, EvaluationOptions

    def recorder(answer: Any) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            fake.calls.append((args, kwargs))
            return answer

        return function

    plan = SimpleNamespace(to_json=lambda: {"bytes": 12}, problems=())
    for name, answer in {
        "run": report(),
        "evaluate_checkpoint": report(),
        "make_plan": plan,
        "plan_table": "a table of the plan",
        "inspect_checkpoint": {"bytes": 12},
        "inspect_table": "a table of facts",
    }.items():
        setattr(fake, name, recorder(answer))
    monkeypatch.setitem(sys.modules, "compress.verbs", fake)
    monkeypatch.setattr(compress, "verbs", fake, raising=False)
    return fake


def test_places_of_results_have_one_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    having = []
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        told = capsys.readouterr().out
        assert ("--out " in told) == ("-o, --out FOLDER" in told), name
        having += [name] if "--out " in told else []
    assert having == ["run", "compare", "eval", "export", "roofline", "bench"]


def test_run_passes_everything_on(verbs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    line = "run int4-rtn --model m -o o --set seed=1 --set output.format=dense --dtype bf16"
    assert main([*line.split(), "--resume", "--overwrite", "--device", "cuda"]) == 0
    ((args, kwargs),) = verbs.calls
    assert args == ("int4-rtn", "m", "o")
    assert callable(kwargs.pop("progress"))
    assert kwargs == {
        "overrides": ("seed=1", "output.format=dense"),
        "options": RunOptions(device="cuda", dtype="bf16", resume=True, overwrite=True),
    }
    assert "tiny" in capsys.readouterr().out


def test_run_json_is_the_report_alone(
    verbs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "int4-rtn", "--model", "m", "--out", "o", "--json"]) == 0
    assert codec.from_json(capsys.readouterr().out) == report()


def test_run_names_the_page_when_there_is_one(
    verbs: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report" / "report.html"
    page.parent.mkdir()
    page.write_text("")
    assert main(["run", "int4-rtn", "--model", "m", "--out", str(tmp_path)]) == 0
    assert str(page) in capsys.readouterr().out


def test_dry_run_and_plan_are_the_same(
    verbs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "int4-rtn", "--model", "m", "--set", "seed=1"]) == 0
    shown = capsys.readouterr().out
    assert (
        main(["run", "int4-rtn", "--model", "m", "--out", "o", "--set", "seed=1", "--dry-run"]) == 0
    )
    assert capsys.readouterr().out == shown == "a table of the plan\n"
    first, _, second, _ = verbs.calls
    asked = {"overrides": ("seed=1",), "options": RunOptions()}
    assert first == (("int4-rtn", "m"), {**asked, "memory": None})
    assert second == (("int4-rtn", "m"), {**asked, "out": "o"})
    assert main(["plan", "int4-rtn", "--model", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bytes": 12}


def test_the_plan_layer_by_layer(verbs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "int4-rtn", "--model", "m", "--modules"]) == 0
    assert capsys.readouterr().out == "a table of the plan\n"
    assert verbs.calls[-1][1] == {"modules": True}
    assert main(["plan", "int4-rtn", "--model", "m"]) == 0
    assert verbs.calls[-1][1] == {"modules": False}


def test_a_plan_with_problems_exits_1(
    verbs: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = SimpleNamespace(to_json=lambda: {"problems": ["no text"]}, problems=("no text",))
    monkeypatch.setattr(verbs, "make_plan", lambda *args, **kwargs: plan)
    assert main(["plan", "int4-rtn", "--model", "m"]) == 1
    assert main(["run", "int4-rtn", "--model", "m", "--out", "o", "--dry-run", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1]) == {"problems": ["no text"]}


def test_inspect(verbs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "m"]) == 0
    assert capsys.readouterr().out == "a table of facts\n"
    assert main(["inspect", "m", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bytes": 12}
    assert verbs.calls[-1] == (("m", True), {})
    assert main(["inspect", "m", "--modules"]) == 0
    assert verbs.calls[-1] == (({"bytes": 12},), {"modules": True})


def test_inspect_fails_on_damage(
    verbs: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"damaged": {"w": "3 NaN"}}
    monkeypatch.setattr(verbs, "inspect_checkpoint", lambda *_: facts)
    assert main(["inspect", "m", "--verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == facts


def test_inspect_fails_where_the_decoder_is_not_described(
    verbs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"damaged": {}, "decoder": "no tensor is called"}
    monkeypatch.setattr(verbs, "inspect_checkpoint", lambda *_: facts)
    assert main(["inspect", "m", "--json"]) == 1


def test_eval(verbs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    line = "eval o --against m --text a.txt --text self --window 64 --stride 32 --max-documents 3"
    line += " --max-tokens 9 --task t.jsonl --max-items 7"
    more = ["--json", "--out", "r", "--device", "cuda:1", "--dtype", "bf16"]
    assert main([*line.split(), *more]) == 0
    ((args, kwargs),) = verbs.calls
    asked = EvaluationOptions(
        texts=("a.txt", "self"),
        tasks=("t.jsonl",),
        window=64,
        stride=32,
        max_documents=3,
        max_tokens=9,
        max_items=7,
        dtype="bf16",
        device="cuda:1",
    )
    assert args == ("o", asked)
    assert callable(kwargs.pop("progress"))
    assert kwargs == {"against": "m", "out": "r"}
    assert codec.from_json(capsys.readouterr().out) == report()


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert re.search("^int4-gptq-channel +4-bit weights, one scale a row", shown, re.MULTILINE)
    assert main(["recipes", "--json"]) == 0
    assert {"int4-gptq", "int8-rtn"} <= {r["name"] for r in json.loads(capsys.readouterr().out)}
    assert main(["recipes", "int8-rtn"]) == 0
    shown = capsys.readouterr().out
    assert shown == (Path(__file__).parents[2] / "recipes" / "int8-rtn.yaml").read_text()
    assert main(["recipes", "int8-rtn", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == shown


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("recipes int4-gtpq", "error: no recipe 'int4-gtpq': there is no such file, and built in"),
        (
            "rnu x",
            "error: no command 'rnu'; there are run, plan, compare, inspect, eval, export",
        ),
        ("run", "error: Missing argument 'RECIPE'."),
        ("run x --out o", "error: Missing option '--model'."),
        ("run x --model m --out o --dtype int8", "error: Invalid value for '--dtype': 'int8' is"),
        ("eval m", "error: give --text or --task, or both"),
        (
            "eval m --task t --max-items 0",
            "error: Invalid value for '--max-items': 0 is not in the",
        ),
        (
            "run x --model m --out o --device gpu",
            "error: device is 'gpu'; it is 'auto', 'cpu',",
        ),
        (
            "eval m --text a --device cuda:x",
            "error: device is 'cuda:x'; it is 'auto', 'cpu',",
        ),
        ("eval m --text a --dtype fp16", "error: Invalid value for '--dtype': 'fp16' is not one"),
        ("eval m --text a --window 1", "error: Invalid value for '--window': 1 is not in the"),
        ("plan x --model m --frob", "error: No such option '--frob'."),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    line: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *usage, last = captured.err.splitlines()
    assert last.startswith(error)
    assert all(text.startswith("Usage: compress-model ") for text in usage)


def test_a_refusal_of_a_verb_is_one_line(
    verbs: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError("m/model.safetensors is cut off; fetch it again")

    monkeypatch.setattr(verbs, "run", refuse)
    assert main(["run", "int4-rtn", "--model", "m", "--out", "o", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: m/model.safetensors is cut off; fetch it again\n"


def test_a_fault_of_ours_keeps_its_traceback(
    verbs: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(verbs, "run", fail)
    assert main(["run", "int4-rtn", "--model", "m", "--out", "o"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "ZeroDivisionError: oops" in error
    assert error.splitlines()[-1].startswith("error: this is a fault of compress-model; please")


def interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_run_says_how_to_resume(
    verbs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(verbs, "run", interrupt)
    out = tmp_path / "my out"
    line = ["run", "int4-rtn", "--model", "m", "--out", f"{out}/", "--set", "name=a b"]
    assert main([*line, "--dtype", "fp32"]) == 130
    assert "stopped before anything was written" in capsys.readouterr().err
    (tmp_path / "my out.partial").mkdir()
    assert main([*line, "--dtype", "fp32", "--overwrite"]) == 130
    error = capsys.readouterr().err
    assert f"stopped; what is finished lies in {out}.partial. To go on:" in error
    assert (
        f"compress-model run int4-rtn --model m --out '{out}/' --set 'name=a b'"
        " --dtype fp32 --overwrite --resume"
    ) in error
    assert error.endswith("--resume\n")
    assert main([*line, "--device", "cuda"]) == 130
    assert "--set 'name=a b' --device cuda --resume" in capsys.readouterr().err


def test_interrupting_another_command(
    verbs: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "make_plan", interrupt)
    assert main(["plan", "int4-rtn", "--model", "m"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_every_command_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    """But for a conversation."""
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert ("--json" in capsys.readouterr().out) == (name != "chat")


def test_what_to_type_after_control_c(tmp_path: Path) -> None:
    from compress.cli.commands.run import _how_to_resume

    out = tmp_path / "out"
    given = {"recipe": "r", "model": "m", "out": f"{out}/", "overrides": ("a=b c",)}
    given |= {"device": "auto", "push": None, "track": (), "dtype": None, "overwrite": True}
    given |= {"cache": True}
    assert _how_to_resume(given) == "stopped before anything was written"
    line = f"compress-model run r --model m --out {out}/ --set 'a=b c' --overwrite"
    for state, says in {
        "replaced": (
            f"stopped; the result is in {out}, and what it replaced still in {out}.replaced"
        ),
        "partial": f"stopped; what is finished lies in {out}.partial",
        "publishing": f"stopped while publishing; the whole result lies in {out}.publishing",
    }.items():
        (tmp_path / f"out.{state}").mkdir()
        assert _how_to_resume(given) == f"{says}. To go on:\n  {line} --resume"


def test_eval_report_where_no_folder_can_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "report"
    assert main(["eval", "no-model", "--text", "self", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    remedy = "choose another folder for the report"
    assert said == f"error: cannot make {out}: Not a directory; {remedy}\n"
