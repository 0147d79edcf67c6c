"""The token ids of an answer, read from the bytes that go by, where the API gives them: llama-server's native one.

Pure: bytes in, ids out. They tell exactly what the slot holds afterwards.
"""

import re

from splitproxy.model import Tokens

# A quote inside a JSON string is escaped, so `"tokens"` with plain quotes is always a key.
_LIST = re.compile(rb'"tokens"\s*:\s*\[([0-9,\s]*)\]')
_CUT = re.compile(rb'"tokens"\s*:\s*\[[0-9,\s]*$|"[tokens]{0,6}"?\s*:?\s*$')
_LONGEST_CUT_BYTES = 2**20


class IdReader:
    """Watches a native answer go by and collects its ids."""

    def __init__(self) -> None:
        self._rest = b""
        self._ids: list[int] = []

    def feed(self, chunk: bytes) -> None:
        """Take the next piece of the answer, cut anywhere."""
        data = self._rest + chunk
        place = 0
        for match in _LIST.finditer(data):
            self._ids += [int(word) for word in match[1].split(b",") if word.strip()]
            place = match.end()
        cut = _CUT.search(data, place)
        self._rest = data[cut.start() :] if cut and len(data) - cut.start() < _LONGEST_CUT_BYTES else b""

    def ids(self, count: int) -> Tokens | None:
        """The ids, if the answer gave all `count` of them."""
        return Tokens(self._ids) if self._ids and len(self._ids) == count else None
