"""HTTP/1.1 as a client speaks it: a request's head to bytes, and an answer's bytes, cut anywhere, to head and body.

Pure: values and bytes in, bytes and values out.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from splitproxy.errors import SplitproxyError

Headers = tuple[tuple[str, str], ...]

_LONGEST_HEAD_BYTES = 64 * 1024  # also of all fields behind a body's last chunk
_LONGEST_LINE_BYTES = 4 * 1024  # before a chunk: its size, and extensions that nobody reads
_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: [^\r\n\0]*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNFIT_VALUE = re.compile(r"[\r\n\0]")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # everything but the tab
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_BODILESS = frozenset({204, 304})
_SWITCHED = 101


class BrokenAnswer(SplitproxyError):  # noqa: N818 - that is what it is
    """The bytes are no HTTP/1 answer, or end in the middle of one. The message holds nothing of the body."""


def request_head(method: str, target: str, host: str, headers: Iterable[tuple[str, str]], length: int | None) -> bytes:
    """A request's head, its empty line included. `length` is the body's, in bytes; None where there is no body.

    The connection is to be closed after the answer. Raises ValueError for a line break where none may be.
    """
    fields = [("Host", host), *headers, ("Connection", "close")]
    if length is not None:
        fields.append(("Content-Length", str(length)))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    if any(_UNFIT_VALUE.search(line) for line in lines):
        raise ValueError("a line break inside a line of a request's head")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Head:
    """An answer's status and fields. Bytes that are no UTF-8 are in the values as surrogates."""

    status: int
    headers: Headers

    def values(self, name: str) -> list[str]:
        """All values of a field, whose name is given in small letters."""
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def media_type(self) -> str:
        """The content's type, without its parameters."""
        return next(iter(self.values("content-type")), "").partition(";")[0].strip().lower()


def read_head(block: bytes) -> Head:
    """An answer's head, without the empty line behind it. Raises BrokenAnswer."""
    first, *lines = block.split(_LINE_END)
    if (status := _STATUS_LINE.fullmatch(first)) is None:
        raise BrokenAnswer("it does not begin as an HTTP/1 answer")
    return Head(int(status[1]), tuple(map(_field, lines)))


