"""The verbs as Python has them: one style of call, bars, reprs, rooms that are verbs."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import compress
from compress.api.progress import Bars, listening
from compress.errors import CompressError, OutputError
from compress.events import Event, note
from helpers.short_runs import RTN, recipe, recipe_file

REPO = Path(__file__).resolve().parents[2]
PLAIN = {"evaluation": None}
ORDERS = (
    "import compress; from compress.plan.plan import Plan; import compress.plan.table",
    "import compress.plan.table; import compress",
    "from compress import plan; import compress.plan.plan; import compress",
    "import compress; compress.plan; from compress.plan import table",
)


@pytest.mark.parametrize("order", ORDERS)
def test_a_room_is_its_verb_in_every_order(order: str) -> None:
    path = ":".join(str(REPO / name) for name in (".", "calibration", "exporters", "kernels"))
    script = (
        f"{order}\nimport inspect, json, sys\nfrom compress import plan as same\n"
        "from compress.plan.plan import Plan\n"
        "print(json.dumps([compress.plan is same, callable(compress.plan),"
        " list(inspect.signature(compress.plan).parameters), compress.plan.plan.Plan is Plan]))"
    )
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    )
    names = ["recipe", "model", "out", "overrides", "options", "memory"]
    assert json.loads(done.stdout) == [True, True, names, True]


def test_all_that_is_exported_is_there() -> None:
    for name in compress.__all__:
        assert getattr(compress, name) is not None
        assert name in dir(compress)
    with pytest.raises(AttributeError, match="no attribute 'shrink'"):
        _ = compress.shrink  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["plan", "run", "compare", "evaluate", "export"])
def test_verbs_are_called_alike(name: str) -> None:
    """Model and folder by place; how, and who listens, by name."""
    taken = inspect.signature(getattr(compress, name)).parameters
    by_place = [p.name for p in taken.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = [p.name for p in taken.values() if p.kind is p.KEYWORD_ONLY]
    assert {"model", "models"} & set(by_place[:2])
    assert by_place[-1] == "out"
    assert "options" in by_name
    assert ("progress" in by_name) == (name != "plan")


def test_from_a_plan_to_an_export(tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, out = recipe_file(tmp_path, RTN, **PLAIN), tmp_path / "out"
    plan = compress.plan(asked, tiny("llama"))
    assert repr(plan).startswith("<Plan test: llama, 2 blocks, ")
    events: list[compress.Event] = []
    report = compress.run(asked, tiny("llama"), out, progress=events.append)
    assert isinstance(report, compress.Report)
    assert {"check", "quantize"} <= {event.stage for event in events}
    assert report.result.bytes == plan.shards.total_bytes
    assert repr(report).startswith("<Report llama")
    made = compress.export(out, "gptq", tmp_path / "gptq", progress=True)
    assert repr(made).startswith("<ExportReport out to gptq: ")
    assert "export: 100%" in capsys.readouterr().err
    (text,) = (report._repr_html_(),)
    assert "<td" in text
    assert "<pre>" in text
    words = tmp_path / "words.txt"
    words.write_text("once upon a time a small dog sat by the door " * 4)
    found = compress.evaluate(out, [str(words)], against=tiny("llama"))
    assert found.quality is not None
    assert found.quality.texts[0].kl is not None


def test_what_a_notebook_shows_is_escaped(tiny) -> None:
    plan = compress.plan(recipe(RTN, description="<script>alert(1)</script>"), tiny("llama"))
    shown = plan._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_an_option_that_a_target_does_not_have(tmp_path: Path) -> None:
    for to, options, why in (
        ("gptq", compress.ExportOptions(max_context=5), "max_context is 5, and gptq takes none"),
        ("gptq", compress.ExportOptions(verify=False), "verify is False, and gptq takes none"),
        ("onnx", compress.ExportOptions(shard_size="1GB"), "shard_size is '1GB', and onnx takes"),
    ):
        with pytest.raises(OutputError, match=f"^{why}"):
            compress.export(tmp_path, to, tmp_path / "out", options=options)
    with pytest.raises(OutputError, match=r"give `out`, or dry_run=True in options$"):
        compress.export(tmp_path, "gptq")


def test_every_option_of_an_export_can_be_given() -> None:
    """A field that a target's options gain is one of ExportOptions, too."""
    from dataclasses import fields

    from compress.convert.convert import Conversion
    from compress_exporters.exporter import Options

    known = {field.name for field in fields(compress.ExportOptions)}
    for kind in (Conversion, Options):
        assert {field.name for field in fields(kind)} <= known


class Bar:
    """What tqdm would be told."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def __call__(self, total: int, desc: str, initial: int) -> "Bar":
        self.total, self.n = total, initial
        self.told.append(f"{desc} of {total} from {initial}")
        return self

    def write(self, line: str) -> None:
        self.told.append(line)

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.told.append(text)

    def update(self, count: int) -> None:
        self.n += count
        self.told.append(f"{self.n}/{self.total}")

    def close(self) -> None:
        self.told.append("closed")


def test_a_bar_for_each_stage() -> None:
    told: list[str] = []
    bars = Bars(Bar(told))
    bars(note("device", "cpu"))
    bars(Event("quantize", "block 3", 4, 6, 1.0))
    bars(Event("quantize", "block 4", 5, 6, 1.0))
    bars(Event("evaluate", "", 1, 2, 1.0, "text"))
    bars.close()
    assert told == [
        *("device: cpu", "quantize of 6 from 3", "block 3", "4/6", "block 4", "5/6", "closed"),
        *("evaluate of 2 from 0", "text", "1/2", "closed"),
    ]


def test_who_listens() -> None:
    for silent in (None, False):
        with listening(silent) as found:
            assert found is None
    with listening(print) as found:
        assert found is print


def test_mistakes_are_compress_errors(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="does not exist"):
        compress.plan("int4-rtn", tmp_path / "nothing")


@pytest.mark.parametrize("verb", ["plan", "run", "compare", "evaluate", "export", "open_model"])
def test_an_instruction_set_is_refused_first(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model, which is not there, is looked at."""
    monkeypatch.setenv("COMPRESS_MODEL_ISA", "avx9")
    missing, out = tmp_path / "nothing", tmp_path / "out"
    calls = {
        "plan": lambda: compress.plan("int4-rtn", missing),
        "run": lambda: compress.run("int4-rtn", missing, out),
        "compare": lambda: compress.compare(missing, out),
        "evaluate": lambda: compress.evaluate(missing, ["text"]),
        "export": lambda: compress.export(missing, "gguf", out),
        "open_model": lambda: compress.open_model(missing),
    }
    with pytest.raises(CompressError, match="COMPRESS_MODEL_ISA is 'avx9'; this processor runs"):
        calls[verb]()
    assert not out.exists()
