"""The stored result of graphs of latent attention: the document says what it says."""

import json

from benchmarks.processes import REPO, RESULTS

FOUND = json.loads((RESULTS / "export_latents.json").read_text())


def test_the_document_says_what_was_measured() -> None:
    text, spent = (REPO / "docs" / "export.md").read_text(), FOUND["cpu_milliseconds"]
    token, small_token, prompt, small_prompt = (
        tuple(spent[f"{what}, {of}"].values())
        for what in ("a token behind 1023", "a prompt of 256")
        for of in ("DeepSeek's latents", "tale-6m")
    )
    kl = FOUND["kl_nats_a_token"]
    for said in (
        f"{token[0]:.1f} ms of processor time in place of {token[1]:.1f} ms",
        f"96 + 32 numbers: {small_token[0]:.2f} in place of {small_token[1]:.2f})",
        f"{prompt[0]:.0f} ms in place of {prompt[1]:.0f} (",
        f"({small_prompt[0]:.1f} in place of {small_prompt[1]:.1f})",
        f"is {kl['fp32']:.0e} nats a token in fp32 and {kl['fp16']:.0e} in fp16",
    ):
        assert said.replace("e-0", "e-") in text, said


def test_graphs_compute_what_transformers_does() -> None:
    assert FOUND["kl_nats_a_token"]["fp32"] < 1e-10
    assert FOUND["kl_nats_a_token"]["fp16"] < 1e-5


def test_single_tokens_are_faster_than_by_the_operator() -> None:
    for name, spent in FOUND["cpu_milliseconds"].items():
        if name.startswith("a token"):
            assert 2 * spent["rows of one product"] < spent["Attention"]
