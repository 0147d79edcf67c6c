"""The head of a Strata session file: what it tells, and what is no whole file of its kind."""

from pathlib import Path

import pytest

from splitproxy.engines.strata_file import StrataFile, read_head
from tests.fake_model import Weights
from tests.fake_strata_model import Conversation, fit, read, write


@pytest.fixture
def raw() -> bytes:
    held = Conversation()
    held.add([1, 2, 3], Weights())
    held.mark_prompt(0, 6)
    return fit(7, 4096, "int8", "1").pack(held)


def test_a_head_names_what_must_match(raw: bytes, tmp_path: Path) -> None:
    """Fingerprints of model and configuration tell which engines a file fits."""
    path = tmp_path / "x"
    write(path, raw)
    other = fit(7, 8192, "int8", "1")
    assert read_head(path) == StrataFile(len(raw), 1, 7, fit(7, 4096, "int8", "1").configuration)
    assert read_head(path).configuration != other.configuration
    assert read(path) == raw
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda raw: raw[:0], "cut off after 0 bytes"),
        (lambda raw: raw[:63], "cut off after 63 bytes"),
        (lambda raw: b"ggsq" + raw[4:], "not with the mark"),
        (lambda raw: raw[:8] + b"\x09" + raw[9:], "version 9 is unknown"),
        (lambda raw: raw[:-1], "does not fit into"),
        (lambda raw: raw + b"x", "does not fit into"),
        (lambda raw: raw[:-8] + b"\0" * 8, "end mark"),
    ],
    ids=["empty", "short", "magic", "version", "cut", "long", "end"],
)
def test_what_is_no_session_file(change: object, told: str, raw: bytes, tmp_path: Path) -> None:
    """A file that is cut, damaged or another's is found before any engine is told to take it."""
    path = tmp_path / "x"
    path.write_bytes(change(raw))  # type: ignore[operator]
    with pytest.raises(ValueError, match=told):
        read_head(path)
