"""What a run of a model in memory saved and left is nobody else's work, and in nobody's result."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import compress
from compress.api.in_memory import source_of_run
from compress.artifacts.export import export_artifact
from compress.artifacts.plan import ArtifactTarget
from compress.checkpoint import Output, claimed, disk, prepare_output, publish
from compress.checkpoint.in_memory import MARK, is_alone, remove_source
from compress.checkpoint.output.publishing import published
from compress.errors import OutputError
from compress_exporters.exporter import Options
from helpers.faults import Killed
from helpers.holding import alive, held_elsewhere
from helpers.short_runs import RTN, recipe

ASKED = recipe(RTN, evaluation=None)
Tiny = Callable[..., Path]


def loaded(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def left(folder: Path, out: Path) -> Path:
    """OUT.partial of a run that was killed once its model was saved."""
    with source_of_run(loaded(folder), out, compress.RunOptions()) as saved:
        shutil.copytree(saved.parent.parent, out.with_name("copy"))
    partial = out.with_name(f"{out.name}.partial")
    assert not partial.exists()
    return out.with_name("copy").rename(partial)


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_an_export_to_a_format(tiny: Tiny, tmp_path: Path) -> None:
    compress.run(ASKED, tiny("llama"), tmp_path / "codes")
    compress.export(tmp_path / "codes", "gptq", tmp_path / "whole")
    left(tiny("llama"), tmp_path / "out")
    compress.export(tmp_path / "codes", "gptq", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_an_export_to_a_runtime(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    left(tiny("llama"), tmp_path / "out")
    target = ArtifactTarget("gguf", Options(dtype="fp32"))
    export_artifact(tiny("llama"), target, tmp_path / "out", verify=False)
    assert "source" not in files(tmp_path / "out")
    assert "model.gguf" in files(tmp_path / "out")


def test_a_run_of_a_folder(tiny: Tiny, tmp_path: Path) -> None:
    left(tiny("llama"), tmp_path / "out")
    output = prepare_output(tmp_path / "out", source=tiny("gpt2"))
    with claimed(output):
        assert files(output.partial) == set()


def test_it_is_kept_out_whenever_it_came(tiny: Tiny, tmp_path: Path) -> None:
    output = prepare_output(tmp_path / "out")

    def work() -> None:
        output.source.mkdir()
        (output.partial / "config.json").write_text("{}")

    published(output, work)
    assert files(tmp_path / "out") == {"config.json"}


def test_the_run_of_that_model_keeps_it(tiny: Tiny, tmp_path: Path) -> None:
    partial = left(tiny("llama"), tmp_path / "out")
    before = files(partial)
    with claimed(prepare_output(tmp_path / "out", source=partial / "source" / "model")):
        assert files(partial) == before


def test_a_kill_inside_the_first_mark(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    def killed(old: Path, new: Path) -> None:
        shutil.copytree(partial, tmp_path / "copy")
        raise Killed

    model = loaded(tiny("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "rename", killed)
        with pytest.raises(Killed):
            compress.run(ASKED, model, out)
    (tmp_path / "copy").rename(partial)
    assert files(partial) == {"source", f"source/{MARK}.compress-tmp"}
    compress.run(ASKED, model, out)
    assert (out / "config.json").is_file()
    assert not partial.exists()


def test_beside_that_file_nothing_else_is_ours(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / f"{MARK}.compress-tmp").touch()
    assert is_alone(tmp_path)
    (tmp_path / "source" / "mine").touch()
    assert not is_alone(tmp_path)


def test_a_kill_while_it_goes(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays known for what it is up to the last of its files."""
    partial, steps = left(tiny("llama"), tmp_path / "out"), 0
    unlink = disk.unlink

    def watched(path: Path) -> None:
        nonlocal steps
        steps += is_alone(partial)
        unlink(path)

    monkeypatch.setattr(disk, "unlink", watched)
    count = sum(path.is_file() for path in partial.rglob("*"))
    remove_source(partial)
    assert steps == count > 2
    assert files(partial) == set()


def test_nobody_comes_between_saving_and_the_run(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    early = prepare_output(out)  # as of one that looked before

    def come(output: Output | None) -> str:
        with pytest.raises(OutputError) as raised, claimed(output or prepare_output(out)):
            pass
        return str(raised.value)

    with (
        source_of_run(loaded(tiny("llama")), out, compress.RunOptions()) as saved,
        ThreadPoolExecutor(1) as another,
    ):
        for output in (None, early):
            assert another.submit(come, output).result().startswith("another run of this process")
        before = files(saved)
        with claimed(prepare_output(out, source=saved)):
            assert files(saved) == before
        for output in (None, early):  # nor behind what the run itself holds
            assert another.submit(come, output).result().startswith("another run of this process")
    assert files(tmp_path) == set()


def test_where_another_process_works_nothing_is_saved(tiny: Tiny, tmp_path: Path) -> None:
    partial = left(tiny("llama"), tmp_path / "out")
    before = files(partial)
    with held_elsewhere(partial) as pid, pytest.raises(OutputError) as raised:
        compress.run(ASKED, loaded(tiny("llama")), tmp_path / "out")
    assert str(raised.value) == alive(partial, pid)
    assert files(partial) == before


def test_what_another_saves_behind_the_result_stays(tiny: Tiny, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with ExitStack() as another:
        with source_of_run(loaded(tiny("llama")), out, compress.RunOptions()) as saved:
            output = prepare_output(out, source=saved)
            with claimed(output):
                publish(output, ("source",))
            (partial / "source").mkdir(parents=True)
            another.enter_context(held_elsewhere(partial))
        assert is_alone(partial)
