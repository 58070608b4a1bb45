"""A model by hub id: the folder wins, the cache comes next, and no network is one clear line."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from compress.checkpoint import resolve_model
from compress.errors import CheckpointError
from helpers.raw_checkpoints import folder_of


def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(self: Any, name: str, timeout: float) -> None:
        assert timeout <= 5
        raise ConnectionError("Name or service not known\nmore lines")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def test_existing_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    folder_of(tmp_path / "org" / "name", {})
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(tmp_path / "org") == tmp_path / "org"


@pytest.mark.parametrize("path", ["/no/such/folder", "nothing", "./a", "a/b/c", "../a", "a b/c"])
def test_what_is_no_id_is_a_missing_folder(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch)
    with pytest.raises(CheckpointError, match=f"{Path(path)} does not exist; give the folder"):
        resolve_model(path)


def test_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        resolve_model("org/no-such-model-anywhere")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("org/no-such-model-anywhere is neither a folder here nor in the")
    assert "(Name or service not known); check the name" in message
    assert time.monotonic() - start < 5


def test_offline_switch_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*args: Any, **options: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/no-such-model-anywhere")


def test_cached_model_is_found_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_hub(monkeypatch)
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path
    assert asked["local_files_only"] is True
    assert not any(pattern.endswith((".bin", ".pt")) for pattern in asked["allow_patterns"])


def with_files(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    siblings = [SimpleNamespace(rfilename=name) for name in names]
    info = SimpleNamespace(siblings=siblings)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: info)


def test_reachable_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_files(monkeypatch, "model.safetensors", "pytorch_model.bin")
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path
    assert asked["local_files_only"] is False


def test_outlier_columns_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_files(monkeypatch, "model.safetensors", "compress_model/outliers.safetensors")
    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path
    assert asked[1:] == [["compress_model/*.safetensors"]]


def test_pickles_on_the_hub_are_refused_before_the_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_files(monkeypatch, "config.json", "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"org/name has its weights only as a pickle.*python"):
        resolve_model("org/name")
