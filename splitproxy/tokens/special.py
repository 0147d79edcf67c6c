"""Finding special tokens in a text, in the engines' order: the longest token first, everywhere in the text."""

import re
from collections.abc import Iterable, Iterator, Mapping


class Cutter:
    """Cuts texts at special tokens (text -> id)."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._ids = {text: token for text, token in special.items() if text}
        self._longest_first = sorted(self._ids, key=lambda text: len(text.encode()), reverse=True)
        self._entangled = _entangled(self._ids)
        self._expression = re.compile(f"({_trie_expression(self._ids)})") if self._ids else None

    def cut(self, text: str) -> Iterator[str | int]:
        """The pieces of a text: ids of special tokens, and the non-empty texts between them."""
        if self._expression is None:
            return iter([text] if text else [])
        if self._entangled:
            return self._one_by_one(text)
        parts = self._expression.split(text)
        ids = self._ids
        return (ids[part] if place % 2 else part for place, part in enumerate(parts) if part)

    def _one_by_one(self, text: str) -> Iterator[str | int]:
        """Where one token may begin inside another, a longer one on the right wins: token after token is looked for."""
        pieces: list[str | int] = [text]
        for token in self._longest_first:
            if token in text:
                pieces = [part for piece in pieces for part in self._cut_at(token, piece)]
        return (piece for piece in pieces if piece != "")

    def _cut_at(self, token: str, piece: str | int) -> Iterable[str | int]:
        if isinstance(piece, int):
            return (piece,)
        parts = piece.split(token)
        pieces: list[str | int] = [parts[0]]
        for part in parts[1:]:
            pieces += (self._ids[token], part)
        return pieces


def _entangled(texts: Iterable[str]) -> bool:
    """Whether the end of one text is the beginning of another, so that matches could overlap."""
    texts = list(texts)
    beginnings = {text[:end] for text in texts for end in range(1, len(text))}
    return any(text[start:] in beginnings for text in texts for start in range(1, len(text)))


def _trie_expression(texts: Iterable[str]) -> str:
    """An expression that finds the longest of the texts at each place. Shared beginnings are written once: that is what
    lets the search skip quickly."""
    trie: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _expression(trie)


def _expression(trie: dict[str, dict]) -> str:  # type: ignore[type-arg]
    literal = ""
    while len(trie) == 1 and "" not in trie:
        (character, trie) = next(iter(trie.items()))
        literal += re.escape(character)
    branches = [re.escape(character) + _expression(below) for character, below in trie.items() if character]
    if not branches:
        return literal
    optional = "?" if "" in trie else ""
    return f"{literal}(?:{'|'.join(branches)}){optional}"
