"""What doctor says of a good machine, and each problem it knows."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from compress.cli.commands import doctor
from compress.cli.main import main
from compress.machine import gpu, memory
from compress.machine.tested import TESTED, untested

REPO = Path(__file__).resolve().parents[2]


def install(site: Path, name: str, module: str | None = None) -> None:
    """A distribution with its metadata, and a package of one file when `module` is given."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if module:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text("")
        (info / "top_level.txt").write_text(module + "\n")
        (info / "RECORD").write_text(f"{module}/__init__.py,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An extra folder at the front of sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_this_machine_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    values = {check["name"]: check["value"] for check in answer["checks"]}
    assert {"gguf", "onnx", "onnxruntime", "openvino", "accelerate"} <= values.keys()
    assert {"Python", "torch", "transformers", "triton", "threads", "memory"} <= values.keys()
    assert {"disk", "kernels cpu", "ONNX Runtime", "Hugging Face kernels"} <= values.keys()
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("no problem found\n")


def test_what_results_need_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    main(["doctor"])
    assert (
        "not installed; transformers needs it to open results: pip install compressed-tensors"
    ) in capsys.readouterr().out


def test_a_release_that_nobody_tested_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: "4.57.1" if name == "transformers" else real(name)
    )
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "4.57.1, not tested with compress-model (5.23 to 5.24 is)\n" in shown


def test_what_was_tested_is_what_is_installed_and_pinned() -> None:
    for package, (first, last) in TESTED.items():
        assert untested(package, f"{first}.0+cpu") is None
        assert untested(package, last) is None
        assert untested(package, "0.0.1") is not None
        assert untested(package, "9999.1") is not None
    assert untested("a-package-of-no-table", "1.0") is None
    (pinned,) = re.findall(r"^torch==(.+)$", (REPO / "constraints.txt").read_text(), re.MULTILINE)
    assert untested("torch", pinned) is None
    bounds = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch>=2.11,<2.14" in bounds


def gpu_here(monkeypatch: pytest.MonkeyPatch, line: str | None) -> None:
    """The system has a GPU; torch does not see it, and `line` installs one that does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "has_nvidia", lambda: True)
    monkeypatch.setattr(gpu, "install_line", lambda build: line)
    monkeypatch.setattr(gpu, "torch_build", lambda: gpu.TorchBuild("2.13.0+cpu", None))


def test_a_cpu_build_of_torch_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_here(monkeypatch, "pip install torch")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "a GPU is here, but not for this torch (torch 2.13.0+cpu, a CPU build)\n" in shown
    assert "problem: GPU: run `pip install torch`\n" in shown


def test_no_gpu_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_here(monkeypatch, None)
    monkeypatch.setattr(gpu, "has_nvidia", lambda: False)
    found = {check.name: check for check in doctor.examine()}["GPU"]
    assert found == doctor.Check("GPU", "no GPU is here (torch 2.13.0+cpu, a CPU build)")


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These of the distributions that exclude each other are installed, whatever is here."""
    real = doctor._version
    monkeypatch.setattr(
        doctor,
        "_version",
        lambda name: "1.0" if name in names else None if name in doctor.EXCLUSIVE else real(name),
    )


def test_both_onnxruntimes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "onnxruntime", "onnxruntime-gpu")
    assert main(["doctor"]) == 1
    assert (
        "problem: ONNX Runtime: both are installed and overwrite each other; run `pip uninstall"
        " onnxruntime onnxruntime-gpu`, then install one extra, [onnx] or [onnx-gpu]"
    ) in capsys.readouterr().out


def test_one_onnxruntime_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "onnxruntime-gpu")
    assert doctor.onnxruntimes() == doctor.Check("ONNX Runtime", "onnxruntime-gpu")


def test_hugging_face_s_kernels_is_fine(site: Path) -> None:
    install(site, "kernels", "kernels")
    assert doctor.hub_kernels() == doctor.Check("Hugging Face kernels", "1.0")


def test_a_package_of_another_that_is_called_kernels(site: Path) -> None:
    install(site, "some-ops", "kernels")
    problem = doctor.hub_kernels().problem
    assert problem is not None
    assert problem.startswith(f"`import kernels` finds {site}/kernels/__init__.py (of some-ops),")


def test_a_folder_called_kernels_in_front_of_the_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "kernels", "kernels")
    (tmp_path / "here" / "kernels").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "here"), str(tmp_path / "site"), *sys.path])
    assert doctor.hub_kernels().problem is None
    (tmp_path / "here" / "kernels" / "__init__.py").write_text("")
    problem = doctor.hub_kernels().problem
    assert problem is not None
    assert "not Hugging Face's package" in problem


def test_old_python_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (4, 0))
    monkeypatch.setattr(doctor, "REQUIRED", ("no-such-package",))
    problems = {check.name: check.problem for check in doctor.examine() if check.problem}
    assert problems == {
        "Python": "older than 4.0; install a newer one",
        "no-such-package": "not installed; run `pip install no-such-package`",
    }


def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("2000000000\n")
    (tmp_path / "memory.current").write_text("500000000\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    shown = {check.name: check.value for check in doctor.examine()}["memory"]
    assert shown == "2.00 GB (limit of the container), 1.50 GB available"
