"""A resumed run says where it goes on."""

from pathlib import Path

import pytest

from compress.events import Event
from compress.verbs import RunOptions, run
from helpers.short_runs import RTN, WORDS, recipe, text_source

pytestmark = pytest.mark.usefixtures("answered_here")


@pytest.mark.parametrize(
    ("stage", "unit", "line"),
    [
        ("prune_width", "block 0", "prune_width goes on behind block 0"),
        ("prove", "", "prune_width goes on behind block 1"),
        ("quantize", "block 0", "prune_width done before; quantize goes on behind block 0"),
        ("evaluate", "", "prune_width, quantize done before"),
    ],
)
def test_it_says_what_is_done(tiny, tmp_path: Path, stage: str, unit: str, line: str) -> None:
    other = tmp_path / "other.txt"
    other.write_text(WORDS)
    asked = recipe(
        *({"method": "prune_width", "ffn": 64}, RTN),
        calibration=text_source(tmp_path),
        evaluation={"texts": [{"text": str(other)}]},
    )
    heard: list[Event] = []

    def stop(event: Event) -> None:
        if event.stage.startswith(stage) and event.unit in (unit, unit or event.unit):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, tiny("llama"), tmp_path / "out", progress=stop)
    again = RunOptions(resume=True)
    run(asked, tiny("llama"), tmp_path / "out", options=again, progress=heard.append)
    assert [x.message for x in heard if x.stage == "resume"] == [line]
