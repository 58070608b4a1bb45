"""Predicted and measured speed of a checkpoint: what is in the facts, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import verbs
from compress.errors import CheckpointError, OutputError, RequestError
from compress.events import Event
from compress.quant.scheme import QuantScheme
from compress.speed import bench
from compress.speed import setting as speed_setting
from compress.speed.setting import SpeedSetting, SpeedTexts
from compress.speed.timer import free_bytes
from compress_kernels.cpu.library import native
from helpers import compressed_models, tiny_models
from helpers.engine.quick_speed import quick_speed

Facts = dict[str, Any]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_speed(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("source"), dtype="fp32")


def test_a_checkpoint_and_its_source_are_predicted(source: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    compressed_models.write(source, small, QuantScheme(bits=4, group_size=32))
    out = tmp_path / "out"
    facts = verbs.predict_speed(small, SpeedTexts(batches=(1, 8)), against=source, out=out)
    own, other = facts["checkpoint"], facts["source"]
    assert own["path"] == str(small)
    assert own["weight_bytes"] < other["weight_bytes"]
    assert set(own["stored_bytes"]) == {"int4 sym g32", "dense"}
    assert set(other["stored_bytes"]) == {"dense"}
    assert own["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert facts["texts"] == {"prompt": 64, "output": 64}  # of a context of 128
    for step in (*own["steps"], *other["steps"]):
        assert step["length"] == 96
        assert sum(step["parts_ms"].values()) == pytest.approx(step["expected_ms"], rel=1e-2)
        assert step["at_best_ms"] > 0
        assert set(step["left_ms"]) == {"weights", "compute", "cache", "between", "outside"}
        assert step["left_ms"]["outside"] == step["parts_ms"]["host"]
    assert [step["batch"] for step in own["steps"]] == [1, 8]
    report = json.loads((out / "report.json").read_text())
    assert report["speed"] == facts
    assert report["command"] == "roofline"
    assert report["source"]["path"] == str(source)
    page = (out / "report.html").read_text()
    assert "gigabytes per second" in page
    assert "Speed report, predicted" in page
    table = verbs.speed_table(facts)
    assert "tokens/s of the checkpoint over those of its source" in table
    assert "what is left of it above the best, in ms, by where it is:" in table


def test_no_batches_are_those_that_nobody_asked_for(source: Path) -> None:
    steps = verbs.predict_speed(source, SpeedTexts(batches=(), prompt=8, output=2))["checkpoint"][
        "steps"
    ]
    assert [step["batch"] for step in steps] == [1, 8, 64]


def test_keys_and_values_in_8_bits(source: Path) -> None:
    place = SpeedSetting(kv_dtype="int8")
    facts = verbs.measure_speed(source, SpeedTexts(batches=(1,), prompt=8, output=3), place=place)
    assert facts["checkpoint"]["kv_bytes_per_token"] == 2 * 2 * 2 * (16 + 2)
    assert facts["machine"]["kv_dtype"] == "int8"
    assert ", fp32, keys and values in int8: " in verbs.speed_table(facts)
    assert facts["measured"][0]["tokens_per_second"]["measured"] > 0


def test_the_engine_stores_what_was_asked(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[torch.dtype] = []
    whole = bench.open_engine

    def watched(weights: Any, how: Any) -> Any:
        engine, notices = whole(weights, how)
        opened.append(engine.runner.cache.states[0][0].dtype)
        return engine, notices

    monkeypatch.setattr(bench, "open_engine", watched)
    for kv in ("int8", None):
        verbs.measure_speed(
            source, SpeedTexts(batches=(1,), prompt=4, output=2), place=SpeedSetting(kv_dtype=kv)
        )
    assert opened == [torch.int8, torch.float32]


def test_threads_come_back(source: Path) -> None:
    before = torch.get_num_threads()
    facts = verbs.predict_speed(
        source, SpeedTexts(batches=(1,)), place=SpeedSetting(threads=before + 1)
    )
    assert facts["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("verb", [verbs.measure_speed, verbs.predict_speed])
@pytest.mark.parametrize("place", ["weights", "config.json"])
def test_a_report_is_of_what_was_hashed(
    verb: Callable[..., Facts], place: str, source: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    waiting = [folder / ("model.safetensors" if place == "weights" else place)]

    def change(event: Event) -> None:
        if waiting:
            file = waiting.pop()
            content = bytearray(file.read_bytes())
            content[-3] ^= 1
            file.write_bytes(content)

    with pytest.raises(CheckpointError, match="changed after it was hashed; leave a model alone"):
        verb(
            folder,
            SpeedTexts(batches=(1,), prompt=4, output=2),
            out=tmp_path / "out",
            progress=change,
        )
    assert not (tmp_path / "out").exists()


def test_a_measurement_stands_beside_its_prediction(source: Path) -> None:
    said: list[Event] = []
    facts = verbs.measure_speed(
        source, SpeedTexts(batches=(1, 3), prompt=20, output=5), progress=said.append
    )
    assert [found["batch"] for found in facts["measured"]] == [1, 3]
    for found in facts["measured"]:
        figures = [value for name, value in found.items() if name != "batch"]
        assert all(x["measured"] > 0 and x["expected"] > 0 for x in figures)
    assert facts["left_out"] == {}
    assert facts["checkpoint"]["notices"] == []
    assert "3 texts of 20 + 5, about" in said[-1].message
    table = verbs.speed_table(facts)
    assert "measured on texts of 20 + 5 tokens" in table


def test_each_math_has_a_line_with_its_share_of_the_bandwidth(source: Path, tmp_path: Path) -> None:
    """The usual one first; weights' bytes by the time of a step and the bandwidth of the facts."""
    small = tmp_path / "small"
    compressed_models.write(source, small, QuantScheme(bits=4, group_size=32))
    texts = SpeedTexts(batches=(1, 3), prompt=8, output=4)
    facts = verbs.measure_speed(small, texts, every_math=True, out=tmp_path / "out")
    maths = ("int16", "exact", "int8") if native().library is not None else ("exact",)
    assert [(row["math"], row["batch"]) for row in facts["maths"]] == [
        (math, batch) for math in maths for batch in (1, 3)
    ]
    for row, own in zip(facts["maths"], facts["measured"], strict=False):
        assert row["tokens_per_second"] == own["tokens_per_second"]["measured"]
        seconds = own["between_tokens_p50_ms"]["measured"] / 1000
        wanted = row["weight_bytes"] / seconds / facts["machine"]["gigabytes_per_second"] / 1e9
        assert row["of_bandwidth"] == pytest.approx(wanted, rel=0.02)
        # All but the embedding is read.
        assert row["weight_bytes"] == facts["checkpoint"]["weight_bytes"] - 256 * 64 * 4
    lines = verbs.speed_table(facts).splitlines()
    start = next(i for i, line in enumerate(lines) if "tokens/s by math" in line)
    for math, line in zip(maths, lines[start + 2 :], strict=False):
        assert re.fullmatch(rf"{math}( +[\d.,]+ +\([\d,]+ ?%\)){{2}}", line.strip())
    said = ", codes by int16" if len(maths) > 1 else ""
    assert any(f"in memory; products{said}: " in line for line in lines)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "of bandwidth" in page
    (only,) = verbs.measure_speed(source, SpeedTexts((1,), 8, 1), every_math=True)["maths"]
    assert (only["math"], only["of_bandwidth"]) == ("exact", None)


