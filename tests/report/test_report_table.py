"""The terminal table: 80 cells, and nothing in a model's text reaches the terminal raw."""

import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report.html import render_html
from compress.report.records.loads import StockLoad
from compress.report.records.quality import MathQuality
from compress.report.records.sizes import SizeCandidate
from compress.report.schema import Export, RecipeInfo, Report, Sample, StageRecord
from compress.report.terminal.table import render_table
from compress.report.units import duration, size


def cells(line: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in line
    )


def test_the_numbers_are_there(report: Report) -> None:
    text = render_table(report, "/home/me/out/report/report.html")
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()[3:] if line[:20]}
    assert rows["Size"] == ["12.3", "MB", "4.83", "MB", "2.6×", "smaller"]
    assert rows["Bits per weight"][:2] == ["16", "4.25"]
    assert rows["Perplexity"] == ["7.990", "8.071", "+1.0", "%,", "on", "tinystories"]
    assert rows["KL divergence"][0] == "0.0233"
    assert rows["Top-1 agreement"][:2] == ["93.8", "%"]
    assert rows["Time"][:2] == ["30.8", "s"]
    assert rows["Peak memory"] == ["702", "MB"]
    assert text.endswith("Report\n  /home/me/out/report/report.html\n")
    assert report.warnings[0] in " ".join(text.split())


def test_where_the_edited_model_loads_is_said(report: Report) -> None:
    why = "28 GB of memory are needed, 20 GB are free: compared were names and shapes"
    found = StockLoad("5.23.0", "MistralForCausalLM", "form", 0.0, (why, "the source's ids"))
    text = " ".join(render_table(replace(report, loads=found)).split())
    assert "Loads transformers 5.23.0, MistralForCausalLM: well-formed (largest" in text
    assert f"note {why} note the source's ids" in text
    assert "Loads" not in render_table(report)


@pytest.mark.parametrize("seconds", [9.94, 754.0, 754_000.0])
def test_times_of_stages_are_whole(report: Report, seconds: float) -> None:
    stages = tuple(StageRecord(name, seconds, 1) for name in ("quantize", "evaluate"))
    text = render_table(replace(report, stages=stages))
    lines = [line for line in text.splitlines() if "quantize" in line or "evaluate" in line]
    assert lines[0].startswith("Time ")
    assert [line.startswith("Time ") for line in lines[1:]] in ([], [False])
    remarks = ", ".join(line[47:] for line in lines)
    assert remarks == ", ".join(f"{s.name} {duration(seconds)}" for s in stages)
    assert max(map(cells, lines)) <= 80


def test_every_text_has_a_line_for_each_number(report: Report) -> None:
    assert report.quality is not None
    first = report.quality.texts[0]
    second = replace(first, name="novel", ppl_result=70.0, ppl_source=65.0, kl=0.5)
    both = replace(report, quality=replace(report.quality, texts=(first, second)))
    lines = [line.split() for line in render_table(both).splitlines()]
    at = next(i for i, line in enumerate(lines) if line[:1] == ["Perplexity"])
    assert lines[at + 1] == ["65.00", "70.00", "+7.7", "%,", "on", "novel"]
    assert lines[at + 2] == ["KL", "divergence", "0.0233", "on", "tinystories"]
    assert lines[at + 3] == ["0.500", "on", "novel"]
    assert lines[at + 4] == ["Top-1", "agreement", "93.8", "%", "on", "tinystories"]
    assert lines[at + 5] == ["93.8", "%", "on", "novel"]


def test_what_the_math_of_the_engine_costs(report: Report) -> None:
    assert report.quality is not None
    assert "With int16" not in render_table(report) + render_html(report)
    first, *_ = report.quality.texts
    rounded = replace(first, math=MathQuality("int16", 8.0712, 2.03e-5, 0.997))
    found = replace(report, quality=replace(report.quality, texts=(rounded,)))
    lines = [line.split() for line in render_table(found).splitlines()]
    at = lines.index(["With", "int16", "8.071", "perplexity"])
    assert lines[at + 1][3:] == ["0.0000203", "nats", "a", "token"]
    assert lines[at + 2] == ["agreement", "99.7", "%"]
    page = render_html(found)
    for shown in ("In the engine", "int16", "0.0000203", "99.7"):
        assert shown in page


def test_an_evaluation_has_no_recipe_and_no_layers(report: Report) -> None:
    bare = replace(report, recipe=RecipeInfo("", ""), stages=(), command="eval")
    bare = replace(bare, source=replace(report.source, dtype="BF16"))
    title, *rest = render_table(bare).splitlines()
    assert title == "tale-6m"
    assert next(line.split()[3:5] for line in rest if line.startswith("Bits")) == ["16", "4.25"]
    alone = replace(bare, source=replace(bare.source, path=bare.result.path))
    bits = next(line for line in render_table(alone).splitlines() if line.startswith("Bits"))
    assert bits.split()[3:] == ["4.25", "compressed", "linears,", "with", "scales"]
    lines = [line.split() for line in render_table(alone).splitlines()]
    assert ["measured"] in lines
    assert ["Size", *size(report.result.bytes).split()] in lines
    dense = replace(alone, result=replace(alone.result, format="dense", bits_per_weight=16.0))
    assert ["Bits", "per", "weight", "16", "linears"] in [
        line.split() for line in render_table(dense).splitlines()
    ]


