"""Proofs of exports look the same on every machine: OpenVINO and TensorRT count as missing, unless
a test says otherwise. tests/interop asks the real ones."""

import pytest


@pytest.fixture(autouse=True)
def _no_others(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress_exporters.onnx.proof.openvino.installed", lambda name: False)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("compress_exporters.tensorrt.engine.installed", lambda name: False)
