"""Who comes while an engine is busy: what followed earlier requests says what will follow the next one."""

from bisect import bisect_left

REMEMBERED, LEAST = 32, 4  # at most the latest so many requests count; fewer tell nothing
LEAST_SPAN_S = 10.0  # over which they are spread at least: a few that come together are no rate


class Arrivals:
    """When the latest requests came to one engine.

    Their rate alone would not do: somebody who asks, reads and asks again has a rate, and never two requests at once.
    """

    def __init__(self) -> None:
        self._at: list[float] = []

    def note(self, now: float) -> None:
        self._at.append(now)
        del self._at[:-REMEMBERED]

    def waiting_s(self, busy_s: float, now: float) -> float:
        """Seconds that requests will wait, taken together, which come while the engine is busy for `busy_s`.

        The mean, over the remembered requests, of what would have been waited had the engine been busy so long from
        each of them on. What has not been seen yet of that time counts at the rate at which requests come.
        """
        at = self._at
        if len(at) < LEAST:
            return 0.0
        per_s = len(at) / max(now - at[0], LEAST_SPAN_S)
        waited_s = 0.0
        for follower, began in enumerate(at, 1):
            end = began + busy_s
            if follower < len(at) and at[follower] < end:
                followers = at[follower : bisect_left(at, end, follower)]
                waited_s += len(followers) * end - sum(followers)
            if end > now:
                waited_s += per_s * (end - now) ** 2 / 2
        return waited_s / len(at)
