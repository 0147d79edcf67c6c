"""Prompt text to token ids, behind one interface.

Ids only steer: the engine always reads the client's own body, so wrong ids cost time, never text.
"""

from typing import Protocol

from splitproxy.adapter import Engine
from splitproxy.model import Api, Ask, Tokens


class Tokenizer(Protocol):
    """Turns what a client asks into the token ids that an engine will read."""

    async def tokens(self, ask: Ask, engine: Engine) -> Tokens:
        """The prompt's ids. `engine` is a ready decode engine. Raises EngineError where it had to be asked in vain."""
        ...


class EngineTokenizer:
    """Asks the engine for everything: it renders chat messages with its template and tokenizes the text."""

    async def tokens(self, ask: Ask, engine: Engine) -> Tokens:
        if isinstance(ask.prompt, tuple):
            return Tokens(ask.prompt)
        text = await engine.render(ask.body) if ask.api is Api.CHAT else ask.prompt
        if text is None:
            raise ValueError("a request without a text prompt has no tokens")
        return await engine.tokenize(text)


def surely_shorter(ask: Ask, limit_tokens: int, template_bytes: int) -> bool:
    """Whether a prompt cannot reach `limit_tokens` even at one token a byte of its rendered text.

    `template_bytes` is what the chat template adds by itself. JSON spends more on a message's frame than templates do,
    so the body stands for the rest.
    """
    if isinstance(ask.prompt, tuple):
        return len(ask.prompt) < limit_tokens
    return len(ask.body) + template_bytes < limit_tokens
