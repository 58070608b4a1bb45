"""`auto` takes a GPU that gives the CPU's results, and no other; it says what it took and why."""

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compress.errors import OutputError
from compress.events import Event
from compress.machine import device as devices
from compress.machine import gpu
from compress.machine.device import Device, settle
from compress.machine.gpu import TorchBuild, driver_cuda, install_line, why_no_gpu
from compress.machine.self_check import TRIALS, DeviceTrial, differences

SMI = "| NVIDIA-SMI 580.65   Driver Version: 580.65   CUDA Version: {} |"


@pytest.fixture(autouse=True)
def chosen_afresh() -> Iterator[None]:
    devices._chosen.cache_clear()
    yield
    devices._chosen.cache_clear()


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that torch sees; what runs on it runs on the CPU, where the checks look for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: "Card 5")


def driver(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    """A driver that runs this CUDA; None: there is none."""
    monkeypatch.setattr(gpu, "DRIVER", Path("/nonexistent"))
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None if cuda is None else "/bin/smi")
    answer = SimpleNamespace(stdout=SMI.format(cuda))
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: answer)


def test_a_device_of_one_kind_agrees_with_itself() -> None:
    assert list(differences("cpu")) == []


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_a_wrong_result_is_found(trial: DeviceTrial) -> None:
    """The second time it is wrong by twice the bound; and once it is not a number."""
    for change in (lambda x: x * (1 + 2 * trial.bound), lambda x: x * torch.nan):
        turns = itertools.count()

        def run(device: torch.device, change=change, turns=turns) -> torch.Tensor:
            found = trial.run(device).float()
            return change(found) if next(turns) else found

        (line,) = differences("cpu", (DeviceTrial(trial.name, run, trial.bound),))
        assert line.startswith(f"{trial.name} differs from the CPU's by ")
        assert line.endswith(f", {trial.bound:g} is allowed")


def test_what_fails_ends_the_check() -> None:
    turns = itertools.count()

    def run(device: torch.device) -> torch.Tensor:
        if next(turns):
            raise RuntimeError("no kernel image is available\nfor this device")
        return torch.ones(1)

    found = differences("cpu", (DeviceTrial("a sum", run, 1e-5), DeviceTrial("more", run, 1e-5)))
    assert list(found) == ["a sum fails on it (no kernel image is available)"]


def test_a_gpu_that_agrees_is_taken(monkeypatch: pytest.MonkeyPatch, a_gpu: None) -> None:
    monkeypatch.setattr(devices, "differences", lambda device: iter(()))
    found = settle("auto")
    assert found == Device("cuda", "Card 5, which gives the CPU's results")
    assert found.notices == ("device cuda: Card 5, which gives the CPU's results",)
    assert found.warnings == ()


def test_a_gpu_that_does_not_agree_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, a_gpu: None
) -> None:
    monkeypatch.setattr(devices, "differences", lambda device: iter(["a sum differs", "more"]))
    events: list[Event] = []
    found = settle("auto", events.append)
    line = "cpu: Card 5 is not used, since a sum differs; cuda takes it all the same"
    assert found.name == "cpu"
    assert [(event.stage, event.message) for event in events] == [("device", line)]
    assert found.notices == found.warnings == (f"device {line}",)


def test_without_a_gpu_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "torch_build", lambda: TorchBuild("2.13.0+cpu", None))
    found = settle("auto")
    assert found.line == "cpu: no GPU is here (torch 2.13.0+cpu, a CPU build)"
    assert found.notices == found.warnings == ()


def test_what_the_user_names_is_not_checked() -> None:
    assert settle("cpu") == Device("cpu")
    with pytest.raises(OutputError, match=r"^device is 'gpu'; it is 'auto', 'cpu', 'cuda' or 'cu"):
        settle("gpu")


def test_a_cpu_build_beside_a_gpu_is_told_from_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, "13.1")
    why, line = why_no_gpu(TorchBuild("2.13.0+cpu", None))
    assert why == "a GPU is here, but not for this torch (torch 2.13.0+cpu, a CPU build)"
    assert line == (
        "pip install --force-reinstall torch==2.13.0 --index-url"
        " https://download.pytorch.org/whl/cu130"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "torch_build", lambda: TorchBuild("2.13.0+cpu", None))
    assert settle("auto").passed_over
    assert settle("auto").why == f"{why}; {line}"


@pytest.mark.parametrize(
    ("cuda", "index"), [("13.0", "cu130"), ("12.9", "cu126"), ("12.6", "cu126"), ("11.8", None)]
)
def test_the_build_is_one_that_the_driver_runs(
    monkeypatch: pytest.MonkeyPatch, cuda: str, index: str | None
) -> None:
    driver(monkeypatch, cuda)
    line = install_line(TorchBuild("2.13.0", "13.0"))
    assert line is None if index is None else (line or "").endswith(f"/{index}")


def test_a_driver_that_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    driver(monkeypatch, "13.0")
    monkeypatch.setattr(gpu.subprocess, "run", fails)
    assert driver_cuda() is None
    assert install_line(TorchBuild("2.13.0", None)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_this_gpu_gives_the_cpu_s_results() -> None:
    assert list(differences("cuda")) == []
    assert settle("auto").name == "cuda"
