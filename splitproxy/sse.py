"""Server-sent events: splitting at any chunk edge, keep-alives and errors. Pure: bytes in, bytes out."""

from collections.abc import Iterator

from splitproxy.model import Api

MEDIA_TYPE = "text/event-stream"


def keep_alive(api: Api) -> bytes:
    """What tells a waiting client, in its API's own way, that the connection lives."""
    return b'event: ping\ndata: {"type": "ping"}\n\n' if api is Api.MESSAGES else b":\n\n"


def error_event(api: Api, error: bytes) -> bytes:
    """An error inside a stream. `error` is the error body of the API, as JSON on one line."""
    if api in (Api.MESSAGES, Api.RESPONSES):
        return b"event: error\ndata: " + error + b"\n\n"
    return b"data: " + error + b"\n\n"


class EventReader:
    """Bytes to the data of whole events, at any chunk edge."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is complete now; comments and other fields are skipped."""
        *events, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
