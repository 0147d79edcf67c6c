"""An answer's own figures: read from the bytes that go by, at any chunk edge, and made those of the whole request.

Pure: bytes in, bytes out. Nothing of an answer is kept but its figures.
"""

import re
from collections.abc import Callable
from typing import Any

import orjson

from splitproxy.model import Figures, HandoverFigures

# A figures object longer than this is none; it is let through as it is.
_LONGEST_OBJECT_BYTES = 64 * 1024
_REASONING_MARKS = (b'"reasoning_content":"', b'"thinking_delta"', b'"type":"thinking"', b'"reasoning_text')
_KEYS = ("timings", "usage", "error", "prompt_progress")
_KEY = re.compile(f'"(?:{"|".join(_KEYS)})"'.encode())
_KEY_OR_REASONING = re.compile(b"|".join((_KEY.pattern, *_REASONING_MARKS)))
_OBJECT_START = re.compile(f'"({"|".join(_KEYS)})"\\s*:\\s*(?=\\{{)'.encode())
# A string that has no end yet reaches to the end: a brace inside it is none.
_JSON_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{}]', re.DOTALL)


def _cut_key(name: str) -> str:
    """A pattern for every beginning of a JSON key and the colon after it."""
    pattern = r"\s*(?::\s*)?"
    for character in reversed(f'"{name}"'):
        pattern = f"(?:{character}{pattern})?"
    return pattern


# A quote inside a JSON string is escaped, so `"timings"` with plain quotes is always a key. The end of a chunk that may
# be the beginning of such a key is held back until the next chunk; a whole event never ends in one.
_CUT_START = re.compile(f'(?=")(?:{"|".join(map(_cut_key, _KEYS))})$'.encode())
_LONGEST_CUT_BYTES = 32


Rewrite = Callable[[str, dict[str, Any]], bytes]


class FigureReader:
    """Watches an answer go by, reads its `timings` and `usage`, and rewrites them where asked to.

    `rewrite(key, object)` returns the JSON text that takes the object's place. Everything else leaves as it came and at
    once; only a figures object that is not complete yet waits for its end. An answer that is one JSON text (`whole`)
    waits as a whole, and only figures of its outermost object count: in an event every other object is text inside a
    string, but a call's arguments in such an answer may hold any key.
    """

    def __init__(self, rewrite: Rewrite | None = None, *, whole: bool = False) -> None:
        self._rewrite = rewrite
        self._whole = whole
        self._held = b""  # it may belong to a figures object
        self._seam = b""  # the end of the piece before, where that was no whole event
        self._pieces: list[bytes] = []  # of an answer that waits as a whole
        self._telling = _KEY_OR_REASONING  # what a piece must hold to be looked at
        self.reasoned = False  # whether the answer holds reasoning apart from its text
        self.failed = False  # whether the answer is an error, or ends in one
        self.timings: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}

    def feed(self, chunk: bytes) -> bytes:
        """Take the next piece of the answer; return what may go on now."""
        if self._whole:
            self._pieces.append(chunk)
            return b""
        if not self._seam and chunk.endswith(b"\n\n") and not self._telling.search(chunk):
            return chunk  # nearly every event of a stream
        seen = self._seam + chunk
        self._notice_reasoning(seen)
        self._seam = b"" if seen.endswith(b"\n\n") else seen[-_LONGEST_CUT_BYTES:]
        data = self._held + chunk
        out: list[bytes] = []
        place = 0
        while start := _OBJECT_START.search(data, place):
            end = _object_end(data, start.end())
            if end is None:
                if len(data) - start.start() <= _LONGEST_OBJECT_BYTES:
                    out.append(data[place : start.start()])
                    self._held = data[start.start() :]
                    return b"".join(out)
                end = start.end()
            out.append(data[place : start.end()])
            out.append(self._replace(start.group(1).decode(), data[start.end() : end]))
            place = end
        cut = _CUT_START.search(data, max(place, len(data) - _LONGEST_CUT_BYTES))
        safe = cut.start() if cut else len(data)
        out.append(data[place:safe])
        self._held = data[safe:]
        return b"".join(out)

    def close(self) -> bytes:
        """The answer has ended: return what was held back."""
        held, self._held = self._held + b"".join(self._pieces), b""
        self._pieces.clear()
        return self._read_whole(held) if self._whole else held

    def _read_whole(self, data: bytes) -> bytes:
        self._notice_reasoning(data)
        out: list[bytes] = []
        place = 0
        for start in _OBJECT_START.finditer(data):
            if start.start() < place or _depth(data, start.start()) != 1:
                continue
            if (end := _object_end(data, start.end())) is not None:
                out += (data[place : start.end()], self._replace(start.group(1).decode(), data[start.end() : end]))
                place = end
        return b"".join([*out, data[place:]])

    def _notice_reasoning(self, data: bytes) -> None:
        if not self.reasoned and any(mark in data for mark in _REASONING_MARKS):
            self.reasoned, self._telling = True, _KEY

    def _replace(self, key: str, text: bytes) -> bytes:
        if key == "error":
            self.failed = True
            return text
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        if key == "prompt_progress":
            return self._rewrite(key, found) if self._rewrite else text
        if not _are_figures(key, found):
            return text
        known = self.timings if key == "timings" else self.usage
        known.update(found)  # Anthropic spreads its figures over two events
        return self._rewrite(key, found) if self._rewrite else text

    def figures(self) -> Figures | None:
        """The engine's own figures of the answer, as far as it gave them."""
        return _from_timings(self.timings) or _from_usage(self.usage)


