"""Comparing: results are those of `run`, on the same tokens; the winner is the right one."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.checkpoint import Checkpoint
from compress.cli.main import main
from compress.comparison import compare as comparing
from compress.comparison.entrants import Jury
from compress.comparison.results import is_finished, read_finished
from compress.comparison.routes import route_of, why_not_for
from compress.errors import CompressError, RequestError
from compress.evaluation.evaluate_checkpoint import EvaluationOptions, evaluate_checkpoint
from compress.events import Event
from compress.formats import open_weights
from compress.report.comparison.page import render_page
from compress.report.comparison.records import Contender, LeftOut, Wanted, chosen, front
from compress.report.comparison.table import render_comparison
from compress.verbs import CompareOptions, RunOptions, compare, make_plan, run
from helpers.exporters.gguf_readings import opened
from helpers.short_runs import GPTQ, RTN, SELF, WORDS, result_of
from helpers.tiny_models import make

TEXTS = {"texts": [{"self": True, "samples": 2, "length": 16}]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("source"), dtype="bf16")


def recipe(folder: Path, name: str, *stages: Any, **rest: Any) -> Path:
    content = {"name": name, "stages": [dict(x) for x in stages], "evaluation": TEXTS, **rest}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """A small result and a good one."""
    wide = {"method": "rtn", "scheme": "W8A16", "granularity": "channel"}
    gptq = recipe(tmp_path, "small", GPTQ, calibration=SELF)
    return [gptq, recipe(tmp_path, "good", wide)]


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds take seconds of processor time, and are tested in tests/speed."""

    def speeds(folders: list[Path], *rest: object) -> tuple[list[float | None], None]:
        return [float(100 + i) for i in range(len(folders))], None

    monkeypatch.setattr(comparing, "predicted_speeds", speeds)


def refused(*given: Any, **rest: Any) -> str:
    with pytest.raises(CompressError) as raised:
        compare(*given, **rest)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_results_are_those_of_run(source: Path, two: list[Path], tmp_path: Path) -> None:
    asked, heard = CompareOptions(kl=10.0), list[Event]()
    found = compare(source, tmp_path / "out", recipes=two, asked=asked, progress=heard.append)
    plans = [(x.unit, x.index, x.total) for x in heard if x.stage == "plan"]
    assert plans == [("recipe small", 1, 2), ("recipe good", 2, 2)]
    assert [x.name for x in found.contenders] == ["small", "good"]
    assert found.winner == "small"
    for path in two:
        run(path, source, tmp_path / path.stem, options=RunOptions(cache=False))
        assert result_of(tmp_path / "out" / path.stem) == result_of(tmp_path / path.stem)
        text = read_finished(tmp_path / path.stem).text
        one = next(x for x in found.contenders if x.name == path.stem)
        assert text is not None
        assert (one.kl, one.perplexity) == (text.kl, text.ppl_result)
        assert found.measured.sha256 == text.sha256
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == [
        "compare.html",
        "compare.json",
        "good",
        "small",
    ]
    stored = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert stored == json.loads(found.to_json())
    best = found.best
    assert best is not None
    assert best.command.startswith("compress-model run ")
    assert f"--model {source} --out small" in best.command


