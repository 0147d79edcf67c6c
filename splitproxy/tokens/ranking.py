"""From merges to ranks.

A model's merges name pairs; tiktoken merges any two neighbours whose joined bytes have a rank, the lowest rank first.
The two agree when each word that has a rank, cut as far as all the other merges go, falls into exactly the two sides of
the merge that the rank stands for. For the bytes inside a word are merged alike whatever stands around it, as long as
no merge crosses its edge: a word comes about from one pair alone, and other merges that spell it never happen.
"""

import heapq
from collections.abc import Sequence


def ranked(merges: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int]:
    """Every word that merging reaches, single bytes included, with its rank: the lower is merged first."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    waiting: dict[bytes, list[tuple[int, bytes, bytes]]] = {}  # merges by a side that has not come about so far
    for rank, (left, right) in enumerate(merges, 256):
        # A merge can wait for a later one to make its side. Shorter words come first: longer ones may hold them.
        due = [(len(left) + len(right), rank, left, right)]
        while due:
            _, rank, left, right = heapq.heappop(due)
            joined = left + right
            missing = left if left not in ranks else right if right not in ranks else None
            if joined in ranks:
                continue
            if missing is not None:
                waiting.setdefault(missing, []).append((rank, left, right))
            elif parts(joined, ranks) == [left, right]:
                ranks[joined] = rank
                for entry in waiting.pop(joined, ()):
                    heapq.heappush(due, (len(entry[1]) + len(entry[2]), *entry))
    return ranks


def parts(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What a word's bytes are merged into by the ranks of others; the word's own rank must not be among them."""
    pieces = [word[place : place + 1] for place in range(len(word))]
    get = ranks.get
    while len(pieces) > 1:
        best, lowest = 0, 1 << 62
        previous = pieces[0]
        for place in range(1, len(pieces)):
            piece = pieces[place]
            rank = get(previous + piece)
            if rank is not None and rank < lowest:
                best, lowest = place, rank
            previous = piece
        if not best:
            break
        pieces[best - 1 : best + 1] = [pieces[best - 1] + pieces[best]]
    return pieces
