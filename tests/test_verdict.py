"""Why a handover was in vain, as a table."""

import pytest

from splitproxy.decide.verdict import Circumstances, likely_cause
from splitproxy.model import Figures, InVain


@pytest.mark.parametrize(
    ("cached", "read", "proven", "others", "cause"),
    [
        (0, 1001, 512, False, InVain.TEMPLATE_DRIFT),
        (400, 600, 512, False, InVain.TEMPLATE_DRIFT),
        (0, 1000, 900, True, InVain.CLEARED_SLOTS),
        (20, 980, 900, True, InVain.CLEARED_SLOTS),
        (0, 1000, 400, False, InVain.NO_CHECKPOINTS),
        (0, 1000, 600, False, InVain.OTHER_TRAFFIC),
    ],
)
def test_the_likely_cause(cached: int, read: int, proven: int, others: bool, cause: InVain) -> None:
    """What was read, what was ever reused, and who else was there tell the causes apart."""
    seen = Circumstances(1000, Figures(cached, read, 1.0, 1, 1.0), proven, others)
    assert likely_cause(seen) is cause
