"""A page in headless Chromium: opened, framed at a width, asked by a script, printed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr", "--window-size=600,500",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

# Contrast of all text that is drawn, as WCAG 2 counts it: [ratio, words], the least first.
CONTRAST = """
() => {
  for (const part of document.querySelectorAll("details")) part.open = true;
  const parse = (text) => {
    const found = text.match(/^rgba?\\((.*)\\)$/);
    if (!found) throw new Error("no rgb: " + text);
    const [r, g, b, a] = found[1].split(/[ ,/]+/).map(Number);
    return [r, g, b, a ?? 1];
  };
  const over = (top, under) => top.slice(0, 3).map((x, i) => x * top[3] + under[i] * (1 - top[3]));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (item) => {
    const above = [];
    for (let at = item; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      above.push(colour);
      if (colour[3] === 1) break;
    }
    return above.reverse().reduce((under, colour) => over(colour, under), [255, 255, 255]);
  };
  const opacity = (item) => {
    let share = 1;
    for (let at = item; at; at = at.parentElement) share *= Number(getComputedStyle(at).opacity);
    return share;
  };
  const ratio = (item, style) => {
    const back = ground(item);
    const ink = parse(item.closest("svg") ? style.fill : style.color);
    ink[3] *= opacity(item) * Number(style.opacity) / Number(getComputedStyle(item).opacity);
    const [x, y] = [light(over(ink, back)), light(back)];
    return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  };
  const found = [];
  const every = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT);
  for (let item = every.currentNode; item; item = every.nextNode()) {
    if (["TITLE", "SCRIPT", "STYLE"].includes(item.tagName.toUpperCase())) continue;
    if (!item.checkVisibility()) continue;
    const own = [...item.childNodes].filter((x) => x.nodeType === 3).map((x) => x.data).join("");
    if (own.trim()) found.push([ratio(item, getComputedStyle(item)), own.trim().slice(0, 60)]);
    for (const place of ["::before", "::after"]) {
      const style = getComputedStyle(item, place);
      if (/["(]/.test(style.content)) found.push([ratio(item, style), place + style.content]);
    }
  }
  return found.sort((x, y) => x[0] - y[0]);
}
"""
# Boxes that hold more than they show, and by how many pixels: [class, pixels].
CUT_OFF = """
() => [document.documentElement, ...document.querySelectorAll(".scroll:not(.tall):not(.plot), pre")]
  .map((x) => [x.className || x.tagName, x.scrollWidth - x.clientWidth])
  .filter((x) => x[1] > 0)
"""


def find() -> str | None:
    """The browser's path, None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def browse(chromium: str, page: Path, folder: Path, *flags: str) -> tuple[str, str]:
    """The browser's stdout and stderr after it opened the page with a profile of its own."""
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def ask(
    chromium: str, page: Path, folder: Path, script: str, *flags: str, width: int = 1200
) -> Any:
    """What a function of JavaScript returns of the page, `width` pixels wide.

    The page is a copy without its policy, in a frame: a window of Chromium's is at least 500 wide.
    """
    copy, outside = folder / "asked.html", folder / "frame.html"
    answer = f"<script>onload = () => parent.postMessage(({script})(), '*')</script></body>"
    text, policies = _POLICY.subn("", page.read_text(encoding="utf-8"))
    assert policies == 1
    copy.write_text(text.replace("</body>", answer), encoding="utf-8")
    outside.write_text(
        "<script>onmessage = (said) => { const box = document.createElement('pre');"
        " box.textContent = 'said:' + encodeURIComponent(JSON.stringify(said.data)) + ':';"
        " document.body.append(box); }</script>"
        f"<body><iframe src='{copy.name}' width='{width}' height='800' style='border:0'></iframe>"
    )
    dom, log = browse(chromium, outside, folder, "--dump-dom", *flags)
    found = re.search(r"<pre>said:([^:]*):</pre>", dom)
    assert found is not None, log
    return json.loads(unquote(found[1]))


def printed_pages(chromium: str, page: Path, folder: Path) -> int:
    """Pages of the PDF that the browser prints the page to."""
    target = folder / "printed.pdf"
    browse(chromium, page, folder, "--no-pdf-header-footer", f"--print-to-pdf={target}")
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", target.read_bytes()))
