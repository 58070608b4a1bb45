"""What the targets refuse, and what they must not: one line each, the same with --dry-run."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from compress.arch.forward.activations import ACTIVATIONS as KNOWN
from compress.cli.main import main
from compress.quant.scheme import QuantScheme
from compress_exporters import packages
from compress_exporters.onnx.graph.activations import ACTIVATIONS
from compress_exporters.table import EXPORTERS
from helpers import compressed_models, tiny_models
from helpers.exporters.exports import SYM
from helpers.exporters.gguf_files import change
from helpers.exporters.tensorrt_graphs import G64, positive
from helpers.forward_cases import rope

GRAPHS = ("onnx", "onnx-genai", "tensorrt")
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The one line of an export that is refused, with and without --dry-run; nothing is left."""

    def line(folder: Path, target: str) -> str:
        out = tmp_path / "refused"
        asked = ["export", str(folder), "--to", target, "-o", str(out)]
        found = set()
        capsys.readouterr()  # of who made the model
        for options in (["--dry-run"], []):
            assert main([*asked, *options]) == 2
            told = capsys.readouterr()
            assert told.out == ""
            found.add(told.err)
        assert not out.exists()
        assert not list(tmp_path.glob("refused*"))
        (text,) = found
        assert text.startswith("error: ")
        assert text.count("\n") == 1
        return text.removeprefix("error: ").rstrip()

    return line


# Latent attention (MLA), of transformers' own classes.
LATENT = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
RANKS = {"deepseek_v2": None, "deepseek_v3": 48}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    base = tmp_path_factory.mktemp("latent")
    sizes = {"vocab_size": tiny_models.VOCAB, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    for family, rank in RANKS.items():
        config = AutoConfig.for_model(family, **sizes, **LATENT, q_lora_rank=rank)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(base / family)
    return {family: base / family for family in RANKS}


TABLE = "model type {!r} is in no table of forwards; it runs in transformers only, known are llama,"
LATENT_LINES = {
    "onnx": TABLE,
    "onnx-genai": (
        "kv_lora_rank is 32: latent attention (MLA) has no operator in onnx-genai, whose keys and"
        " values are of one width; keep a checkpoint format, such as --to compressed-tensors"
    ),
    "tensorrt": TABLE,
    "gguf": "model type {!r} has no architecture in GGUF that is known here; known are llama,",
}


@pytest.mark.parametrize("target", EXPORTERS)
@pytest.mark.parametrize("family", RANKS)
def test_latent_attention(family: str, target: str, latent: dict[str, Path], refused: Any) -> None:
    assert refused(latent[family], target).startswith(LATENT_LINES[target].format(family))


# A dense deepseek_v3, which can be described and run.
DENSE = {
    "onnx-genai": (
        "kv_lora_rank is 32: latent attention (MLA) has no operator in onnx-genai, whose keys and"
        " values are of one width; export to onnx"
    ),
    "gguf": (
        "model type 'deepseek_v3' has latent attention, which is written into no GGUF file"
        " (architecture deepseek2 is untried); export to onnx, serve the checkpoint with"
        " transformers or compress-model, or export the model that a stage mla made it of"
    ),
}


@pytest.mark.parametrize("target", DENSE)
def test_latent_attention_in_the_tables(target: str, refused: Any, tmp_path: Path) -> None:
    folder = tiny_models.make("deepseek_v3", tmp_path / "model")
    assert refused(folder, target) == DENSE[target]


# What a stage hybrid writes.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen2": {"max_window_layers": 1},
    "qwen3": {"layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {
        "layer_types": ["full_attention", "sliding_attention"],
        "no_rope_layers": [1, 1],
    },
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_windows_in_some_layers(family: str, refused: Any, tmp_path: Path) -> None:
    """llama.cpp's architectures have none for them, and the file would be as short as a window."""
    options = {"use_sliding_window": True, "sliding_window": 24, **HYBRIDS[family]}
    folder = tiny_models.make(family, tmp_path / "model", **options)
    windows = "[24, None]" if family == "qwen3" else "[None, 24]"
    assert refused(folder, "gguf") == (
        f"windows of the layers are {windows}; GGUF's {family} has none, take onnx, or"
        " --max-context 24, for which none is needed"
    )
    out = tmp_path / "short"
    asked = ["export", str(folder), "--to", "gguf", "-o", str(out), "--max-context", "24"]
    assert main([*asked, "--dry-run"]) == 0


def test_a_llama_with_windows_in_some_layers(refused: Any, tmp_path: Path) -> None:
    folder = tiny_models.make("ministral", tmp_path / "model")
    line = refused(folder, "gguf")
    assert line.startswith("model type 'ministral' has no architecture in GGUF that is known here;")
    assert line.endswith("; take onnx")


TOKENIZERS: dict[str, tuple[Any, str]] = {
    "none": (None, "has no tokenizer.json, and a GGUF file carries its tokenizer; copy it from"),
    "broken": ("{", "tokenizer.json:1:2 is not valid JSON"),
    "Unigram": (
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}},
        "its model is 'Unigram'; GGUF's tokenizers have BPE for decoders",
    ),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_gguf_cannot_express(case: str, refused: Any, tmp_path: Path) -> None:
    stored, words = TOKENIZERS[case]
    folder = tiny_models.make("llama", tmp_path / "model")
    file = folder / "tokenizer.json"
    if isinstance(stored, dict):
        change(folder, file.name, **stored)
    elif stored is None:
        file.unlink()
    else:
        file.write_text(stored)
    assert words in refused(folder, "gguf")


