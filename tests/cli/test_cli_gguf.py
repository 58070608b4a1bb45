"""A GGUF file under every command that takes a checkpoint: read where weights are run or measured,
refused where something would be made of them."""

import json
from io import StringIO
from pathlib import Path

import pytest

import compress
from compress.checkpoint import Checkpoint
from compress.cli.main import main
from compress.evaluation.evaluate_checkpoint import EvaluationOptions, evaluate_checkpoint
from compress.formats import open_weights
from compress.report.summary import headline
from compress.runs.whole import into_file
from compress.serve.open_model import open_model
from helpers.engine.quick_speed import quick_speed
from helpers.exporters.gguf_files import tiny, written
from helpers.exporters.gguf_readings import opened, with_small_files
from helpers.short_runs import recipe_file, result_of

TALE = Path(__file__).resolve().parents[2] / "examples" / "tale-6m"
STORY = "Once upon a time there was a little girl. She had a red ball and a dog. " * 12


@pytest.fixture(scope="module")
def tale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tale-6m as `export --to gguf --type Q4_K_M` writes it, with its small files beside."""
    source = open_weights(Checkpoint.open(TALE))
    _, path = written(source, tmp_path_factory.mktemp("gguf"), dtype=None, type="Q4_K_M")
    return with_small_files(TALE, path.parent)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("story") / "story.txt"
    path.write_text(STORY)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_inspect_tells_types_and_bits(tale: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, "inspect", str(tale))
    assert "  quantization  gguf\n" in told
    assert "  types         13 tensors in F32, 13.3 kB, 32 bits a number\n" in told
    assert "                38 tensors in Q4_K, 2.58 MB, 4.5 bits a number\n" in told
    assert "                5 tensors in Q6_K, 1.29 MB, 6.56 bits a number\n" in told
    assert "  bits          4.71 a weight of the blocks' linears\n" in told
    facts = json.loads(said(capsys, "inspect", str(tale / "model.gguf"), "--json", "--verify"))
    assert facts["types"]["Q6_K"]["tensors"] == 5
    assert facts["bytes"] == (tale / "model.gguf").stat().st_size
    assert facts["damaged"] == {}
    by_name = {x["name"]: x for x in facts["layers"]}
    assert by_name["model.embed_tokens"]["stored"] == "Q6_K"
    assert by_name["model.layers.0.self_attn.q_proj"]["bytes"] == 256 * 144


def test_eval_measures_what_rounding_cost(tale: Path, story: Path) -> None:
    report = evaluate_checkpoint(tale, EvaluationOptions((str(story),)), against=TALE)
    found = headline(report)
    assert found is not None
    assert found.kl is not None
    assert 0.001 < found.kl < 0.1
    assert report.result.format == "gguf"
    assert report.result.bits_per_weight == pytest.approx(4.71, abs=0.01)
    assert report.result.bytes == (tale / "model.gguf").stat().st_size
    assert report.result.params == report.source.params


def test_eval_of_the_same_numbers_finds_no_difference(tmp_path: Path, story: Path) -> None:
    source = tiny(tmp_path / "model", "qwen2", max_position_embeddings=512)
    found = opened(source, tmp_path)
    asked = EvaluationOptions((str(story),))
    report = evaluate_checkpoint(found.checkpoint.path, asked, against=source.checkpoint.path)
    text = headline(report)
    assert text is not None
    assert (text.kl, text.top1_agreement) == (0.0, 1.0)


def test_generate_reads_folder_and_file(tale: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        said(capsys, "generate", str(x), "Once upon a time", "--max-tokens", "12")
        for x in (tale, tale / "model.gguf")
    )
    assert first == second
    assert "there was a little girl" in first


def test_a_chat_goes_by_the_template_beside_the_file(
    tale: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in tale.iterdir():
        (tmp_path / path.name).symlink_to(path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("sys.stdin", StringIO("Once upon a time\n"))
    greedy = ("--max-tokens", "12", "--temperature", "0")
    talked = said(capsys, "chat", str(tmp_path), *greedy)
    text = said(capsys, "generate", str(tale), "Once upon a time", *greedy)
    assert text.strip() in talked
    assert text.strip()


def test_an_open_model_says_how_blocks_are_multiplied(tale: Path) -> None:
    assert open_model(tale).notices == (
        "math int16: inputs of 43 linears are rounded to 16 bits; exact rounds nothing",
        "codes of 6 bits take 8 in memory (5 linears)",
    )
    assert open_model(tale, math="int8").math == "int8"
    assert open_model(tale, math="exact").notices == (
        "codes of 6 bits take 8 in memory (5 linears)",
    )
    half = open_model(tale, dtype="fp16")
    assert half.math == "exact"
    assert "codes of 6 bits take 8 in memory (5 linears)" in half.notices
    with pytest.raises(compress.CompressError, match="no products for it: they are for dtype fp32"):
        open_model(tale, dtype="bf16", math="int8")


def test_a_model_of_the_same_numbers_writes_the_same(tmp_path: Path) -> None:
    source = tiny(tmp_path / "model", "mixtral")
    folders = source.checkpoint.path, opened(source, tmp_path).checkpoint.path
    prompt = "once upon a time there was"
    one, other = (open_model(folder).generate([prompt])[0] for folder in folders)
    assert one.tokens == other.tokens


def test_a_run_whose_result_is_one_file_goes_on_and_is_opened(
    tmp_path: Path, story: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run, resume, inspect, eval, generate and bench, by the command line alone."""
    source = tiny(tmp_path / "model", "llama", max_position_embeddings=512).checkpoint.path
    free = {"method": "k_quants", "type": "IQ4_NL", "compensate": False, "importance": False}
    asked = recipe_file(tmp_path, free, output={"format": "gguf"}, evaluation=None)
    job = ("run", str(asked), "--model", str(source), "-o")
    out, whole = tmp_path / "out", tmp_path / "whole"

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(into_file, "_write", stops)
        assert main([*job, str(out)]) == 130
    assert not out.exists()
    said(capsys, *job, str(out), "--resume")
    said(capsys, *job, str(whole))
    assert result_of(out) == result_of(whole)
    assert "model.gguf" in result_of(out)

    assert "tensors in IQ4_NL" in said(capsys, "inspect", str(out))
    assert "KL" in said(capsys, "eval", str(out), "--against", str(source), "--text", str(story))
    assert said(capsys, "generate", str(out), "once upon", "--max-tokens", "4").strip()
    quick_speed(monkeypatch)
    texts = ("--batch", "2", "--prompt", "8", "--output", "4", "--json")
    facts = json.loads(said(capsys, "bench", str(out), *texts))
    assert "IQ4_NL" in facts["checkpoint"]["stored_bytes"]
    assert facts["measured"][0]["tokens_per_second"]["measured"] > 0


REFUSED = {
    "run": ("run", "int4-rtn", "--model", "MODEL", "-o", "OUT"),
    "plan": ("plan", "int4-rtn", "--model", "MODEL"),
    "convert": ("export", "MODEL", "--to", "gptq", "-o", "OUT"),
    "export": ("export", "MODEL", "--to", "gguf", "-o", "OUT"),
    "compare": ("compare", "MODEL", "--recipe", "int4-rtn", "-o", "OUT"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_made_of_it(
    case: str, tale: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"MODEL": str(tale), "OUT": str(tmp_path / "out")}
    assert main([places.get(x, x) for x in REFUSED[case]]) != 0
    assert capsys.readouterr().err.endswith(
        f"error: {tale / 'model.gguf'} is a GGUF file, of which nothing is made; take the"
        " checkpoint that it was made of\n"
    )
    assert not list(tmp_path.iterdir())
