"""The page's text: complete, escaped, and without a single outside address."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.report import chart
from compress.report.html import render_html, write_html
from compress.report.layers import MANY_LAYERS
from compress.report.markup import el, raw
from compress.report.records.quality import Quality, TaskNumber, TaskQuality, TextQuality
from compress.report.records.sizes import SizeCandidate
from compress.report.schema import (
    Export,
    Layer,
    Planned,
    PlanVsActual,
    Report,
    Sample,
    StageRecord,
    StockLoad,
)

TASK = TaskQuality("multiple_choice", 9, 1, {"acc": TaskNumber(0.5)}, 0.9, {"prompt": "{query}"})
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' & ]]>"


class Page(HTMLParser):
    """Tags with attributes, and text outside style and script; checks that tags nest."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def hostile(value: Any) -> Any:
    """A copy of plain report data with every string made hostile."""
    if isinstance(value, str):
        return HOSTILE + value
    if isinstance(value, tuple):
        return tuple(hostile(item) for item in value)
    if isinstance(value, dict):
        return {hostile(key): hostile(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{k: hostile(getattr(value, k)) for k in value.__dataclass_fields__})
    return value


def test_no_line_ends_between_a_number_and_its_unit(report: Report) -> None:
    page, gap = render_html(report), "\N{NO-BREAK SPACE}"
    for words in (f"12.3{gap}MB became ", f"(+1.0{gap}%)", f"first <strong>93.8{gap}%</strong>"):
        assert words in page


def test_text_of_the_model_s_own_is_called_so(report: Report) -> None:
    assert report.quality is not None
    text = replace(report.quality.texts[0], name="self", settings={"sampled_with_seed": 1})
    own = replace(report, quality=Quality((text,)))
    assert "On text that the model wrote, perplexity went from" in Page(render_html(own)).text


def test_the_page_says_what_the_report_says(report: Report) -> None:
    page = Page(render_html(report))
    assert not page.open
    for words in (
        "12.3 MB became 4.83 MB, 2.6× smaller.",
        "perplexity went from 7.99 to 8.07 (+1.0 %)",
        "compressed linears; 6.27 over the whole model",
        "rtn has the lower error: 0.00071 against 0.00074",
        "ignored by default: the head stays as it is",
        "42 compressed, 1 of them with a simpler method than asked for, 1 skipped.",
        "+11.9 %",
        "exact",
        report.source.sha256,
        "2026-11-21 03:05:43 UTC",
        "--set calibration.samples=128",
        "Intel(R) Xeon(R) Platinum 8481C",
        "1 file left behind",
    ):
        assert words in page.text, words
    for layer in report.layers:
        assert layer.name in page.text
    assert report.recipe.text in "".join(page.words)


EXPORT = Export(
    "onnx",
    "onnx",
    12_300_000,
    "tokens",
    0.0123,
    ("model.onnx",),
    ("the embedding is decoded",),
    {"Attention": 6, "DequantizeLinear": 42},
    {"groups of 40": "ONNX Runtime decodes them at every step"},
    ("the same in chunks: logits within 2e-05", "16 greedy tokens are the same"),
    ("pip install onnxruntime", 'import onnxruntime\nopen("a & b")'),
)


def test_no_two_parts_of_a_page_have_one_name(report: Report) -> None:
    """A link into the page finds one place: sizes that were searched are not those of the file."""
    tried = SizeCandidate({"rank": 64, "rope_dim": 64}, "kv_bytes_per_token", 1536, 0.08)
    stage = replace(report.stages[0], candidates=(tried,))
    page = Page(render_html(replace(report, stages=(stage,))))
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert {"sizes", "searched"} <= set(names)
    assert len(names) == len(set(names))


def test_exports_say_what_they_are_made_of(report: Report) -> None:
    def section(*exports: Export) -> str:
        shown = render_html(replace(report, exports=exports))
        return shown[shown.index('id="exports"') :].partition("</section>")[0]

    found = section(EXPORT, replace(EXPORT, target="gguf"))
    for words in (
        "logits and greedy tokens are those of the stored weights",
        "0.0123",
        "the embedding is decoded",
        "6 × Attention, 42 × DequantizeLinear",
        "groups of 40: ONNX Runtime decodes them at every step",
        "16 greedy tokens are the same",
        "<h3>gguf</h3>",
        "<pre>pip install onnxruntime</pre>",
        "<pre>import onnxruntime\nopen(",
        "a &amp; b",
    ):
        assert words in found, words
    bare = section(Export("onnx", "onnx", 10, "none"))
    assert "not verified" in bare
    assert "<h3>" not in bare


def test_where_the_edited_model_loads_is_on_the_page(report: Report) -> None:
    found = StockLoad("5.23.0", "MistralForCausalLM", "logits", 2.5e-6, ("the source's <ids>",))
    for shown in (report, replace(report, result=replace(report.result, architecture="small"))):
        page = Page(render_html(replace(shown, loads=found))).text
        said = "transformers 5.23.0, MistralForCausalLM: logits are those of the stored weights"
        assert f"{said} (largest difference of a logit 2.50e-06)" in " ".join(page.split())
        assert "the source's <ids>" in page
    assert "loads in" not in Page(render_html(report)).text


def test_hostile_strings_add_no_markup(report: Report) -> None:
    full = replace(
        report,
        exports=(EXPORT,),
        speed={"tokens": {"deep": [{"x": "y"}]}},
        quality=replace(report.quality or Quality(), tasks={"arc": TASK}),
    )
    clean, attacked = Page(render_html(full)), Page(render_html(hostile(full)))
    allowed = {"title", "aria-label", "content"}
    names = [tag for tag, _ in attacked.tags]
    assert names.count("script") == 1
    assert "img" not in names
    assert not attacked.open
    for tag, attributes in attacked.tags:
        assert not any(key.startswith("on") for key in attributes), (tag, attributes)
        assert all(key in allowed or "<" not in (v or "") for key, v in attributes.items())
    # Text may differ, and code for a path may; what a string can bring in is only more text.
    assert set(names) == {tag for tag, _ in clean.tags}
    assert HOSTILE.split("]]")[0].strip() in unescape(attacked.text)


def test_objects_of_the_same_keys_are_a_table(report: Report) -> None:
    alike = [{"batch": n, "ms": {"measured": 2.5 * n, "expected": None}} for n in (1, 8)]
    mixed = [{"a": 1}, {"b": 2}]
    shown = render_html(replace(report, speed={"steps": alike, "others": mixed}))
    section = shown[shown.index('id="speed"') :].partition("</section>")[0]
    assert section.count("<table") == 1
    titles = re.findall(r"<th[^>]*col[^>]*>([^<]*)</th>", section)
    assert titles == ["batch", "ms, measured", "ms, expected"]
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", section.partition("<tbody>")[2])
    assert cells == ["1", "2.5", "–", "8", "20", "–"]
    assert section.count("<li>") == 2


def test_a_table_of_many_columns_stands_on_its_side(report: Report) -> None:
    steps = [{"batch": n, "cache_bytes": {"measured": n * 10**6}} for n in (1, 8)]
    steps = [{**step, **{f"part_{i}_ms": float(i) for i in range(9)}} for step in steps]
    shown = render_html(
        replace(report, speed={"steps": steps, "bytes_of_text": {"192": 2_500_000}})
    )
    section = shown[shown.index('id="speed"') :].partition("</section>")[0]
    titles = re.findall(r"<th[^>]*col[^>]*>([^<]*)</th>", section)
    assert titles == ["batch", "1", "8"]
    assert section.count("<tr") == 11
    assert '>cache bytes, measured</th><td class="num" data-title="1">1.00 MB<' in section
    assert "<dt>192</dt><dd>2.50 MB</dd>" in section


@pytest.mark.parametrize("command", ["bench", "roofline"])
def test_a_page_of_speed_has_no_empty_sections(report: Report, command: str) -> None:
    told = {"quality": None, "samples": (), "calibration": {}, "speed": {"best_batch": 8}}
    shown = render_html(replace(report, command=command, **told))
    for anchor in ("quality", "samples", "calibration"):
        assert f'id="{anchor}"' not in shown
    assert "not evaluated in this run" not in shown
    assert "<h2>Settings</h2>" in shown
    other = render_html(replace(report, command="run", **told))
    assert 'id="quality"' in other
    assert "not evaluated in this run" in other


@given(st.text(), st.text())
def test_elements_escape_children_and_attributes(child: str, value: str) -> None:
    shown = el("p", child, title=value).text
    found = re.fullmatch(r'<p title="([^"<>]*)">([^<>"]*)</p>', shown, re.DOTALL)
    assert found
    assert (unescape(found[1]), unescape(found[2])) == (unescape_twin(value), unescape_twin(child))


def unescape_twin(text: str) -> str:
    """What an HTML parser makes of a character that HTML does not allow, escaped or not."""
    return unescape(text.replace("&", "&amp;"))


def test_attributes() -> None:
    assert el("a", class_="x", data_sort=0, hidden=True, title=None, open=False).text == (
        '<a class="x" data-sort="0" hidden></a>'
    )
    assert el("p", raw("<b>"), None, "<").text == "<p><b>&lt;</p>"


def test_nothing_comes_from_outside(report: Report) -> None:
    text = render_html(report)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text, re.IGNORECASE)
    for tag, attributes in Page(text).tags:
        assert "src" not in attributes
        assert "style" not in attributes, "the policy refuses inline style attributes"
        assert tag != "link" or attributes["href"] == "data:,"


