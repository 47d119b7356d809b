"""Five minutes of the campaign from outside; `python tests/campaigns/campaign.py` plays longer ones, and single episodes again."""

from __future__ import annotations

import time

import pytest
from campaign import campaign


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_bad_day_ends_with_the_same_model_or_a_clear_refusal() -> None:
    """Another seed each day, told by the failure: what a fixed one finds is found once."""
    seed = int(time.time()) // 86400
    result = campaign(seed, 5)
    assert result.episodes
    assert not result.violations, (seed, result.violations)
