"""A result goes to a hub on this machine; what stands against that is one line, before work."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

import compress
from compress.errors import OutputError
from compress.sharing import hub
from helpers.short_runs import RTN, recipe

PLAIN = {"evaluation": None}
REPO = "me/small"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files asks for. files: what came, by name."""

    files: dict[str, bytes]
    private: list[bool]

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def answer(self, content: Any, code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path.startswith("/api/whoami"):
            known = self.headers.get("Authorization") == "Bearer hf_right"
            self.answer(
                {"name": "me", "type": "user"} if known else {"error": "no"}, 200 if known else 401
            )
            return
        self.answer({"id": REPO, "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            asked = json.loads(body)
            self.private.append(asked.get("private") or asked.get("visibility") == "private")
            self.answer({"url": f"https://huggingface.co/{REPO}", "id": REPO})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked
            ]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            self.answer(
                {"commitUrl": f"https://huggingface.co/{REPO}/commit/1", "commitOid": "1" * 40}
            )
        else:
            self.answer({})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("Handler", (Hub,), {"files": {}, "private": []})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{httpd.server_address[1]}"

    class Api(huggingface_hub.HfApi):
        def __init__(self) -> None:
            super().__init__(address, token="hf_right")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_right")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    yield handler
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_a_run_goes_to_the_hub(server: type[Hub], tiny, tmp_path: Path) -> None:
    said: list[str] = []
    compress.run(
        recipe(RTN, **PLAIN),
        tiny("llama"),
        tmp_path / "out",
        options=compress.RunOptions(push=REPO),
        progress=lambda event: said.append(event.message),
    )
    out = tmp_path / "out"
    found = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert server.files == found
    assert server.private == [True]
    assert any(REPO in line for line in said)


def test_an_export_goes_to_the_hub(server: type[Hub], compressed, tmp_path: Path) -> None:
    how = compress.ExportOptions(push=REPO)
    compress.export(compressed(), "gptq", tmp_path / "out", options=how)
    assert "model.safetensors" in server.files
    assert "report/report.json" in server.files


@pytest.mark.parametrize(
    ("repo", "token", "offline", "why"),
    [
        ("small", "t", "", "push is 'small'; it is a repository of the hub, such as you/small"),
        ("me/x/y", "t", "", "push is 'me/x/y'; it is"),
        (REPO, "t", "1", f"cannot push to {REPO}: HF_HUB_OFFLINE is set; unset it, or do not push"),
        (
            REPO,
            None,
            "",
            f"cannot push to {REPO}: there is no token of the hub; run `hf auth login`,",
        ),
    ],
)
def test_what_is_known_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    repo: str,
    token: str | None,
    offline: str,
    why: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    with pytest.raises(OutputError) as caught:
        compress.run("int4-rtn", tmp_path, tmp_path / "o", options=compress.RunOptions(push=repo))
    assert str(caught.value).startswith(why)
    assert "\n" not in str(caught.value)


def test_without_a_net_or_with_a_wrong_token(
    monkeypatch: pytest.MonkeyPatch, server: type[Hub]
) -> None:
    real = huggingface_hub.HfApi().endpoint
    for address, token in ((real, "hf_wrong"), ("http://127.0.0.1:9", "hf_right")):
        api = huggingface_hub.hf_api.HfApi(address, token=token)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda api=api: api)
        with pytest.raises(
            OutputError, match=r"^cannot push to me/small: the hub does not answer,"
        ):
            hub.check_push(REPO)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("413 too large\nmore"),
            "cannot push to me/small: 413 too large; the result is",
        ),
        (
            KeyboardInterrupt(),
            "stopped while {} was pushed to me/small; the result is whole in {};",
        ),
    ],
)
def test_a_failed_upload_keeps_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, why: str
) -> None:
    def fail(**_: Any) -> None:
        raise error

    api = SimpleNamespace(create_repo=lambda *_, **__: "u", upload_folder=fail)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    with pytest.raises(OutputError) as caught:
        hub.push(REPO, tmp_path)
    assert str(caught.value).startswith(why.format(tmp_path, tmp_path))
    assert f"`hf upload {REPO} {tmp_path}` uploads it" in str(caught.value)