def test_no_dependency_at_import() -> None:
    code = (
        "import sys, compress.report.html, compress.report.terminal.table, compress.report.codec\n"
        "print([m for m in ('torch', 'transformers', 'jinja2', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_least_report_still_makes_a_page(report: Report, tmp_path: Path) -> None:
    bare = replace(
        report, quality=None, stages=(), samples=(), samples_reason="the recipe asks for none",
        plan_vs_actual=None, calibration=None, warnings=(), copied_tensors=(), copied_files=(),
        skipped_files=(), result=replace(report.result, sizes=(), kv_bytes_per_token=None),
    )  # fmt: skip
    write_html(bare, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    for words in ("not evaluated in this run", "None: the recipe asks for none.",
                  "No calibration data was used."):  # fmt: skip
        assert words in page.text
    assert "Layers" not in page.text


def test_how_to_open_it_is_on_the_page(report: Report) -> None:
    page = Page(render_html(replace(report, open_with=("vllm serve out",)))).text
    assert "Open it" in page
    assert "vllm serve out" in page
    two = render_html(replace(report, open_with=("a = 1", "b = 2", "", "vllm serve out")))
    assert "<pre>a = 1\nb = 2</pre>" in two
    assert "<pre>vllm serve out</pre>" in two
    assert "no runtime is known" in Page(
        render_html(replace(report, open_with=(), open_reason="no runtime is known to take it"))
    ).text  # fmt: skip
    assert "Open it" not in Page(render_html(replace(report, open_with=()))).text


def test_a_model_alone_became_nothing(report: Report) -> None:
    assert " became " in Page(render_html(report)).text
    source = replace(report.source, path=report.result.path)
    text = replace(report.quality.texts[0], ppl_source=None, kl=None, top1_agreement=None)
    alone = replace(report, source=source, command="eval", quality=Quality((text,)))
    page = Page(render_html(alone)).text
    assert " became " not in page
    assert f"Perplexity on {text.name} is" in page


def test_a_diverged_model_makes_a_page(report: Report) -> None:
    layers = (replace(report.layers[0], error=math.nan), replace(report.layers[1], error=0.0))
    broken = replace(
        report,
        quality=Quality((TextQuality("t", 8, 3.0, math.inf, math.nan, 0.0),)),
        stages=(StageRecord("rtn", 1.0, 1, None, layers),),
        plan_vs_actual=PlanVsActual(Planned(0, 1), Planned(math.nan, 1), Planned(1, math.inf)),
    )
    text = Page(render_html(broken)).text
    assert "∞" in text
    assert "not a number" in text


def test_lone_surrogates_do_not_stop_the_page(report: Report, tmp_path: Path) -> None:
    odd = replace(report, samples=(Sample("\udc80", "a", "b"),))
    write_html(odd, tmp_path / "r.html")
    (tmp_path / "r.html").read_text(encoding="utf-8")


def expert(block: int, number: int) -> Layer:
    name = f"model.layers.{block}.mlp.experts.{number}.gate_proj"
    kept = "too few tokens: 3" if number == 0 else None
    method = "rtn" if kept else "gptq"
    return Layer(
        name, "int4 sym g64", method, 4.25, 100, 30, 0.01 * (number + 1), 10 * number, 0.01,
        kept_reason=kept, block=block, role="gate", expert=number,
    )  # fmt: skip


def test_thousands_of_experts_share_rows(report: Report) -> None:
    count = MANY_LAYERS // 4
    layers = tuple(expert(block, number) for block in range(5) for number in range(count))
    stage = StageRecord("gptq", 1.0, 1, None, layers)
    text = render_html(replace(report, stages=(stage,), copied_tensors=()))
    page = Page(text)
    assert f"block 4, gate: {count - 1} experts" in page.text
    assert "report.json has each of them" in page.text
    assert "model.layers.4.mlp.experts.0.gate_proj" in page.text
    assert f"{10:,} to {10 * (count - 1):,}" in page.text
    assert len(text) < 200_000


@settings(max_examples=100)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8))
def test_the_scale_holds_every_error(values: list[float]) -> None:
    scale = chart.scale_of(values)
    heights = [scale.y(value) for value in values]
    assert all(chart.TOP <= y <= chart.HEIGHT - chart.BOTTOM + 1e-6 for y in heights)
    for low, high in zip(sorted(values), sorted(values)[1:], strict=False):
        assert scale.y(low) >= scale.y(high) - 1e-9
    marks = chart.ticks(scale)
    assert marks == sorted(marks)
    assert len(marks) <= 20


