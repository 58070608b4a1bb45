"""lm-evaluation-harness on our engine and on its own `hf` model: the same numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import CompressError
from compress.quant.scheme import QuantScheme
from helpers import compressed_models, harness_tasks, tiny_models

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("lm_eval", "compressed_tensors")]

REPO = Path(__file__).resolve().parents[2]
CLOSE = 1e-4  # nats; of sums, each summed in another order
ROUND = 1e-6  # of a large sum: 2,285 nats lay 1.4e-4 apart on a processor with AVX2
# The harness 0.4.13 reads a one-token continuation from the logits of another request where both
# make the same text, and then takes a wrong position: -10.8 for -0.0007 in one of the cases below.
HF = "dtype=float32,logits_cache=False"


# Nobody named a device, and the harness's command then names a CUDA device.
CPU = "torch sees no CUDA device, which is the harness's default: the CPU computes"
CUDA = "steps run op by op, not in one call: compiled steps are for the CPU, and this is cuda"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness_tasks.write(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """All in fp32: the engine rounds decoded weights to the dtype of the dense ones, and
    transformers to that of the arithmetic."""
    source = tmp_path_factory.mktemp("fp32")
    shutil.copytree(demo_model, source, dirs_exist_ok=True)
    tensors = {k: v.float() for k, v in load_file(demo_model / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    rewrite(source / "config.json", dtype="float32")
    scheme = QuantScheme(bits=4, symmetric=True, group_size=32)
    return compressed_models.write(source, tmp_path_factory.mktemp("packed"), scheme).folder


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a token of its own in front of every text, and another at the end of
    what a model writes; a template for chats that takes no system message."""
    from tokenizers import Tokenizer, processors

    folder = tiny_models.make("qwen2", tmp_path_factory.mktemp("beginning"), dtype="fp32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    rewrite(
        folder / "tokenizer_config.json",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system message') }}{% endif %}"
        "{{ bos_token + m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}",
    )
    rewrite(folder / "config.json", bos_token_id=begin, eos_token_id=end)
    rewrite(folder / "generation_config.json", eos_token_id=end, repetition_penalty=1.2)
    return folder


def rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def evaluate(tasks: Path, kind: str, arguments: str, **more: Any) -> dict[str, Any]:
    """All tasks: {"results": numbers by task, "samples": each answer}."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from compress.cli.lm_eval import register

    register()
    found: dict[str, Any] = simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=list(harness_tasks.NAMES),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **{"batch_size": 1, "device": "cpu", **more},
    )
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in harness_tasks.NAMES:
        samples = zip(ours["samples"][name], theirs["samples"][name], strict=True)
        for sample, expected in samples:
            assert sample["doc_id"] == expected["doc_id"]
            assert_same_answers(sample["resps"], expected["resps"])
        measured = numbers(theirs["results"][name])
        assert numbers(ours["results"][name]) == pytest.approx(measured, rel=CLOSE)
    for metric in ("acc,none", "acc_norm,none"):
        task = "local_choices"
        assert ours["results"][task][metric] == theirs["results"][task][metric]


def assert_same_answers(ours: Any, theirs: Any) -> None:
    """Texts and whether a choice is greedy: identical. Log-likelihoods: close."""
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_answers(one, other)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=ROUND, abs=CLOSE)
    else:
        assert ours == theirs


def numbers(results: dict[str, Any]) -> dict[str, float]:
    found = {k: float(v) for k, v in results.items() if k.endswith(",none") and "stderr" not in k}
    assert found
    return found


@pytest.fixture(scope="module")
def demo_in_hf(tasks: Path, demo_model: Path) -> dict[str, Any]:
    return evaluate(tasks, "hf", f"pretrained={demo_model},{HF}")


def test_texts_that_are_cut(tasks: Path, demo_model: Path) -> None:
    theirs = evaluate(tasks, "hf", f"pretrained={demo_model},{HF},max_length=48")
    ours = evaluate(tasks, "compress_model", f"pretrained={demo_model},max_length=48")
    assert_same(ours, theirs)


def test_the_demo_model(tasks: Path, demo_model: Path, demo_in_hf: dict[str, Any]) -> None:
    ours = evaluate(tasks, "compress_model", f"pretrained={demo_model},dtype=float32")
    assert_same(ours, demo_in_hf)
    # A trained model: the tasks tell something.
    assert ours["results"]["local_choices"]["acc,none"] >= 0.8
    assert ours["results"]["local_stories"]["exact_match,none"] > 0


def test_a_packed_checkpoint(tasks: Path, packed: Path, demo_model: Path) -> None:
    theirs = evaluate(tasks, "hf", f"pretrained={packed},{HF}")
    ours = evaluate(tasks, "compress_model", f"pretrained={packed},dtype=float32")
    assert_same(ours, theirs)
    dense = evaluate(tasks, "compress_model", f"pretrained={demo_model},dtype=float32")
    assert numbers(dense["results"]["local_texts"]) != numbers(ours["results"]["local_texts"])


@pytest.mark.parametrize(
    "more",
    ["", ",add_bos_token=False", ",add_bos_token=True,max_length=40,prefix_token_id=7"],
    ids=["own", "without", "with"],
)
def test_a_tokenizer_that_begins_texts(tasks: Path, beginning: Path, more: str) -> None:
    """It also has a repetition penalty in generation_config.json, which `hf` applies."""
    theirs = evaluate(tasks, "hf", f"pretrained={beginning},{HF}{more}")
    ours = evaluate(tasks, "compress_model", f"pretrained={beginning},dtype=float32{more}")
    assert_same(ours, theirs)


def test_chats(tasks: Path, beginning: Path) -> None:
    """A system message that the template refuses is left out, by both."""
    chat = {"apply_chat_template": True, "system_instruction": "Be brief."}
    theirs = evaluate(tasks, "hf", f"pretrained={beginning},{HF}", **chat)
    ours = evaluate(tasks, "compress_model", f"pretrained={beginning},dtype=float32", **chat)
    assert_same(ours, theirs)
    prompt = ours["samples"]["local_stories"][0]["arguments"][0][0]
    assert prompt.startswith("<s>user: ")


def test_batches_do_not_matter(tasks: Path, beginning: Path) -> None:
    alone, beside = (
        evaluate(tasks, "compress_model", f"pretrained={beginning}", batch_size=size)
        for size in (1, 64)
    )
    assert alone["results"] == beside["results"]


def test_a_cache_answers_the_second_time(
    tasks: Path, beginning: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.serve import harness

    cache = str(tmp_path / "answers")
    first = evaluate(tasks, "compress_model", f"pretrained={beginning}", use_cache=cache)
    for name in ("score_pairs", "continue_prompts"):
        monkeypatch.setattr(harness, name, None)  # nothing is left to compute
    second = evaluate(tasks, "compress_model", f"pretrained={beginning}", use_cache=cache)
    assert first["results"] == second["results"]


def test_sampled_answers_follow_the_seed(tasks: Path, beginning: Path) -> None:
    def answers(seed: int) -> list[Any]:
        found = evaluate(
            tasks,
            "compress_model",
            f"pretrained={beginning}",
            gen_kwargs="do_sample=True,temperature=1.0",
            torch_random_seed=seed,
        )
        return [sample["resps"] for sample in found["samples"]["local_stories"]]

    first = answers(1)
    assert first == answers(1)
    assert first != answers(2)
    assert first[2] != first[3]  # one question asked twice


def test_thinking_is_cut_off(tasks: Path, demo_model: Path) -> None:
    """By `hf` as by us, where it ends with a text and where with an id."""
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(demo_model).encode(" a", add_special_tokens=False)
    assert len(end) == 1
    for told in (" a", end[0]):
        more = f",think_end_token={told}"
        theirs = evaluate(tasks, "hf", f"pretrained={demo_model},{HF}{more}")
        ours = evaluate(tasks, "compress_model", f"pretrained={demo_model}{more}")
        answers, expected = (
            [sample["resps"] for sample in found["samples"]["local_stories"]]
            for found in (ours, theirs)
        )
        assert answers == expected


def refused(tasks: Path, arguments: str, **more: Any) -> str:
    with pytest.raises(CompressError) as caught:
        evaluate(tasks, "compress_model", arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals(tasks: Path, beginning: Path, tmp_path: Path) -> None:
    model = f"pretrained={beginning}"
    assert "max_length is 4096: " in refused(tasks, f"{model},max_length=4096")
    assert "max_gen_toks is 24 and max_length 24" in refused(tasks, f"{model},max_length=24")
    assert "num_beams=3 is not one" in refused(tasks, model, gen_kwargs="num_beams=3")
    thinking = f"{model},enable_thinking=True,think_end_token=</think>"
    assert "enable_thinking=True is for tasks that generate" in refused(tasks, thinking)
    assert "device is 'mps'; it is 'auto', 'cpu', 'cuda' or" in refused(tasks, model, device="mps")


def test_no_token_to_begin_with(tasks: Path, tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path, dtype="fp32")
    rewrite(folder / "tokenizer_config.json", bos_token=None, eos_token=None)
    assert "give prefix_token_id=ID" in refused(tasks, f"pretrained={folder}")
    evaluate(tasks, "compress_model", f"pretrained={folder},prefix_token_id=3")


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    roots = (REPO, REPO / "calibration", REPO / "kernels")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "compress.cli.lm_eval", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )


def test_the_command(
    tasks: Path, demo_model: Path, demo_in_hf: dict[str, Any], tmp_path: Path
) -> None:
    """As a user calls it: the harness's command line, its tasks beside ours, its results file."""
    done = command(
        *("--model", "compress_model", "--model_args", f"pretrained={demo_model},dtype=fp32"),
        *("--tasks", ",".join(harness_tasks.NAMES), "--include_path", tasks),
        *("--output_path", tmp_path / "out.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "|local_last_word|" in done.stdout.replace(" ", "")
    (written,) = tmp_path.glob("out*.json")
    ours = json.loads(written.read_text())
    for name in harness_tasks.NAMES:
        measured = numbers(demo_in_hf["results"][name])
        assert numbers(ours["results"][name]) == pytest.approx(measured, rel=CLOSE)
    assert ours["config"]["model_dtype"] == "fp32"
    said = CUDA if torch.cuda.is_available() else CPU
    assert ours["config"]["model_notices"] == [said]
    assert done.stderr.count(said) == 1


def test_the_harness_keeps_its_own_models(lm_eval: ModuleType) -> None:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import get_model

    from compress.cli.lm_eval import MODEL, register

    register()
    register()  # once is enough, and twice does no harm
    assert issubclass(get_model(MODEL), TemplateLM)
    assert get_model("hf").__name__ == "HFLM"
