"""One engine of the fleet, and what is known of it."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

from splitproxy.engines.adapter import Engine, PrefillEngine
from splitproxy.fleet.watch import SlotWatch
from splitproxy.model import EngineState, Identity, Role


@dataclass(slots=True)
class Member:
    """One engine and what is known of it."""

    engine: PrefillEngine  # for a decode engine an Engine
    role: Role
    state: EngineState = EngineState.DOWN
    identity: Identity | None = None
    fault: str = "not seen yet"
    template_bytes: int = 0  # what the chat template adds to one message
    backlog_tokens: int = 0  # of prompts that a prefill engine is reading or has yet to read
    looks: int = 0
    failures: int = 0  # in a row
    stuck: int = 0  # slots that are still at work long after their requests were cut off
    doubted: bool = False  # something went wrong since it was identified: it may be another one by now
    identified: float = 0.0  # when, on the loop's clock
    epoch: int = 0  # counts how often it was welcomed: what was learned in an older one may be wrong
    lacks: set[str] = field(default_factory=set)  # paths that it does not serve: nobody needs a slot to be told so
    nudge: asyncio.Event = field(default_factory=asyncio.Event)
    watch: SlotWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = SlotWatch(self.engine, apart=self.role is Role.DECODE)

    @property
    def writer(self) -> Engine:
        """The engine as one that answers requests: every decode engine is one."""
        assert self.role is Role.DECODE
        return cast("Engine", self.engine)