def test_the_scale_is_logarithmic_only_where_it_helps() -> None:
    assert chart.scale_of([0.001, 0.02]).log
    assert not chart.scale_of([0.001, 0.002]).log
    assert chart.ticks(chart.scale_of([0.001, 0.02])) == pytest.approx(
        [0.001, 0.002, 0.005, 0.01, 0.02]
    )


def test_points_group_experts_and_keep_the_last_stage(report: Report) -> None:
    layers = (expert(0, 0), expert(0, 1), replace(expert(0, 1), error=0.05))
    (point,) = chart.points(layers)["gate"]
    assert point.error == pytest.approx(0.03)
    assert point.worst == 0.05
    assert point.kept


def test_kernels_and_dead_columns_are_shown(report: Report) -> None:
    (stage, *_), rest = report.stages[1:], report.stages
    layers = (replace(stage.layers[0], dead_columns=3, kept_reason=None), *stage.layers[1:])
    machine = replace(report.machine, kernels={"cpu": "torch, slower: no C++ compiler"})
    shown = replace(report, machine=machine, stages=(rest[0], replace(stage, layers=layers)))
    text = Page(render_html(shown)).text
    assert "kernels, cpu" in text
    assert "torch, slower: no C++ compiler" in text
    assert "3 input columns never driven by calibration" in text


def test_work_that_disturbed_the_run_is_said(report: Report) -> None:
    """Beside the plan that of quantizing, beside the stages that of the run."""
    assert "other work" not in render_html(report)
    first, *rest = report.stages
    stages = (replace(first, others=0.5), *(replace(stage, others=0.0) for stage in rest))
    page = render_html(replace(report, stages=stages))
    assert "While it quantized, other work took 50 % of the cores meanwhile;" in page
    assert "Other work took 11 % of the cores meanwhile; a quiet machine is faster." in page
    assert "Processor taken by others" in page
    quiet = render_html(replace(report, stages=(replace(first, others=0.0), *rest)))
    assert "other work" not in quiet.lower()