def test_outputs_of_one_token_have_no_time_between(source: Path) -> None:
    (found,) = verbs.measure_speed(source, SpeedTexts(batches=(2,), prompt=9, output=1))["measured"]
    assert found["between_tokens_p50_ms"] == {"measured": None, "expected": None}
    assert found["first_token_p50_ms"]["measured"] > 0


def test_what_would_take_long_is_left_out_and_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PATIENCE_SECONDS", 0.0)
    facts = verbs.measure_speed(source, SpeedTexts(prompt=8, output=2))
    assert [found["batch"] for found in facts["measured"]] == [1]
    assert set(facts["left_out"]) == {"8", "64"}
    line = "batch 64 is left out, as it would take about 0 s; --batch 64 asks for it"
    assert line in verbs.speed_table(facts)
    asked = verbs.measure_speed(source, SpeedTexts(prompt=8, output=2, batches=(8,)))
    assert [found["batch"] for found in asked["measured"]] == [8]


def test_what_transformers_computes_is_measured_only(tmp_path: Path) -> None:
    folder = tiny_models.make("granite", tmp_path / "granite", dtype="fp32")
    facts = verbs.measure_speed(folder, SpeedTexts(batches=(1,), prompt=8, output=3))
    (found,) = facts["measured"]
    assert found["tokens_per_second"]["measured"] > 0
    assert found["tokens_per_second"]["expected"] is None
    table = verbs.speed_table(facts)
    assert "nothing is predicted: model type 'granite' is in no table of forwards" in table
    assert "note: transformers computes here" in table
    with pytest.raises(CheckpointError, match="'granite' is in no table of forwards"):
        verbs.predict_speed(folder)


