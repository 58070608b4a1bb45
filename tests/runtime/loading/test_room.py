"""Codes are decoded once where caches hold all weights, with the bits of codes that are read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.arch.forward.forward import describe_forward
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import PRESETS
from compress.runtime.decoder.build import Loader
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.linear import weight_bytes
from compress.runtime.forms.form import Arithmetic
from compress.runtime.loading import room
from compress.runtime.loading.room import with_room
from compress.verbs import open_model
from compress_kernels.cpu.library import native
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import Runs

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
PLENTY = 2**40


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int4")
    source = tiny_models.make("llama", folder / "source", dtype="bf16")
    scheme = replace(PRESETS["W4A16"], group_size=16)
    compressed_models.write(source, folder / "out", lambda spec: scheme)
    return folder / "out"


def test_where_caches_have_room_for_all_of_them_and_memory_for_twice_as_much(
    int4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_weights(Checkpoint.open(int4))
    bf16, fp32 = (Arithmetic.here(x, "cpu") for x in (torch.bfloat16, torch.float32))
    needed = weight_bytes(weights, replace(bf16, all_decoded=True))
    assert needed > weight_bytes(weights, bf16)
    monkeypatch.setattr(room, "cache_bytes", lambda: 2 * needed)
    assert with_room(weights, bf16, PLENTY).all_decoded
    assert with_room(weights, bf16, None).all_decoded
    assert not with_room(weights, bf16, needed).all_decoded
    assert with_room(weights, fp32, PLENTY) == fp32
    monkeypatch.setattr(room, "cache_bytes", lambda: 2 * needed - 1)
    assert with_room(weights, bf16, PLENTY) == bf16


def test_it_is_said_and_changes_no_bit(int4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "cache_bytes", lambda: PLENTY)
    model = open_model(int4, dtype="bf16")
    told = [notice for notice in model.notices if "decoded once" in notice]
    assert len(told) == 1
    assert told[0].endswith("not codes in panels (caches hold decoded weights)")
    weights = open_weights(Checkpoint.open(int4))
    forward = describe_forward(weights.checkpoint.config, weights.spec)
    read = Arithmetic.here(torch.bfloat16, "cpu")
    once = replace(read, all_decoded=True)
    ids = list(range(3, 40))
    found, want = (
        Runs(Decoder.of(Loader(weights, forward, how)), texts=1, most=64).whole(ids)
        for how in (once, read)
    )
    assert torch.equal(found, want)