def test_how_to_open_it_is_not_cut(report: Report) -> None:
    line = "vllm serve /" + "deep/" * 30
    assert f"\nOpen it\n  {line}\n" in render_table(replace(report, open_with=(line,)))


def test_why_nothing_opens_it_is_said(report: Report) -> None:
    reason = "no runtime is known to take it: transformers: " + "words " * 20
    shown = render_table(replace(report, open_with=(), open_reason=reason))
    at = shown.index("\nOpen it\n  no runtime is known to take it: transformers: words")
    assert all(line.startswith("  ") for line in shown[at:].split("\n\n")[0].splitlines()[2:])
    assert "Open it" not in render_table(replace(report, open_with=()))


def test_exports_and_their_notes_are_no_warnings(report: Report) -> None:
    made = Export("onnx", "onnx", 12_300_000, "tokens", 0.0123, notes=("the embedding is decoded",))
    shown = render_table(replace(report, warnings=(), exports=(made,)))
    said = " ".join(shown.split())
    assert (
        "Export onnx, 12.3 MB: logits and greedy tokens are those of the stored weights (largest"
        " difference of a logit 0.0123) note the embedding is decoded"
    ) in said
    assert "Warning" not in shown
    assert "Start onnx" not in shown


def test_what_starts_an_export_is_not_cut(report: Report) -> None:
    long = "trtexec --onnx=/" + "deep/" * 30
    made = Export("tensorrt", "x", 1, "none", open_with=(f"{long} \\\n  --x", "trtexec"))
    shown = render_table(replace(report, exports=(made,)))
    assert f"\nStart tensorrt\n  {long} \\\n    --x\n\n  trtexec\n" in shown


def test_a_run_without_evaluation(report: Report) -> None:
    bare = replace(report, quality=None, samples=(), stages=(), warnings=())
    text = render_table(bare)
    assert "not evaluated" in text
    assert "Report" not in text


TEXTS = st.text(st.characters(), max_size=400)


@given(prompt=TEXTS, source=TEXTS, result=TEXTS, name=TEXTS)
def test_any_text_fits_the_terminal(
    report: Report, prompt: str, source: str, result: str, name: str
) -> None:
    changed = replace(
        report,
        samples=(Sample(prompt, source, result),),
        recipe=replace(report.recipe, name=name),
        warnings=(source,),
        exports=(Export(name, "x", 1, "none", notes=(source,)),),
    )
    lines = render_table(changed).split("\n")
    assert max(cells(line) for line in lines) <= 80
    assert all(line.isprintable() for line in lines)


def test_escape_sequences_do_not_reach_the_terminal(report: Report) -> None:
    nasty = replace(report, samples=(Sample("\x1b[2J", "\x1b]0;owned\x07", "a\nb\tc"),))
    text = render_table(nasty)
    assert "\x1b" not in text
    assert "a b c" in text


def test_work_that_disturbed_the_run_is_said(report: Report) -> None:
    line = "other work took 30 % of the cores meanwhile; a quiet machine is faster"
    assert "other work" not in render_table(report)
    busy = tuple(replace(stage, others=0.3) for stage in report.stages)
    assert line in " ".join(render_table(replace(report, stages=busy)).split())
    quiet = tuple(replace(stage, others=0.02) for stage in report.stages)
    assert "other work" not in render_table(replace(report, stages=quiet))


def test_notes_are_no_warnings_and_stand_on_the_page_too(report: Report) -> None:
    said = replace(report, notes=("the result is a deepseek_v3",), warnings=())
    text = render_table(said)
    assert "Note      the result is a deepseek_v3" in text
    assert "Warning" not in text
    assert "<li>the result is a deepseek_v3</li>" in render_html(said)


def test_splits_of_a_budget_that_were_not_chosen_are_said_with_what_they_lose(
    report: Report,
) -> None:
    """They may be a tie, on few rows; the best first."""
    tried = tuple(
        SizeCandidate({"rank": rank, "rope_dim": 128 - rank}, "kv_bytes_per_token", 1536, loss)
        for rank, loss in ((112, 0.0812), (96, 0.0779), (64, 0.0785))
    )
    best = replace(tried[1], place="chosen")
    stage = replace(report.stages[0], name="mla", candidates=(tried[0], best, tried[2]))
    text = " ".join(render_table(replace(report, stages=(stage,))).split())
    assert "Sizes mla: rank 96, rope_dim 32 lose 0.0779 nats a token" in text
    assert "others rank + rope_dim and what they lose: 64 + 64 0.0785, 112 + 16 0.0812" in text
    page = render_html(replace(report, stages=(stage,)))
    assert all(x in page for x in ("0.0812", "0.0779", "0.0785"))
