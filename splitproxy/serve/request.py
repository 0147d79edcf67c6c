"""One generating request: what was asked, what is known of its prompt, its decisions, and its turns for slots.

What becomes of it is told by `course`, with its two halves: `reading` for the prefill engine's part and `answering` for
the decode engine's.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from splitproxy.api.client import Client
from splitproxy.books.admission import Turn
from splitproxy.books.beliefs import falls_short, is_another
from splitproxy.books.ledger import NOTHING, Lease
from splitproxy.model import Ask, Role, Route, Tokens
from splitproxy.serve.handover import Stage
from splitproxy.serve.service import Incoming, Service
from splitproxy.serve.trace import Trace
from splitproxy.tokens.tokenize import surely_shorter

BYTES_PER_TOKEN_GUESS = 2  # of a body that could not be tokenized, for the pool's books


@dataclass(slots=True)
class Request:
    """One generating request on its way."""

    service: Service
    incoming: Incoming
    ask: Ask
    client: Client
    trace: Trace
    turn: Turn
    tokens: Tokens | None = None  # None: not known
    reroutes: int = 0
    tried: set[str] = field(default_factory=set)  # decode engines that failed this request before its first byte
    failed_readers: set[str] = field(default_factory=set)  # prefill engines that failed it

    # -- the prompt ----------------------------------------------------------------------------------------------------

    @property
    def known(self) -> Tokens:
        """The prompt's ids as far as they are known."""
        return self.tokens if self.tokens is not None else NOTHING

    @property
    def prefix(self) -> Tokens:
        """What a prefill engine reads: all but the last token."""
        return self.known.head(len(self.known) - 1)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has, or an estimate."""
        if self.tokens is not None:
            return len(self.tokens)
        if self.is_short:  # a token is a byte at least
            return len(self.ask.body) + self.service.fleet.template_bytes
        return len(self.ask.body) // BYTES_PER_TOKEN_GUESS

    @property
    def is_short(self) -> bool:
        """Whether the prompt is surely short, though nobody has counted it."""
        least, template = self.service.settings.rules.least, self.service.fleet.template_bytes
        return self.ask.not_splittable is None and surely_shorter(self.ask, least, template)

    @property
    def is_bounded(self) -> bool:
        """Whether the answer surely needs no more cells than are reserved for it."""
        return self.ask.max_tokens is not None and (self.tokens is not None or self.is_short)

    @property
    def carries(self) -> bool:
        """Whether the request has a session that waits to be restored."""
        return self.trace.handover is not None and self.trace.handover.stage is Stage.TICKETED

    # -- decisions and slots -------------------------------------------------------------------------------------------

    async def route(self) -> Route:
        """What is decided now. Raises RequestError where no decode engine is ready."""
        route, self.tokens = await self.service.route(self.ask, self.tokens, self.trace, self.failed_readers)
        return route

    async def lease(self, role: Role, engine: str, claim: Callable[[str], Lease | None], *, bound: bool) -> Lease:
        """Wait for a slot in this request's turn; `bound`: of this engine, where another would do as well otherwise.
        Raises RequestError."""
        acquire, deadline = self.service.admission.acquire, self.service.queue_deadline(self.trace.queue_s)
        avoid = self._unfit if role is Role.DECODE else tuple[str]
        with self.trace.waiting():
            return await acquire(role, engine, claim, deadline, turn=self.turn, bound=bound, avoid=avoid)

    def _unfit(self) -> Collection[str]:
        """The decode engines that failed this request, and while a session waits, those that have yet to prove that
        they can take it, unless all have."""
        if not self.carries or (handover := self.trace.handover) is None:
            return self.tried
        left = set(self.service.ledger.ready(Role.DECODE)) - self.tried
        unproven = {name for name in left if not self.service.fleet.can_redeem(handover.source.name, name)}
        return self.tried if unproven == left else self.tried | unproven

    def compare(self, lease: Lease, cached_tokens: int, prompt_tokens: int, counted_tokens: int) -> None:
        """Compare what was believed of a slot with what its engine reused of a prompt, in which it counted so many."""
        believed = min(lease.held, prompt_tokens)
        if falls_short(believed * counted_tokens / max(prompt_tokens, 1), cached_tokens):
            self.trace.mistaken = True
        # A prompt that leaves a conversation in its middle proves nothing: some kinds of memory keep only the end.
        if lease.continues and is_another(believed, cached_tokens):
            self.service.fleet.health.distrust(lease.engine)