def test_a_stopped_comparison_goes_on(
    source: Path, two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compare(source, tmp_path / "whole", recipes=two)
    runs: list[str] = []

    def counted(name: str, *given: Any, **rest: Any) -> Any:
        runs.append(Path(name).stem)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return run(name, *given, **rest)

    monkeypatch.setattr(comparing, "run", counted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compare(source, out, recipes=two)
    assert is_finished(out / "small")
    assert refused(source, out, recipes=two) == (
        f"{out} holds a comparison that was stopped; go on with --resume, or remove it"
    )
    again = CompareOptions(resume=True)
    said = refused(source, out, recipes=two[:1], asked=again)
    assert said.startswith(
        f"{out} cannot be resumed, it belongs to another comparison: recipes differ in"
    )
    found = compare(source, out, recipes=two, asked=again)
    assert runs == ["small", "good", "good"]
    lasting = {"path": "", "seconds": 0.0, "open_with": ()}
    assert [replace(x, **lasting) for x in found.contenders] == [
        replace(x, **lasting) for x in whole.contenders
    ]
    for path in two:
        assert result_of(out / path.stem) == result_of(tmp_path / "whole" / path.stem)
    assert refused(source, out, recipes=two, asked=again) == (
        f"{out} holds no comparison that was stopped; leave --resume out"
    )


def test_nothing_is_left_where_nothing_was_made(
    source: Path, two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: Any, **rest: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare(source, tmp_path / "out", recipes=two)
    assert not (tmp_path / "out").exists()


def test_a_result_in_a_gguf_file_is_measured_as_any(source: Path, tmp_path: Path) -> None:
    """Its report is that of a run; its numbers are the source's, so measured anew it loses none."""
    run(recipe(tmp_path, "a", RTN), source, tmp_path / "a", options=RunOptions(cache=False))
    held = opened(open_weights(Checkpoint.open(source)), tmp_path).checkpoint.path
    shutil.copytree(tmp_path / "a" / "report", held / "report")
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 20)
    found = compare([tmp_path / "a", held], tmp_path / "out", asked=CompareOptions(text=str(text)))
    lost = {x.name: x.kl for x in found.contenders}
    assert lost["gguf"] == 0.0
    assert lost["a"] > 0.0


def test_finished_results_are_measured_on_the_same_tokens(
    source: Path, two: list[Path], tmp_path: Path
) -> None:
    run(two[0], source, tmp_path / "a")
    other = {"texts": [{"self": True, "samples": 3, "length": 16}]}
    run(recipe(tmp_path, "other", RTN, evaluation=other), source, tmp_path / "b")
    found = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert {x.name for x in found.contenders} == {"a", "b"}
    own = [read_finished(tmp_path / x).text for x in "ab"]
    assert all(x is not None and x.sha256 != found.measured.sha256 for x in own)
    assert found.measured.settings["sampled_with_seed"] == 1
    text = tmp_path / "words.txt"
    text.write_text(WORDS * 20)
    asked = CompareOptions(text=str(text), max_tokens=50)
    found = compare([tmp_path / "a", tmp_path / "b"], tmp_path / "on", asked=asked)
    assert (found.measured.text, found.measured.tokens) == ("words", 50)


def test_a_finished_result_is_made_again_by_its_line(
    source: Path, two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in two:
        run(path, source, tmp_path / path.stem, overrides=["seed=3"])
    folders = [tmp_path / path.stem for path in two]
    best = compare(folders, tmp_path / "out", asked=CompareOptions(kl=10.0)).best
    assert best is not None
    words = shlex.split(best.command)
    (again := tmp_path / "again").mkdir()
    monkeypatch.chdir(again)
    assert main(words[1:]) == 0
    assert result_of(again / best.name) == result_of(tmp_path / best.name)


def test_results_of_other_sources_are_refused(
    source: Path, two: list[Path], tmp_path: Path
) -> None:
    other = make("llama", tmp_path / "other", dtype="bf16", seed=1)
    run(two[1], source, tmp_path / "a")
    run(two[1], other, tmp_path / "b")
    assert refused([tmp_path / "a", tmp_path / "b"], tmp_path / "out") == (
        f"{tmp_path / 'b'} was made of {other}, {tmp_path / 'a'} of {source}, which is another"
        " model; compare results of one"
    )
    assert refused(tmp_path / "a", tmp_path / "out") == (
        f"{tmp_path / 'a'} is one finished result; give two or more, or a model"
    )
    assert refused([tmp_path / "a", tmp_path / "b"], tmp_path / "out", recipes=two) == (
        f"{tmp_path / 'a'} is a finished result, and recipes run on a model; give one of them"
    )
    assert not (tmp_path / "out").exists()


def test_refusals_before_any_work(source: Path, two: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert refused(source, out, recipes=["int4-gptk"]).startswith("no recipe 'int4-gptk'")
    assert refused(source, out, recipes=[two[0], two[0]]) == (
        "two recipes are called 'small'; give one of their files another name"
    )
    assert refused(source, out, asked=CompareOptions(runtime="vlm")) == (
        "--for is 'vlm'; it is one of vllm, vllm-gpu, vllm-cpu, transformers, llama.cpp,"
        " onnxruntime, onnxruntime-genai, openvino, tensorrt; did you mean 'vllm'?"
    )
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("")
    assert refused(source, out, recipes=two) == (
        f"{out} is not an empty folder; choose another one for the comparison"
    )
    for wrong in ({"within": 0}, {"kl": 0.0}, {"kl": float("nan")}, {"max_tokens": 5}):
        with pytest.raises(RequestError):
            CompareOptions(**wrong)


def test_a_quantized_source_is_refused(source: Path, two: list[Path], tmp_path: Path) -> None:
    run(two[1], source, tmp_path / "a", options=RunOptions())
    (tmp_path / "a" / "report" / "report.json").unlink()
    said = refused(tmp_path / "a", tmp_path / "out", recipes=two)
    assert "quantized" in said


def test_what_does_not_load_is_left_out(source: Path, two: list[Path], tmp_path: Path) -> None:
    """Groups of 16 are no blocks of 32, which llama.cpp's types have."""
    odd = {"method": "rtn", "scheme": "W4A16", "group_size": 16}
    recipes = [two[1], recipe(tmp_path, "odd", odd)]
    asked = CompareOptions(runtime="llama.cpp", kl=10.0)
    plan = make_plan(recipes[1], source)
    reason = why_not_for(route_of("llama.cpp"), plan)
    assert reason is not None
    assert reason.endswith("groups of 16 are no whole blocks of 32")
    assert refused(source, tmp_path / "no", recipes=recipes[1:], asked=asked) == (
        f"no recipe is left to run on {source}: odd: {reason}"
    )
    for runtime, name in (("vllm", "vLLM on GPU"), ("transformers", "transformers")):
        known = {x.runtime: x.verdict for x in plan.runtimes}
        stands = why_not_for(route_of(runtime), plan) is None
        assert stands == (known[name] != "no")


def test_for_llamacpp_its_file_is_measured(
    source: Path, two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size, bits, losses and speed are the file's, on the text of its run as on another."""
    pytest.importorskip("gguf")
    timed: list[list[str]] = []

    def speeds(folders: list[Path], *rest: object) -> tuple[list[float | None], None]:
        timed.append([Checkpoint.open(x).files[0] for x in folders])
        return [1.0 for _ in folders], None

    monkeypatch.setattr(comparing, "predicted_speeds", speeds)
    asked, out = CompareOptions(runtime="llama.cpp", kl=10.0), tmp_path / "out"
    found = compare(source, out, recipes=two[1:], asked=asked)
    assert not found.left_out, found.left_out
    (one,) = found.contenders
    made = out / "good" / "gguf" / "model.gguf"
    assert (one.file, one.bytes) == ("gguf", made.stat().st_size)
    assert """--set 'export=[{"to": "gguf"}]'""" in one.command
    assert one.open_with
    assert all(x.startswith("llama-") and str(made) in x for x in one.open_with)
    assert timed == [["model.gguf", "model.safetensors"]]
    run_s = read_finished(out / "good").text
    assert run_s is not None
    assert one.kl != run_s.kl
    assert found.measured.sha256 == run_s.sha256
    assert one.bits_per_weight == 8.5  # of Q8_0
    held = tmp_path / "held"
    shutil.copytree(out / "good", held, ignore=shutil.ignore_patterns("*.safetensors", "report"))
    shutil.copy(made, held)
    (text := tmp_path / "words.txt").write_text(WORDS * 20)
    on = replace(asked, text=str(text))
    shutil.copytree(out / "good", tmp_path / "twin")
    again = compare([out / "good", tmp_path / "twin"], tmp_path / "again", asked=on)
    own = evaluate_checkpoint(held, EvaluationOptions((str(text),)), against=source).quality
    assert own is not None
    assert {x.kl for x in again.contenders} == {own.texts[0].kl}
    assert "losses are those of the GGUF files" in " ".join(render_comparison(again).split())
    gone = tmp_path / "twin" / "gguf" / "model.gguf"
    gone.unlink()
    less = compare([out / "good", tmp_path / "twin"], tmp_path / "less", asked=asked)
    assert less.left_out == (LeftOut("twin", f"{gone} is no more"),)
    assert [x.name for x in less.contenders] == ["good"]


def test_what_is_known_before_any_work_is_not_run(demo_model: Path) -> None:
    asked = CompareOptions(runtime="llama.cpp", within=5_000_000)
    jury = Jury(demo_model, asked, RunOptions(device="cpu"), named=False)
    reasons = {
        "gguf-q6_k": "it takes 5.20 MB, more than 5.00 MB",
        "nvfp4": "nvfp4: no type of GGUF holds codes that are floats",
    }
    for name, reason in reasons.items():
        assert jury.judged(name, name) == LeftOut(name, reason)
    other = jury.judged("long-context-hybrid", "long-context-hybrid")
    assert isinstance(other, LeftOut)
    assert other.reason.startswith("model type 'ministral' has no architecture in GGUF")


def one(name: str, size: int, kl: float, speed: float | None = None) -> Contender:
    return Contender(name, name, size, "checkpoint", 4.0, kl, 9.0, 0.9, 100, speed)


A, B, C = one("a", 10, 0.3, 5.0), one("b", 20, 0.1, 9.0), one("c", 30, 0.01, 7.0)


@pytest.mark.parametrize(
    ("wanted", "winner"),
    [
        (Wanted(), None),
        (Wanted(kl=0.2), "b"),
        (Wanted(kl=0.001), None),
        (Wanted(within=25), "b"),
        (Wanted(within=30), "c"),
        (Wanted(within=25, kl=0.5), "a"),
        (Wanted(within=5, kl=0.5), None),
        (Wanted(fastest=True), "b"),
        (Wanted(fastest=True, kl=0.05), "c"),
        (Wanted(fastest=True, within=10), "a"),
    ],
)
def test_the_winner(wanted: Wanted, winner: str | None) -> None:
    found = chosen((C, A, B), wanted)
    assert (None if found is None else found.name) == winner


def test_the_front_is_what_nothing_dominates() -> None:
    points = [("a", 1, 5.0), ("b", 2, 5.0), ("c", 2, 3.0), ("d", 3, 4.0), ("e", 4, 1.0)]
    dominated = {
        name
        for name, size, loss in points
        if any((s <= size and x < loss) or (s < size and x <= loss) for _, s, x in points)
    }
    assert front(points) == {name for name, _, _ in points} - dominated == {"a", "c", "e"}
    assert front([("a", 1, 1.0), ("b", 1, 1.0)]) == {"a", "b"}


def test_table_and_page(source: Path, two: list[Path], tmp_path: Path) -> None:
    asked = CompareOptions(within=10_000, kl=10.0)
    found = compare(source, tmp_path / "out", recipes=two, asked=replace(asked, within=10**9))
    shown = render_comparison(found, tmp_path / "out" / "compare.html")
    folder = str(tmp_path)
    assert all(len(line) <= 80 for line in shown.splitlines() if folder not in line)
    assert ">* small" in shown
    assert "Make it again\n  compress-model run" in shown
    page = render_page(found)
    assert page.count("<svg") == 4  # for a screen, and for a telephone
    assert "http" not in page.replace("http-equiv", "")
    for each in found.contenders:
        assert f"<title>{each.name}" in page
    none = replace(found, winner=None, wanted=Wanted(within=5))
    assert "None is the lowest KL within 5 B; the smallest is small" in " ".join(
        render_comparison(none).split()
    )


def test_the_command(
    source: Path, two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(source), "--recipe", str(two[1])]
    assert main([*words, "--out", str(tmp_path / "a"), "--kl", "1e-9", "--no-cache"]) == 1
    assert "None is the smallest with KL of 1e-09 or less" in capsys.readouterr().out
    assert not (tmp_path / "a" / ".kept").exists()
    assert main([*words, "--out", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["contenders"][0]["name"] == "good"
    text = tmp_path / "words.txt"
    text.write_text(WORDS * 20)
    on = ["--text", str(text), "--max-tokens", "50"]
    assert main([*words, "--out", str(tmp_path / "t"), "--json", *on]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert (measured["text"], measured["tokens"]) == ("words", 50)
    assert main([*words, "--out", str(tmp_path / "c"), "--within", "much"]) == 2
    assert "it takes a size such as 5GB" in capsys.readouterr().err
