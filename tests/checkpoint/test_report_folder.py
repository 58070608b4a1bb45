"""The folder of a report: made for one, and gone again where there is none."""

from functools import partial
from pathlib import Path

import pytest

from compress.checkpoint.output.report_folder import report_folder
from compress.errors import CheckpointError, OutputError
from compress.verbs import EvaluationOptions, evaluate_checkpoint, measure_speed, predict_speed
from helpers.holding import alive, held_elsewhere


def test_a_report_stays(tmp_path: Path) -> None:
    with report_folder(tmp_path / "a" / "b") as folder:
        assert folder is not None
        (folder / "report.json").write_text("{}")
    assert (tmp_path / "a" / "b" / "report.json").exists()


@pytest.mark.parametrize("error", [OutputError("x"), KeyboardInterrupt()])
def test_nothing_stays_of_work_that_failed(error: BaseException, tmp_path: Path) -> None:
    def work() -> None:
        with report_folder(tmp_path / "a" / "b") as folder:
            assert folder is not None
            (folder / "report.json.compress-tmp").write_text("{")
            raise error

    with pytest.raises(type(error)):
        work()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    def work() -> None:
        with report_folder(tmp_path / "a" / "b") as folder:
            assert folder is not None
            (folder / "notes.txt").write_text("of somebody else")
            raise OutputError("x")

    (tmp_path / "a").mkdir()
    with pytest.raises(OutputError):
        work()
    assert (tmp_path / "a" / "b" / "notes.txt").exists()


def test_a_folder_that_was_there_stays_and_is_empty(tmp_path: Path) -> None:
    def work() -> None:
        with report_folder(tmp_path) as folder:
            assert folder == tmp_path
            (folder / "report.html").write_text("<")
            raise OutputError("x")

    with pytest.raises(OutputError):
        work()
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.partial", "out.publishing", "out"])
def test_a_report_does_not_take_the_place_of_a_live_run(name: str, tmp_path: Path) -> None:
    """Which would not publish its result there at the end."""
    (tmp_path / name).mkdir()
    with (
        held_elsewhere(tmp_path / name) as pid,
        pytest.raises(OutputError) as caught,
        report_folder(tmp_path / "out"),
    ):
        pass
    assert str(caught.value) == alive(tmp_path / name, pid)
    assert [path.name for path in tmp_path.iterdir()] == [name]


COMMANDS = {
    "eval": partial(evaluate_checkpoint, asked=EvaluationOptions(texts=["self"])),
    "bench": measure_speed,
    "roofline": predict_speed,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_refused_command_leaves_no_folder(command: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        COMMANDS[command](tmp_path / "no model", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