def _field(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    text = value.strip(b" \t").decode("utf-8", "surrogateescape")
    if not colon or not _NAME.fullmatch(name) or _CONTROL.search(text):
        raise BrokenAnswer("a line of its head is no field")
    return name.decode("ascii"), text


class Body(Protocol):
    """How a body's end is told."""

    complete: bool

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes, cut anywhere; return what they hold of the body. Raises BrokenAnswer."""
        ...

    def end(self) -> None:
        """The connection was closed. Raises BrokenAnswer where the body is not complete."""
        ...


class _Line(Enum):
    """What the next line of a chunked body must be."""

    SIZE = auto()
    EMPTY = auto()  # behind a chunk
    TRAILER = auto()


class Chunked:
    """A body in chunks, each behind its size."""

    __slots__ = ("_left", "_next", "_rest", "_trailers", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._next = _Line.SIZE
        self._left = 0  # bytes of a chunk that are still to come
        self._rest = b""  # the beginning of a line
        self._trailers = b""

    def feed(self, data: bytes) -> bytes:
        if self._next is _Line.SIZE and not self._rest:
            # Nearly every piece of a stream is one whole chunk.
            place = data.find(_LINE_END, 0, 16)
            if place > 0 and _SIZE.fullmatch(data, 0, place):
                size = int(data[:place], 16)
                if size and len(data) == place + size + 4 and data.endswith(_LINE_END):
                    return data[place + 2 : -2]
        data, pieces, place = self._rest + data, [], 0
        while not self.complete:
            if self._left:
                piece = data[place : place + self._left]
                pieces.append(piece)
                place += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            end = data.find(_LINE_END, place)
            if end < 0:
                break
            self._take(data[place:end])
            place = end + 2
        self._rest = b"" if self.complete else data[place:]
        _require_short(self._rest.removesuffix(b"\r"), _LONGEST_LINE_BYTES)
        return b"".join(pieces)

    def _take(self, line: bytes) -> None:
        _require_short(line, _LONGEST_LINE_BYTES)
        match self._next:
            case _Line.SIZE:
                size = line.partition(b";")[0].rstrip(b" \t")
                if not _SIZE.fullmatch(size):
                    raise BrokenAnswer("a chunk has no size")
                self._left = int(size, 16)
                self._next = _Line.EMPTY if self._left else _Line.TRAILER
            case _Line.EMPTY:
                if line:
                    raise BrokenAnswer("a chunk is longer than its size")
                self._next = _Line.SIZE
            case _Line.TRAILER:
                self.complete = not line
                self._trailers += line
                _require_short(self._trailers, _LONGEST_HEAD_BYTES)

    def end(self) -> None:
        if not self.complete:
            raise BrokenAnswer("it ends in the middle of its body")


class Counted:
    """A body of a known length."""

    __slots__ = ("_left", "complete")

    def __init__(self, length: int) -> None:
        self._left = length
        self.complete = not length

    def feed(self, data: bytes) -> bytes:
        piece = data[: self._left]
        self._left -= len(piece)
        self.complete = not self._left
        return piece

    def end(self) -> None:
        if not self.complete:
            raise BrokenAnswer("it ends in the middle of its body")


class UntilClosed:
    """A body that ends with its connection, as HTTP/1.0 has it."""

    __slots__ = ("complete",)

    def __init__(self) -> None:
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        return data

    def end(self) -> None:
        self.complete = True


def body_of(head: Head, method: str) -> Body:
    """The kind of body that follows a head. Raises BrokenAnswer where nobody could tell its end."""
    if method == "HEAD" or head.status in _BODILESS:
        return Counted(0)
    if codings := head.values("transfer-encoding"):
        if [coding.lower() for coding in codings] != ["chunked"]:
            raise BrokenAnswer("its body comes in an encoding that was not asked for")
        return Chunked()
    lengths = set(head.values("content-length"))
    if not lengths:
        return UntilClosed()
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise BrokenAnswer("its length is no number")
    return Counted(int(length))


def _require_short(data: bytes, limit_bytes: int) -> None:
    if len(data) > limit_bytes:
        raise BrokenAnswer("a part of it that is no body does not end")


class AnswerReader:
    """One answer, from the connection's first byte on. What follows it is dropped."""

    __slots__ = ("_body", "_method", "_rest", "head")

    def __init__(self, method: str) -> None:
        self.head: Head | None = None
        self._method = method
        self._body: Body | None = None
        self._rest = b""

    @property
    def complete(self) -> bool:
        """Whether head and body have come whole."""
        return self._body is not None and self._body.complete

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes, cut anywhere; return what they hold of the body. Raises BrokenAnswer."""
        return self._feed_head(data) if self._body is None else self._body.feed(data)

    def _feed_head(self, data: bytes) -> bytes:
        self._rest += data
        while self._body is None:
            block, found, rest = self._rest.partition(_HEAD_END)
            _require_short(block.rstrip(_LINE_END), _LONGEST_HEAD_BYTES)
            if not found:
                return b""
            self._rest = rest
            head = read_head(block)
            if head.status == _SWITCHED:
                raise BrokenAnswer("it switches to a protocol that was not asked for")
            if head.status >= 200:  # any other only says that the answer is on its way
                self.head, self._body = head, body_of(head, self._method)
        rest, self._rest = self._rest, b""
        return self._body.feed(rest)

    def end(self) -> None:
        """The connection was closed. Raises BrokenAnswer where the answer is not complete."""
        if self._body is None:
            raise BrokenAnswer("it ends in the middle of its head" if self._rest else "there is none")
        self._body.end()
