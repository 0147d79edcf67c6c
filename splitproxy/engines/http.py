"""What adapters of HTTP servers share: one client session, control calls, slot actions, session files, and answers
as they arrive.

An adapter of one kind of server builds on `HttpEngine` and knows that server's paths and fields; nothing here does.
Control calls are aiohttp's, clients' calls go through `answers`. Every connection is fresh: servers close idle and
just-streamed ones unannounced.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import orjson
from yarl import URL

from splitproxy.books.sessions import SessionStore
from splitproxy.engines.adapter import Answer, Call, Deadlines
from splitproxy.engines.answers import CONNECT_TIMEOUT_S, AnswerClient
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import Figures, Redeemed, Ticket

CONTROL_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 2.0  # servers answer this while they compute, load, or wait for their own work


class SavedHead(Protocol):
    """What any kind of session file tells by its head."""

    @property
    def size_bytes(self) -> int: ...


H = TypeVar("H", bound=SavedHead)


class HttpEngine:
    """One HTTP server at `url`, whose session files are in `store`. Must be closed."""

    def __init__(self, name: str, url: str, api_key: str, store: SessionStore) -> None:
        self.name = name
        self._store = store
        self._url = url
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._calls: set[asyncio.Timeout] = set()
        self._answers = AnswerClient(url, tuple(self._key.items()))
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.close()

    def abort(self) -> None:
        """End all work that is under way: the engine is given up."""
        now = asyncio.get_running_loop().time()
        for timeout in self._calls:
            if not timeout.expired():
                timeout.reschedule(now)

    async def slot_action(
        self, step: Step, slot: int, action: str, name: str | None, deadlines: Deadlines
    ) -> dict[str, Any]:
        body = orjson.dumps({"filename": name} if name is not None else {})
        target = f"/slots/{slot}?action={action}"
        with translated(step):
            async with self.abortable():
                timeout_s = deadlines.transfer_timeout_s
                answer: dict[str, Any] = await self.json(step, "POST", target, body, timeout_s=timeout_s)
        return answer

    async def saved_file(self, name: str, saved: Mapping[str, Any], read_head: Callable[[Path], H]) -> H:
        """The head of a file that the engine says to have `saved`, read by `read_head`. Raises EngineError where it is
        not there, cannot be read, or has another size."""
        try:
            head = await self._store.read(name, read_head)
        except FileNotFoundError:
            message = (
                f"the saved file is not in {self._store.folder}: split.dir and the engine's --slot-save-path must be "
                "the same folder"
            )
            raise EngineError(Step.CHECK, Cause.CORRUPT, message) from None
        except (OSError, ValueError) as error:
            raise EngineError(Step.CHECK, Cause.CORRUPT, f"the session file is unusable: {error}") from None
        if head.size_bytes != saved.get("n_written"):
            message = f"the session file has {head.size_bytes} bytes, but {saved.get('n_written')} were written"
            raise EngineError(Step.CHECK, Cause.CORRUPT, message)
        return head

    async def discard(self, ticket: Ticket) -> None:
        await self._store.remove(ticket.handle)

    def advice(self, error: EngineError) -> list[str] | None:
        """What to change when a server of any kind failed this way; None where it depends on the kind."""
        if error.cause is Cause.DIED:
            return ["Is the engine running at this address? Its log tells why it ended."]
        if error.cause is Cause.TIMEOUT:
            return ["The engine is too slow for the deadline, or hangs: see its log."]
        if error.status in (401, 403):
            return ["The engine wants an API key: name the variable that holds it in api_key_env."]
        return None

    # -- answers -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def call(self, call: Call, deadlines: Deadlines) -> AsyncGenerator[Answer]:
        silence_s = deadlines.decode_silence_s if call.streams else None
        with translated(Step.DECODE):
            async with self.abortable(), self._answers.call(call, silence_s) as answer:
                yield answer

    @asynccontextmanager
    async def abortable(self) -> AsyncGenerator[None]:
        """A stretch of work that `abort` can end."""
        async with asyncio.timeout(None) as timeout:
            self._calls.add(timeout)
            try:
                yield
            finally:
                self._calls.discard(timeout)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        timeout_s: float | None = None,
        silence_s: float | None = None,
    ) -> Any:
        json_type = {"Content-Type": "application/json"} if body is not None else {}
        return self._http.request(
            method,
            URL(self._url + target, encoded=True),
            data=body,
            headers=json_type | self._key,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s),
        )

    async def json(
        self,
        step: Step,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        private: bool = False,
        shape: type[dict[Any, Any] | list[Any]] = dict,
    ) -> Any:
        """One control call. `private` keeps the engine's error text out of ours: it may quote the request."""
        with translated(step):
            async with self.request(method, target, body, timeout_s=timeout_s) as response:
                await require_ok(step, response, private=private)
                text = await response.read()
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, shape):
            wanted = "object" if shape is dict else "list"
            raise EngineError(step, Cause.REFUSED, f"{target.partition('?')[0]} gave no JSON {wanted}")
        return found


@contextmanager
def translated(step: Step) -> Iterator[None]:
    """Turn the HTTP client's errors into ours."""
    try:
        yield
    except TimeoutError:
        raise EngineError(step, Cause.TIMEOUT, "the engine did not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise EngineError(step, Cause.DIED, f"the connection to the engine failed: {reason}") from None


@contextmanager
def well_formed(step: Step, source: str) -> Iterator[None]:
    """Turn what fails on JSON of another shape than expected into an engine's error."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise EngineError(step, Cause.CORRUPT, f"{source} answered in an unknown shape") from None


async def require_ok(step: Step, response: aiohttp.ClientResponse, *, private: bool = False) -> None:
    if response.status == 200:
        return
    message = f"the engine answered {response.status}"
    if not private:
        message += f": {error_message(await response.read())}"
    raise EngineError(step, Cause.REFUSED, message, status=response.status)


def error_message(text: bytes) -> str:
    try:
        error = orjson.loads(text)["error"]
        kind = f"{error['kind']}: " if "kind" in error else ""
        return f"{kind}{error['message']}"[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "without a reason"


def figures(timings: dict[str, Any]) -> Figures:
    return Figures(
        cached_tokens=int(timings.get("cache_n", 0)),
        read_tokens=int(timings.get("prompt_n", 0)),
        prompt_ms=float(timings.get("prompt_ms", 0.0)),
        answer_tokens=int(timings.get("predicted_n", 0)),
        answer_ms=float(timings.get("predicted_ms", 0.0)),
    )


def redeemed(answer: dict[str, Any]) -> Redeemed:
    restored = answer.get("n_restored")
    return Redeemed(restored if type(restored) is int else 0, timing(answer, "restore_ms"))


def timing(answer: dict[str, Any], name: str) -> float:
    with well_formed(Step.CONTROL, "a slot action"):
        return float((answer.get("timings") or {}).get(name, 0.0))
