"""The head of a session file: both forms of the token list are read, and every damage is noticed."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.engines.slotfile import MAGIC, read_head
from splitproxy.model import Tokens

IDS = [7, 0, 31999, 2**31 - 1]
PAYLOAD = b"KV" * 11


def plain(ids: list[int]) -> list[int]:
    return ids


def tagged(ids: list[int], media: int = 0, form: int = 1) -> list[int]:
    return [-1, form, len(ids), *ids, media, *([0] * (3 * media)), 0]


def session(words: list[int], *, magic: int = MAGIC, version: int = 4, count: int | None = None) -> bytes:
    head = struct.pack("<III", magic, version, len(words) if count is None else count)
    return head + struct.pack(f"<{len(words)}i", *words) + PAYLOAD


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "splitproxy-x.session"


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize(
    ("words", "ids", "has_media"),
    [
        (plain(IDS), IDS, False),
        (plain([]), [], False),
        (tagged(IDS), IDS, False),
        (tagged([]), [], False),
        (tagged(IDS, media=2), IDS, True),
        ([*tagged(IDS), 0, 0, 0], IDS, False),
    ],
    ids=["plain", "plain, empty", "tagged", "tagged, empty", "with media", "padded"],
)
def test_both_forms_are_read(path: Path, version: int, words: list[int], ids: list[int], has_media: bool) -> None:
    """Either form of the list gives the very ids, whatever follows it."""
    data = session(words, version=version)
    path.write_bytes(data)
    head = read_head(path)
    assert head.tokens == Tokens(ids)
    assert (head.has_media, head.version, head.size_bytes) == (has_media, version, len(data))


@pytest.mark.parametrize("words", [plain(IDS), tagged(IDS)], ids=["plain", "tagged"])
def test_a_head_that_is_cut_off_anywhere_is_refused(path: Path, words: list[int]) -> None:
    """No beginning of a file that lacks a part of the token list passes for a whole one."""
    whole = session(words)[: -len(PAYLOAD)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut off|does not fit"):
            read_head(path)
    path.write_bytes(whole)
    assert read_head(path).tokens == Tokens(IDS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (session(IDS, magic=0x46554747), "not with the mark"),
        (session(IDS, version=1), "version 1 is unknown"),
        (session(IDS, version=5), "version 5 is unknown"),
        (session(IDS, count=len(IDS) + 6), "does not fit"),
        (session(IDS, count=2**32 - 1), "does not fit"),
        (session([-1, 2, 4, *IDS, 0, 0]), "unknown form"),
        (session([-1, 1, 6, *IDS, 0, 0]), "unknown form"),
        (session([-1, 1, -1, *IDS, 0, 0]), "unknown form"),
        (session([-1, 1, 4]), "cut off"),
        (session([-1]), "cut off"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_length_that_lies_is_refused(path: Path, data: bytes, message: str) -> None:
    """A mark, version, form or length that cannot be true is an error that says which."""
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_head(path)


def test_a_huge_length_reads_nothing(path: Path) -> None:
    """A length beyond any context is not believed even where the file is that large: no memory is taken for it."""
    with path.open("wb") as file:
        file.write(struct.pack("<III", MAGIC, 4, 2**30))
        file.truncate(12 + 4 * 2**30)  # a file of holes
    with pytest.raises(ValueError, match="does not fit"):
        read_head(path)


def test_a_missing_file_is_an_oserror(path: Path) -> None:
    """That there is no file is another fault than a damaged one."""
    with pytest.raises(FileNotFoundError):
        read_head(path)


@given(data=st.binary(max_size=80), valid=st.booleans())
def test_arbitrary_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, valid: bool
) -> None:
    """Whatever lies there, the answer is a head or a ValueError."""
    path = tmp_path_factory.getbasetemp() / "any.session"
    path.write_bytes(struct.pack("<II", MAGIC, 4) + data if valid else data)
    try:
        head = read_head(path)
    except ValueError:
        return
    assert 4 * len(head.tokens) <= len(data)
