"""The line protocol: what each line means, which make no sense, and how long the next one may take."""

import pytest

from splitproxy.engines.strata_lines import (
    SILENCE_S,
    Done,
    Event,
    Fatal,
    Info,
    Other,
    OutOfStep,
    Read,
    Reading,
    Ready,
    Refused,
    Reused,
    SessionRefused,
    Transfer,
    Transferred,
    Transferring,
    Waiting,
    Written,
    generate,
    parse,
    transfer,
)
from splitproxy.model import Tokens

DONE = ["1", "5", "12.5", "3.0", "length", "0", "0", "2", "0", "0", "0", "0", "0.0", "3", "0", "0", "0", "0", "0", "0"]


def test_commands_are_one_line_each() -> None:
    """Ids are written without spaces, and what a request wants stands before them."""
    assert generate(1, Tokens([5, 6])) == "GEN 1 5,6\n"
    assert generate(0, Tokens([5]), prefill_only=True) == "GEN 0 prefill=1 5\n"
    assert transfer("SAVE", "/a folder/x.session") == "SAVE /a folder/x.session\n"
    with pytest.raises(ValueError, match="line break"):
        transfer("SAVE", "/a\nQUIT")


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("READY 4096 stop", Ready(4096, True)),
        ("READY 4096", Ready(4096, False)),
        ("INFO context=4096 kv=int8 odd engine=0.1.30", Info({"context": "4096", "kv": "int8", "engine": "0.1.30"})),
        ("RESUME 7", Reused(7)),
        ("REUSED 7", Reused(7)),
        ("PP 512 2048 31.5 16253.9", Read(512, 2048, 31.5)),
        ("T 9", Written(9)),
        ("SESSION 0 100", Transferring(0, 100)),
        ("SWAIT flush 61", Waiting("flush", 61)),
        ("SAVED 9 4096 1.5", Transferred("SAVED", 9, 4096, 1.5)),
        ("RESTORED 9 4096 1.5", Transferred("RESTORED", 9, 4096, 1.5)),
        ("SERR storage 0 the disk is full", SessionRefused("storage", False, "the disk is full")),
        ("SERR io 1 not flushed", SessionRefused("io", True, "not flushed")),
        ("SERR memory 0", SessionRefused("memory", False, "")),
        ("FATAL the state is lost", Fatal("the state is lost")),
        ("ERR bad request: max_new", Refused("bad request: max_new")),
        ("WARN slow", Other("WARN slow")),
        ("", Other("")),
        ("done 1", Other("done 1")),
    ],
)
def test_what_each_line_means(line: str, event: Event) -> None:
    """Each line of the protocol is one value, and any other is a sign of life."""
    assert parse(line) == event


@pytest.mark.parametrize(
    ("fields", "reused", "read"), [(5, 0, None), (8, 2, None), (10, 2, None), (13, 2, None), (14, 2, 3), (20, 2, 3)]
)
def test_done_is_read_by_the_number_of_its_fields(fields: int, reused: int, read: int | None) -> None:
    """Older engines tell less."""
    assert parse(f"DONE {' '.join(DONE[:fields])}") == Done(1, 5, 12.5, 3.0, "length", reused, read)


@pytest.mark.parametrize(
    "line",
    [
        *("READY", "READY many", "RESUME", "RESUME -1", "RESUME x", "REUSED 1 2"),
        *("PP 1 2 3", "PP 1 2 nan 4", "PP 1 2 -3.0 4", "T", "T x", "T 1 2"),
        *("DONE", "DONE 1 5 12.5 3.0", "DONE 1 5 inf 3.0 stop", "DONE x 5 1.0 3.0 stop"),
        *("SESSION 1", "SESSION 2 1", "SESSION -1 5", "SESSION 1 2 3", "SWAIT flush", "SWAIT flush 0"),
        *("SWAIT flush 3601", "SWAIT fl-ush 5", "SWAIT 5 5", "SAVED 1 2", "SAVED 1 2 nan", "SAVED 1 2 3 4"),
        *("RESTORED 1 -2 3.0", "SERR", "SERR odd 0 x", "SERR io 2 x", "SERR io", "RESUME \u0661"),
    ],
)
def test_a_line_that_makes_no_sense_is_out_of_step(line: str) -> None:
    """A known word with other values than it must have is no sign of anything; the error quotes none of them."""
    with pytest.raises(OutOfStep) as caught:
        parse(line)
    assert line.split()[0] in str(caught.value)


