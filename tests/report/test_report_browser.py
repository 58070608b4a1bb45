"""The page in headless Chromium: it opens, says its numbers, complains of nothing, and is drawn."""

import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compress.report.comparison.page import write_page
from compress.report.comparison.records import Wanted
from compress.report.html import export_page, write_html
from compress.report.records.quality import PlainQuality, TaskNumber, TaskQuality
from compress.report.schema import Layer, Report
from helpers.pages.browser import CONTRAST, CUT_OFF, DARK, LIGHT, ask, browse, find, printed_pages
from helpers.pages.comparisons import comparison, contenders

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium() -> str:
    found = find()
    if found:
        return found
    reason = "no chromium found; `apt-get install chromium` brings one"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(report, path)
    return path


def pixels(path: Path) -> np.ndarray:
    """A PNG with 8 bits a channel -> uint8 [height, width, channels]."""
    data = path.read_bytes()
    place, body, width, height, colour = 8, b"", 0, 0, 0
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        chunk = data[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8
        body += chunk if kind == b"IDAT" else b""
        place += length + 12
    channels = {2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * channels)
    image = np.zeros((height, width, channels), np.uint8)
    above = np.zeros((width, channels), np.int64)
    for y in range(height):
        above = unfilter(int(rows[y, 0]), rows[y, 1:].reshape(width, channels), above)
        image[y] = above
    return image


def unfilter(kind: int, line: np.ndarray, above: np.ndarray) -> np.ndarray:
    """One PNG row from its filtered bytes and the row above, both [width, channels]."""
    if kind > 2:
        channels = range(line.shape[1])
        undo = averages if kind == 3 else paeth
        return np.array([undo(line[:, c].tolist(), above[:, c].tolist()) for c in channels]).T
    line = line.astype(np.int64)
    if kind == 1:
        line = np.cumsum(line, axis=0)
    if kind == 2:
        line = line + above
    return line % 256


# Of one channel, in plain numbers: numpy takes 15 us for the few of a pixel, 2 s for a page.
def averages(line: list[int], above: list[int]) -> list[int]:
    left, result = 0, []
    for value, up in zip(line, above, strict=True):
        left = (value + (left + up) // 2) % 256
        result.append(left)
    return result


def paeth(line: list[int], above: list[int]) -> list[int]:
    left, corner, result = 0, 0, []
    for value, up in zip(line, above, strict=True):
        from_left, from_up = abs(up - corner), abs(left - corner)
        from_corner = abs(left + up - 2 * corner)
        guess = corner
        if from_left <= from_up and from_left <= from_corner:
            guess = left
        elif from_up <= from_corner:
            guess = up
        left, corner = (value + guess) % 256, up
        result.append(left)
    return result


def test_the_page_opens(chromium: str, page: Path, tmp_path: Path) -> None:
    dom, log = browse(chromium, page, tmp_path, "--dump-dom")
    for words in ("4.83 MB", "8.07", "93.8 %", "2.6× smaller", "model.layers.5.mlp.down_proj"):
        assert words in dom
    # Only the script makes sort buttons and shows the theme button: it ran, policy and all.
    assert dom.count("<th scope") > dom.count('<button type="button">') >= 10
    assert 'aria-label="Switch to the' in dom
    assert "CONSOLE" not in log, log
    assert "Content Security Policy" not in log, log


def test_the_policy_stops_what_escaping_would_miss(
    chromium: str, page: Path, tmp_path: Path
) -> None:
    text = page.read_text(encoding="utf-8")
    attack = '<script>document.title="owned"</script><img src="http://127.0.0.1:9/x.png">'
    bad = tmp_path / "bad.html"
    bad.write_text(text.replace("<main>", f"<main>{attack}", 1), encoding="utf-8")
    dom, log = browse(chromium, bad, tmp_path, "--dump-dom")
    assert "<title>owned" not in dom
    assert log.count("Content Security Policy") >= 2


@pytest.mark.parametrize(("flag", "dark"), [(LIGHT, False), (DARK, True)])
def test_both_themes_are_drawn(
    chromium: str, page: Path, tmp_path: Path, flag: str, dark: bool
) -> None:
    shot = tmp_path / "shot.png"
    browse(chromium, page, tmp_path, f"--screenshot={shot}", flag)
    image = pixels(shot)[..., :3]
    back, ink = np.median(image, axis=(0, 1)).mean(), image.reshape(-1, 3).mean(axis=1)
    assert (back < 60) if dark else (back > 200)
    strong = np.abs(ink - back) > 120
    assert 0.005 < strong.mean() < 0.3, "text covers some of the page, not none and not all"
    assert np.unique(image.reshape(-1, 3), axis=0).shape[0] > 50


@pytest.fixture(scope="module")
def full(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of section that has colours or columns of its own."""
    assert report.quality is not None
    beside = (
        PlainQuality(8.158, 0.0331, 0.905, 0.3),
        PlainQuality(66.5, 0.029, 0.915, -0.06),
        None,
    )
    texts = tuple(replace(t, plain=p) for t, p in zip(report.quality.texts, beside, strict=True))
    numbers = {"acc": TaskNumber(0.41, 0.012, 0.42, 0.012, 0.004)}
    tasks = {"a task with a long name": TaskQuality("multiple_choice", 1200, 3, numbers)}

    def told(layer: Layer) -> Layer:
        return replace(layer, plain_error=None if layer.error is None else 1.7 * layer.error)

    stages = tuple(replace(s, layers=tuple(map(told, s.layers))) for s in report.stages)
    quality = replace(report.quality, texts=texts, tasks=tasks)
    path = tmp_path_factory.mktemp("full") / "report.html"
    write_html(replace(report, quality=quality, stages=stages), path)
    return path


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("flag", [LIGHT, DARK])
def test_all_text_stands_out(
    chromium: str, full: Path, tmp_path: Path, flag: str, width: int
) -> None:
    found = ask(chromium, full, tmp_path, CONTRAST, flag, width=width)
    assert len(found) > 400
    faint = [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5]
    assert not faint


def test_a_phone_shows_tables_whole(chromium: str, full: Path, tmp_path: Path) -> None:
    assert ask(chromium, full, tmp_path, CUT_OFF, width=400) == []


@pytest.fixture(scope="module")
def others(report: Report, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The page of a comparison, that of a bench, and that of an export."""
    folder = tmp_path_factory.mktemp("others")
    found = comparison(contenders(15), Wanted("llama.cpp", 5_000_000, 0.05))
    line = "llama-completion -m /a/long/path/of/the/best/result/model.gguf -p 'Once' -n 100 -no-cnv"
    noted = (replace(x, notes=("words " * 20, x.name), open_with=(line,)) for x in found.contenders)
    write_page(replace(found, contenders=tuple(noted)), folder / "compare.html")
    steps = [{"batch": n} | {f"between_tokens_p{p}_ms": 0.1 * n for p in range(9)} for n in (1, 64)]
    speed = {"checkpoint": {"stored_bytes": {"int4 sym g128": 2_635_776}, "steps": steps}}
    told = replace(report, command="bench", quality=None, samples=(), speed=speed)
    write_html(told, folder / "bench.html")
    facts = [("target", "dense -> gguf"), ("proved", "words " * 30), ("", "and more")]
    (folder / "export.html").write_bytes(export_page("tale-6m", "a tool", facts, [line, "b\nc"]))
    return [folder / f"{name}.html" for name in ("compare", "bench", "export")]


def test_pages_of_comparisons_and_speed_are_as_good(
    chromium: str, others: list[Path], tmp_path: Path
) -> None:
    both = f"() => [({CONTRAST})(), ({CUT_OFF})()]"
    for page in others:
        for flag, width in ((LIGHT, 400), (DARK, 1280)):
            found, cut_off = ask(chromium, page, tmp_path, both, flag, width=width)
            assert not [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5]
            assert cut_off == []
        assert 1 <= printed_pages(chromium, page, tmp_path) <= 4


def test_a_page_is_printed_on_few_sheets(
    chromium: str, full: Path, report: Report, tmp_path: Path
) -> None:
    assert 1 <= printed_pages(chromium, full, tmp_path) <= 4
    # Of a model with many blocks too: long tables stay on the screen.
    layers = tuple(
        replace(layer, name=layer.name.replace("layers.", f"layers.{deep}"), block=None)
        for deep in range(20)
        for layer in report.layers
    )
    deep = tmp_path / "deep.html"
    write_html(replace(report, stages=(replace(report.stages[1], layers=layers),)), deep)
    assert 1 <= printed_pages(chromium, deep, tmp_path) <= 4
