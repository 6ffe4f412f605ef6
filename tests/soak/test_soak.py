"""One job of the soak: the rank that is killed is named, and nothing is left."""

import pytest

from tests.rig.conftest import Rig, _rig, rig  # noqa: F401
from tests.soak.__main__ import play
from tests.soak.drawing import draw

pytestmark = pytest.mark.long


def test_a_job_of_the_soak_with_a_killed_rank_goes_well(rig, tmp_path):  # noqa: F811
    judgement, _ = play(rig, draw(1, 1, "SIGKILL"), tmp_path)
    assert judgement.wrong == []
    assert judgement.named