def fed(seen: Reading | Transfer, *text: str) -> "Reading | Transfer":
    for line in text:
        seen.feed(parse(line))
    return seen


def test_a_reading_goes_on_to_its_end() -> None:
    """Progress, notes and tokens come and go; DONE, ERR and FATAL are the end."""
    seen = fed(Reading(5), "RESUME 0", "note: x", "PP 5 5 1 1", "REUSED 0", "T 1")
    assert seen.end is None
    assert fed(seen, f"DONE {' '.join(DONE)}").end == Done(1, 5, 12.5, 3.0, "length", 2, 3)
    assert fed(Reading(5), "ERR no").end == Refused("no")
    assert fed(Reading(5), "RESUME 0", "ERR verify: timed out").end == Fatal("verify: timed out")
    assert fed(Reading(5), "ERR verify: timed out").end == Fatal("verify: timed out")
    assert fed(Reading(5), "FATAL no").end == Fatal("no")


@pytest.mark.parametrize("line", ["SAVED 1 2 3.0", "SESSION 0 1", "SWAIT flush 5", "SERR io 0 x", "READY 5"])
def test_a_file_has_no_place_in_a_reading(line: str) -> None:
    """An answer to something else means that the pipe is out of step."""
    with pytest.raises(OutOfStep):
        fed(Reading(5), line)


def test_how_long_a_reading_may_be_silent() -> None:
    """Longer before the first line of a long prompt, and in proportion to the chunk before after it."""
    seen = Reading(10_000)
    assert seen.limit_s == SILENCE_S + 200
    assert Reading(10**6).limit_s == SILENCE_S + 32768 / 50
    assert fed(seen, "RESUME 0").limit_s == SILENCE_S + 200
    assert fed(seen, "PP 5000 10000 150000 1").limit_s == 450
    assert fed(seen, "PP 6000 10000 160000 1").limit_s == SILENCE_S


def test_a_transfer_goes_on_to_its_end() -> None:
    """Steps and progress come in their order; the end is what was asked for, or a refusal."""
    save = fed(Transfer("SAVE"), "SWAIT capture 61", "SESSION 0 9", "INFO x=1", "WARN slow", "SESSION 9 9")
    assert save.end is None
    assert fed(save, "SAVED 4 9 1.0").end == Transferred("SAVED", 4, 9, 1.0)
    assert fed(Transfer("RESTORE"), "SESSION 5 9", "RESTORED 4 9 1.0").end == Transferred("RESTORED", 4, 9, 1.0)
    assert fed(Transfer("SAVE"), "SERR io 0 x").end == SessionRefused("io", False, "x")
    assert fed(Transfer("SAVE"), "ERR x").end == Refused("x")
    assert fed(Transfer("RESTORE"), "FATAL x").end == Fatal("x")


@pytest.mark.parametrize(
    "text",
    [
        ("SESSION 5 9",),  # a save begins at 0
        ("SESSION 0 9", "SESSION 5 9", "SESSION 4 9"),
        ("T 5",),
        ("PP 1 1 1 1",),
        ("RESUME 1",),
        ("something else",),
        ("RESTORED 1 2 3.0",),
        (f"DONE {' '.join(DONE)}",),
    ],
)
def test_what_cannot_come_while_a_file_is_saved(text: tuple[str, ...]) -> None:
    """A line of another command, or one of none, means that the pipe is out of step."""
    with pytest.raises(OutOfStep):
        fed(Transfer("SAVE"), *text)


def test_a_silent_step_has_its_own_time() -> None:
    """A step may take as long as the engine allows it; the next line ends that."""
    seen = fed(Transfer("SAVE", 10), "SWAIT fingerprint 900")
    assert seen.limit_s == 900
    assert fed(seen, "SESSION 0 5").limit_s == 10
    assert fed(seen, "SWAIT flush 5").limit_s == 10
