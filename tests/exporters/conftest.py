"""Proofs of exports look the same on every machine: OpenVINO counts as missing, unless a test says
otherwise. tests/interop asks the real one."""

import pytest


@pytest.fixture(autouse=True)
def _no_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress_exporters.onnx.openvino.find_spec", lambda name: None)