@pytest.mark.parametrize("target", EXPORTERS)
def test_unknown_architectures(target: str, refused: Any, tmp_path: Path) -> None:
    folder = tiny_models.make("starcoder2", tmp_path / "model")
    said = {"gguf": "model type 'starcoder2' has no architecture in GGUF that is known here; known"}
    assert refused(folder, target).startswith(said.get(target, TABLE.format("starcoder2")))


def test_every_activation_that_we_compute_is_in_a_graph() -> None:
    assert set(ACTIVATIONS) == set(KNOWN)


DYNAMIC = rope(rope_type="dynamic", factor=2.0)
OPERATORS = {
    "tensorrt": (DYNAMIC, "rope_type 'dynamic' computes its frequencies in 64 bits"),
    "gguf": ({"hidden_act": "gelu"}, "the activation is 'gelu'; GGUF's llama computes"),
    "onnx-genai": ({"head_dim": 12}, "heads have 12 numbers, and onnx-genai's attention"),
    "onnx": ({"hidden_act": "laplace"}, "config.json: hidden_act is 'laplace'"),
}


@pytest.mark.parametrize("target", EXPORTERS)
def test_what_a_target_cannot_compute(target: str, refused: Any, tmp_path: Path) -> None:
    options, words = OPERATORS[target]
    folder = tiny_models.make("llama", tmp_path / "model", **options)
    assert words in refused(folder, target)


GROUPS = {
    "onnx-genai": (
        "model.layers.0.self_attn.q_proj has groups of 24 columns, and onnx-genai has blocks of 16,"
        " 32, 64, 128; take a multiple of 16, or export to onnx"
    ),
    "tensorrt": (
        "model.layers.0.self_attn.q_proj.weight (int4 sym g24) has 64 columns, which are no whole"
        " groups of 24; quantize with"
    ),
}


@pytest.mark.parametrize("target", EXPORTERS)
def test_groups_that_do_not_divide_a_row(
    target: str, refused: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused where there are blocks only; onnx has a short last group, gguf dense weights."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp16")
    scheme = QuantScheme(group_size=24)
    folder = compressed_models.write(source, tmp_path / "model", scheme).folder
    if target in GROUPS:
        assert refused(folder, target).startswith(GROUPS[target])
        return
    assert main(["export", str(folder), "--to", target, "-o", str(tmp_path / "out")]) == 0
    assert "proved" in capsys.readouterr().out


@pytest.mark.parametrize("target", EXPORTERS)
def test_a_vocabulary_as_large_as_the_middle_of_an_mlp_and_the_hidden_size(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shapes tell nothing apart, dense or quantized, head and embedding too."""
    same = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128}
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp16", **same)
    scheme = G64 if target == "tensorrt" else SYM
    positive(source, tmp_path / "coded", scheme, head=scheme)
    for folder in (source, tmp_path / "coded"):
        out = tmp_path / "out"
        asked = ["export", str(folder), "--to", target, "-o", str(out), "--overwrite"]
        assert main([*asked, *(["--accuracy-level", "0"] if target == "onnx-genai" else [])]) == 0
        told = capsys.readouterr().out
        assert "  proved   logits" in told, told


@pytest.mark.parametrize(
    ("target", "module"),
    [
        *((x, y) for x in GRAPHS for y in packages.PACKAGES if y != "gguf"),
        ("gguf", "gguf"),
    ],
)
def test_packages_that_are_too_old(
    target: str, module: str, refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = packages.PACKAGES[module]
    installed = packages.version

    def version(name: str) -> str:
        return "0.9.1" if name in package.distributions else installed(name)

    monkeypatch.setattr(packages, "version", version)
    extra = "gguf" if target == "gguf" else "onnx"
    folder = tiny_models.make("llama", tmp_path / "model")
    assert refused(folder, target) == (
        f"{target} needs {package.distributions[0]} {package.least} or newer, which knows"
        f" {package.knows}, and 0.9.1 is installed; run `pip install -U"
        f' "compress-model[{extra}]"`'
    )


@pytest.mark.parametrize(
    ("versions", "old"),
    [
        ({"onnxruntime": "1.22.4"}, True),
        ({"onnxruntime": "1.23.0"}, False),
        ({"onnxruntime": "1.31.1.dev20261101"}, False),
        ({"onnxruntime": "2.0"}, False),
        ({"onnxruntime-gpu": "1.9"}, True),
        ({"onnxruntime": "1.9", "onnxruntime-gpu": "1.30"}, False),
        ({}, False),  # of a distribution that nobody knows
    ],
)
def test_which_versions_are_too_old(
    versions: dict[str, str], old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(packages, "version", version)
    assert (packages.too_old("onnxruntime") is not None) == old


def test_a_folder_of_a_modules_name_is_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an export to that target may be, in the directory that Python is started in."""
    (tmp_path / "not_a_module").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not packages.installed("not_a_module")
    assert not packages.installed("nowhere_at_all")
    assert packages.installed("json")


def test_the_oldest_versions_are_those_of_the_extras() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {x for extra in ("onnx", "onnx-gpu", "gguf") for x in extras[extra]}
    for package in packages.PACKAGES.values():
        for name in package.distributions:
            assert f"{name}>={package.least}" in asked
