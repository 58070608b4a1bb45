"""Progress: lines elsewhere, one rewritten line on a terminal."""

import io

from compress.cli.progress import ProgressLine, watched
from compress.events import Event, by_tenths, note


def lines(*events: Event, terminal: bool = False) -> str:
    stream = io.StringIO()
    progress = ProgressLine(stream, terminal)
    for event in events:
        progress(event)
    progress.close()
    return stream.getvalue()


def test_one_line_a_step_with_the_time_left() -> None:
    shown = lines(
        Event("quantize", "block 0", 1, 4, 2.0),
        Event("quantize", "block 1", 2, 4, 4.0, "2 experts kept plain rounding"),
        Event("quantize", "block 2", 3, 4, 1.0),
        Event("quantize", "block 3", 4, 4, 0.004),
        Event("evaluate", "block 0", 1, 2, 0.5),
    )
    assert shown.splitlines() == [
        "quantize: block 0 (1/4), 2.00 s",
        "quantize: block 1 (2/4), 4.00 s, 8.00 s left; 2 experts kept plain rounding",
        "quantize: block 2 (3/4), 1.00 s, 2.50 s left",
        "quantize: block 3 (4/4), <0.01 s",
        "evaluate: block 0 (1/2), 0.50 s",
    ]


def test_a_resumed_run_counts_only_its_own_steps() -> None:
    steps = Event("quantize", "block 7", 8, 10, 9.0), Event("quantize", "block 8", 9, 10, 3.0)
    assert lines(*steps).endswith("block 8 (9/10), 3.00 s, 3.00 s left\n")


def test_steps_of_another_kind_say_nothing_of_the_time_left() -> None:
    shown = lines(
        Event("quantize", "tensors outside the blocks", 1, 5, 50.0),
        Event("quantize", "block 0", 2, 5, 5.0),
        Event("quantize", "block 1", 3, 5, 4.0),
    )
    assert shown.splitlines() == [
        "quantize: tensors outside the blocks (1/5), 50.0 s",
        "quantize: block 0 (2/5), 5.00 s",
        "quantize: block 1 (3/5), 4.00 s, 8.00 s left",
    ]


def test_a_first_step_of_minutes_tells_what_is_left() -> None:
    (shown,) = lines(Event("quantize", "block 0", 1, 3, 300.0)).splitlines()
    assert shown == "quantize: block 0 (1/3), 5 min 00 s, 10 min 00 s left"


def test_events_without_a_time_are_timed_here() -> None:
    stream = io.StringIO()
    ticks = iter([10.0, 12.0, 16.0])
    progress = ProgressLine(stream, False, lambda: next(ticks))
    progress(Event("evaluate", "block 0", 1, 3, 0.0))
    progress(Event("evaluate", "block 1", 2, 3, 0.0))
    assert stream.getvalue().splitlines() == [
        "evaluate: block 0 (1/3), 2.00 s",
        "evaluate: block 1 (2/3), 4.00 s, 4.00 s left",
    ]


def test_a_note_is_a_whole_line_and_ends_the_time_before_it() -> None:
    stream = io.StringIO()
    ticks = iter([10.0, 60.0, 62.0])
    progress = ProgressLine(stream, True, lambda: next(ticks))
    progress(note("evaluate", "4 tokens, " + "words " * 20))
    progress(Event("evaluate", "block 0", 1, 2, 0.0))
    *first, second = stream.getvalue().split("\n")
    said = "evaluate: 4 tokens, " + "words " * 20
    assert " ".join(line.strip() for line in first) == said.strip()
    assert second.endswith("] 1/2 block 0")


def test_a_count_of_many_steps_becomes_ten_events() -> None:
    events: list[Event] = []
    count = by_tenths(events.append, "calibrate", "written")
    for done in range(1, 256):
        count(done, 255)
    assert [(event.index, event.total) for event in events] == [(n, 10) for n in range(1, 11)]
    few: list[Event] = []
    by_tenths(few.append, "calibrate", "written")(1, 2)
    assert (few[0].index, few[0].total) == (1, 2)
    assert all(event.seconds >= 0 for event in events)


def test_a_terminal_s_line_is_rewritten_and_ended() -> None:
    shown = lines(
        Event("quantize", "block 0", 1, 2, 2.0),
        Event("quantize", "block 1", 2, 2, 2.0),
        Event("evaluate", "block 0", 1, 2, 2.0),
        terminal=True,
    )
    assert shown.count("\r") == 3
    assert shown.split("\n")[0].endswith("quantize [####################] 2/2 block 1, done")
    assert shown.endswith("evaluate [##########..........] 1/2 block 0\n")


def test_the_line_is_ended_when_the_work_fails() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, True)
    line(Event("quantize", "block 0", 1, 2, 2.0))
    line.close()
    line.close()
    assert stream.getvalue().count("\n") == 1


def test_it_goes_to_stderr(capsys: object) -> None:
    import sys

    with watched() as progress:
        assert progress.stream is sys.stderr
