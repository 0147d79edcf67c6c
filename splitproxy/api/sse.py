"""Server-sent events: splitting at any chunk edge, keep-alives and errors. Pure: bytes in, bytes out."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from splitproxy.model import Api

MEDIA_TYPE = "text/event-stream"
END = b"\n\n"  # of an event


def keep_alive(api: Api) -> bytes:
    """What tells a waiting client, in its API's own way, that the connection lives."""
    return b'event: ping\ndata: {"type": "ping"}\n\n' if api is Api.MESSAGES else b":\n\n"


def data_event(text: bytes) -> bytes:
    """An event without a name. `text` is one line."""
    return b"data: " + text + END


def error_event(api: Api, error: bytes) -> bytes:
    """An error inside a stream. `error` is the error body of the API, as JSON on one line."""
    if api in (Api.MESSAGES, Api.RESPONSES):
        return b"event: error\n" + data_event(error)
    return data_event(error)


def progress_event(api: Api, request_id: str, created: int, progress: Mapping[str, int]) -> bytes:
    """How far a prompt is read, as llama-server words it for this API; nothing where it has no words for it."""
    told: dict[str, Any] = {"prompt_progress": progress}
    match api:
        case Api.CHAT | Api.COMPLETIONS:
            choice: dict[str, Any] = {"finish_reason": None, "index": 0}
            if api is Api.CHAT:
                kind, choice["delta"] = "chat.completion.chunk", {"role": "assistant", "content": None}
            else:
                kind, choice["text"], choice["logprobs"] = "text_completion", "", None
            told = {"choices": [choice], "created": created, "id": f"chatcmpl-{request_id}", "object": kind, **told}
        case Api.NATIVE:
            read = {"tokens_predicted": 0, "tokens_evaluated": progress["total"]}
            told = {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": -1, **read, **told}
        case Api.RESPONSES:
            kind = "response.in_progress"
            begun = {"id": f"resp_{request_id}", "object": "response", "status": "in_progress"}
            return (
                b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, "response": begun, **told}) + END
            )
        case _:
            return b""
    return b"data: " + orjson.dumps(told) + END


def is_comment(chunk: bytes) -> bool:
    """Whether a piece of a stream holds comments alone: they only say that the sender lives."""
    return chunk.startswith(b":") and all(line.startswith(b":") for line in chunk.splitlines() if line)


class EventReader:
    """Bytes to the data of whole events, at any chunk edge."""

    def __init__(self) -> None:
        self._rest = b""
        self._return = b""  # a carriage return whose line feed may be yet to come

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is complete now; comments and other fields are skipped."""
        data = self._return + chunk
        self._return = b"\r" if data.endswith(b"\r") else b""
        text = data.removesuffix(b"\r").replace(b"\r\n", b"\n")
        *events, self._rest = (self._rest + text).split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
