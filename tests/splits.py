"""Bytes cut anywhere, as a network does it."""

from itertools import pairwise

from hypothesis import strategies as st


def cuts(most: int = 12) -> st.SearchStrategy[list[int]]:
    """Places to cut at, for `cut`."""
    return st.lists(st.integers(min_value=0, max_value=400), max_size=most)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The pieces of some bytes; empty ones are among them."""
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]
