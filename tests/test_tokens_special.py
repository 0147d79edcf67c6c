"""Special tokens in texts: the longest first, everywhere, before anything else is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitproxy.tokens.special import Cutter


def one_by_one(text: str, special: dict[str, int]) -> list[str | int]:
    """The engines' way: token after token, the longest first, each at its first place in every piece."""
    pieces: list[str | int] = [text]
    for token in sorted(special, key=len, reverse=True):
        done: list[str | int] = []
        for piece in pieces:
            while isinstance(piece, str) and (place := piece.find(token)) >= 0:
                done += [piece[:place], special[token]]
                piece = piece[place + len(token) :]
            done.append(piece)
        pieces = [piece for piece in done if piece != ""]
    return [piece for piece in pieces if piece != ""]


@settings(max_examples=500, deadline=None)
@given(st.sets(st.text("ab<|>", min_size=1, max_size=4), max_size=5), st.text("ab<|>", max_size=20))
def test_any_tokens_are_found_in_the_engines_order(names: set[str], text: str) -> None:
    """Tokens inside others, at the end of others, next to themselves: pieces are those of looking one by one."""
    # Of equally long tokens that overlap, the order is not defined anywhere.
    special = {name: token for token, name in enumerate({len(name): name for name in sorted(names)}.values())}
    assert list(Cutter(special).cut(text)) == one_by_one(text, special)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("plain", ["plain"]),
        ("<|a|>", [1]),
        ("x<|a|>y<|ab|>", ["x", 1, "y", 2]),
        ("<|a|><|a|>", [1, 1]),
        ("<|a|", ["<|a|"]),
        ("<think>[INST]", [3, 4]),
    ],
)
def test_pieces(text: str, pieces: list[str | int]) -> None:
    """Marks inside a text and at both ends; what only begins like one is text."""
    special = {"<|a|>": 1, "<|ab|>": 2, "<think>": 3, "[INST]": 4}
    assert list(Cutter(special).cut(text)) == pieces


def test_without_special_tokens_a_text_is_one_piece() -> None:
    """A vocabulary may have none."""
    assert list(Cutter({}).cut("<|a|>")) == ["<|a|>"]
    assert list(Cutter({"": 7}).cut("a")) == ["a"]