@pytest.mark.parametrize("verb", [verbs.predict_speed, verbs.measure_speed])
def test_refusals(verb: Callable[..., Facts], source: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt 100 and output 64 are 164 tokens: the model"):
        verb(source, SpeedTexts(prompt=100, output=64))
    with pytest.raises(RequestError, match="batch is 0: a whole number from 1 on is needed"):
        verb(source, SpeedTexts(batches=(0,)))
    with pytest.raises(OutputError, match="device is 'gpu'"):
        verb(source, place=SpeedSetting(device="gpu"))
    with pytest.raises(OutputError, match="dtype is 'int8'"):
        # From Python anything can be given, which mypy refuses here.
        verb(source, place=SpeedSetting(dtype="int8"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="kv_dtype is 'int4'; it is one of fp32, bf16, fp16, i"):
        verb(source, place=SpeedSetting(kv_dtype="int4"))  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(OutputError, match="is not an empty folder"):
        verb(source, out=tmp_path / "full")


def test_a_batch_beyond_the_memory_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured; a prediction of it says so."""
    facts = verbs.predict_speed(source, SpeedTexts(batches=(1, 8), prompt=64, output=64))
    facts["machine"]["free_bytes"] = facts["checkpoint"]["steps"][0]["memory_bytes"]
    lines = verbs.speed_table(facts).splitlines()
    said = r"  batch 8 cannot run here: it needs [\d.]+ [kM]B of memory, [\d.]+ kB are free"
    assert re.fullmatch(said, lines[-1])
    assert sum("cannot run here" in line for line in lines) == 1
    monkeypatch.setattr(bench, "free_bytes", lambda device: 1_000_000)
    events: list[Event] = []
    with pytest.raises(RequestError, match=r"tokens take .* GB, 0.0 GB are free; take a smaller"):
        verbs.measure_speed(
            source, SpeedTexts(batches=(64,), prompt=64, output=64), progress=events.append
        )
    assert events == []


def test_lengths_that_are_left_out_fit_the_context(source: Path) -> None:
    facts = verbs.predict_speed(source, SpeedTexts(batches=(1,), prompt=120))
    assert facts["texts"] == {"prompt": 120, "output": 8}
    facts = verbs.predict_speed(source, SpeedTexts(batches=(1,), output=127))
    assert facts["texts"] == {"prompt": 1, "output": 127}


def test_the_cache_is_what_the_engine_takes(source: Path) -> None:
    facts = verbs.predict_speed(source, SpeedTexts(batches=(1,)))
    free = free_bytes(torch.device("cpu"))
    assert free is None or free > 128 * 256 * facts["checkpoint"]["kv_bytes_per_token"] / 0.3
    assert facts["checkpoint"]["cache_tokens"] == 128 * 256


@pytest.mark.parametrize("share", [None, 0.02, 0.4])
def test_other_work_that_disturbed_is_said(
    source: Path, tmp_path: Path, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_setting, "share_since", lambda before: share)
    line = "other work took 40 % of the cores meanwhile; a quiet machine is faster"
    out = tmp_path / "out"
    predicted = verbs.predict_speed(source, SpeedTexts(batches=(1,), prompt=4, output=2), out=out)
    measured = verbs.measure_speed(source, SpeedTexts(batches=(1,), prompt=4, output=2))
    for facts in (predicted, measured):
        assert facts["others"] == share
        assert facts.get("disturbed") == (line if share == 0.4 else None)
        assert (line in verbs.speed_table(facts)) == (share == 0.4)
    assert (line in (out / "report.html").read_text()) == (share == 0.4)
    report = json.loads((out / "report.json").read_text())
    assert report["stages"][0]["others"] == share
