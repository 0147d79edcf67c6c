"""From merges to ranks.

A model's merges name pairs; tiktoken merges any two neighbours whose joined bytes have a rank, the lowest rank first.
The two agree when each token, cut as far as the merges before it go, falls into exactly the two sides of one of its
merges: the bytes inside a token are merged alike whatever stands around it, as long as no merge crosses its edge. So
each token is tried once, in order; those that no merge reaches get no rank, and a list that cannot be expressed is
refused.
"""

from collections.abc import Sequence

from splitproxy.vocab.vocabulary import UnsupportedVocabulary


def ranked(merges: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int]:
    """Every token that merging reaches, single bytes included, with its rank: the lower is merged first.

    Raises UnsupportedVocabulary where ranks could not stand for the merges.
    """
    ranks = {bytes([byte]): byte for byte in range(256)}
    later: set[bytes] = set()  # the results of merges that never happen, as far as is known
    for rank, (left, right) in enumerate(merges, 256):
        joined = left + right
        if joined in ranks:
            continue  # made by an earlier merge: its bytes never fall into these two sides any more
        if left in ranks and right in ranks and parts(joined, ranks) == [left, right]:
            if joined in later:
                raise UnsupportedVocabulary("its merges are not in order")
            ranks[joined] = rank
        later.update(side for side in (left, right) if side not in ranks)
    return ranks


def parts(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What a word's bytes are merged into by the ranks so far."""
    parts = [word[place : place + 1] for place in range(len(word))]
    get = ranks.get
    while len(parts) > 1:
        best, found = -1, 1 << 62
        previous = parts[0]
        for place in range(1, len(parts)):
            part = parts[place]
            rank = get(previous + part)
            if rank is not None and rank < found:
                best, found = place, rank
            previous = part
        if best < 0:
            break
        parts[best - 1 : best + 1] = [parts[best - 1] + parts[best]]
    return parts
