"""How lm-evaluation-harness finds compress_model."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compress.cli import lm_eval
from compress.errors import RequestError

REPO = Path(__file__).resolve().parents[2]


def installed(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Puts stand-ins in the place of the harness's modules: their attributes, by name."""
    for name, attributes in {"models": {}, "api": {}, **modules}.items():
        full = f"lm_eval.{'api.' if name == 'registry' else ''}{name}"
        module = ModuleType(full)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, full, module)
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))


def test_the_entry_point_and_the_launcher_name_the_same_class() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lm_eval.models"] == {lm_eval.MODEL: lm_eval.PLACE}
    module, _, name = lm_eval.PLACE.partition(":")
    source = importlib.util.find_spec(module)
    assert source is not None
    assert source.origin is not None
    assert f"\nclass {name}(" in Path(source.origin).read_text()


def test_a_missing_harness_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    assert lm_eval.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: lm-evaluation-harness is missing (")
    assert error.endswith("pip install compress-model[harness]\n")
    assert error.count("\n") == 1


def test_an_old_harness_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, registry={})
    assert lm_eval.main() == 2
    assert "this lm-evaluation-harness is too old; pip install -U" in capsys.readouterr().err


class Registry(dict[str, str]):
    def register(self, name: str, *, target: str) -> None:
        assert name not in self  # the harness's own refuses a second time
        self[name] = target


def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry()

    def cli_evaluate() -> None:
        assert registry == {lm_eval.MODEL: lm_eval.PLACE}
        raise RequestError("revison=main is no argument of compress_model")

    installed(
        monkeypatch,
        registry={"model_registry": registry},
        __main__={"cli_evaluate": cli_evaluate},
    )
    for _ in range(2):
        assert lm_eval.main() == 2
        error = capsys.readouterr().err
        assert error == "error: revison=main is no argument of compress_model\n"


def test_the_harness_runs_on_the_arguments_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    installed(
        monkeypatch,
        registry={"model_registry": Registry()},
        __main__={"cli_evaluate": lambda: calls.append(sys.argv[1:])},
    )
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", "--model", "compress_model"])
    assert lm_eval.main() == 0
    assert calls == [["run", "--model", "compress_model"]]