def _depth(data: bytes, place: int) -> int:
    """How many objects are open at a place."""
    braces = [match.group() for match in _JSON_STRUCTURE.finditer(data, 0, place)]
    return braces.count(b"{") - braces.count(b"}")


def _object_end(data: bytes, start: int) -> int | None:
    depth = 0
    for match in _JSON_STRUCTURE.finditer(data, start):
        if match.group() == b"{":
            depth += 1
        elif match.group() == b"}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def _are_figures(key: str, found: dict[str, Any]) -> bool:
    names = ("prompt_n",) if key == "timings" else ("prompt_tokens", "input_tokens", "output_tokens")
    return any(type(found.get(name)) is int for name in names)


def _from_timings(timings: dict[str, Any]) -> Figures | None:
    if not timings:
        return None
    return Figures(
        cached_tokens=_whole(timings, "cache_n"),
        read_tokens=_whole(timings, "prompt_n"),
        prompt_ms=_real(timings, "prompt_ms"),
        answer_tokens=_whole(timings, "predicted_n"),
        answer_ms=_real(timings, "predicted_ms"),
    )


def _from_usage(usage: dict[str, Any]) -> Figures | None:
    if not usage:
        return None
    if "cache_read_input_tokens" in usage:  # Anthropic: input_tokens are the uncached ones alone
        cached, read = _whole(usage, "cache_read_input_tokens"), _whole(usage, "input_tokens")
    else:
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached = _whole(details, "cached_tokens") if isinstance(details, dict) else 0
        read = max(0, _whole(usage, "prompt_tokens") + _whole(usage, "input_tokens") - cached)
    answer = _whole(usage, "completion_tokens") + _whole(usage, "output_tokens")
    return Figures(cached, read, 0.0, answer, 0.0)


def _whole(values: dict[str, Any], name: str) -> int:
    value = values.get(name)
    return value if type(value) is int else 0


def _real(values: dict[str, Any], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def whole_request(cost: HandoverFigures) -> Rewrite:
    """A rewrite that makes the decode engine's figures those of both engines, and adds what the handover cost.

    Tokens that both engines read count once: a prompt of n tokens never takes more than n to read.
    """
    split = b',"split":' + orjson.dumps(
        {
            "prefill_ms": cost.prefill_ms,
            "save_ms": cost.save_ms,
            "restore_ms": cost.restore_ms,
            "bytes": cost.session_bytes,
        }
    )

    def cached(prompt_tokens: int, cached_tokens: int) -> int:
        read = cost.prefill_read_tokens + prompt_tokens - cached_tokens
        return max(prompt_tokens - read, 0)

    def rewrite(key: str, found: dict[str, Any]) -> bytes:
        if key == "timings":
            prompt_tokens = _whole(found, "cache_n") + _whole(found, "prompt_n")
            reused = cached(prompt_tokens, _whole(found, "cache_n"))
            return orjson.dumps(_timings(found, cost, prompt_tokens, reused)) + split
        if key == "prompt_progress":
            return orjson.dumps(_progress(found, cost))
        if "cache_read_input_tokens" in found:  # Anthropic
            prompt_tokens = _whole(found, "cache_read_input_tokens") + _whole(found, "input_tokens")
            reused = cached(prompt_tokens, _whole(found, "cache_read_input_tokens"))
            counts = {"cache_read_input_tokens": reused, "input_tokens": prompt_tokens - reused}
            return orjson.dumps({**found, **counts}) + split
        for total, name, beside in _DETAILS:
            if isinstance(details := found.get(name), dict):
                reused = cached(_whole(found, total), _whole(details, "cached_tokens"))
                return orjson.dumps({**found, name: {**details, "cached_tokens": reused}}) + (split if beside else b"")
        return orjson.dumps(found)

    return rewrite


# The prompt's tokens, its details, and whether the costs go beside them: elsewhere they are beside `timings`.
_DETAILS = (("prompt_tokens", "prompt_tokens_details", False), ("input_tokens", "input_tokens_details", True))


def _progress(found: dict[str, Any], cost: HandoverFigures) -> dict[str, Any]:
    """Progress of the decode engine goes on where that of the prefill engine ended."""
    read = cost.prefill_read_tokens + cost.prefill_cached_tokens
    return {
        **found,
        "cache": min(cost.prefill_cached_tokens, _whole(found, "cache")),
        "processed": max(read, _whole(found, "processed")),
        "time_ms": round(cost.prefill_ms + cost.save_ms + cost.restore_ms + _real(found, "time_ms")),
    }


def _timings(found: dict[str, Any], cost: HandoverFigures, prompt_tokens: int, reused: int) -> dict[str, Any]:
    read = prompt_tokens - reused
    prompt_ms = cost.prefill_ms + cost.save_ms + cost.restore_ms + _real(found, "prompt_ms")
    return {
        **found,
        "cache_n": reused,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(read, 1),
        "prompt_per_second": 1000 * read / prompt_ms if prompt_ms else 0.0,
    }
