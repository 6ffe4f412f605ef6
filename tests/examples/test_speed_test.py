"""examples/speed_test.py: its verdict follows from the times, which are not asserted themselves."""

import doctest
import re

import pytest

from examples import speed_verdict
from examples.speed_verdict import Time, Times, reasons, verdict

FEW = ["--rounds", "2", "--steps", "1"]
# Four ranks, ideal: 10 ms, of which 2 are data.
ALONE = Time(0.040, 0.008)
PART = UNSENT = DISTRIBUTED = Time(0.010, 0.002)
LIMITED = {
    "batch size": Times(ALONE, Time(0.016, 0.002), Time(0.016, 0.002), Time(0.016, 0.002)),
    "cores": Times(ALONE, PART, Time(0.016, 0.002), Time(0.016, 0.002)),
    "data": Times(ALONE, PART, UNSENT, Time(0.016, 0.008)),
    "communication": Times(ALONE, PART, UNSENT, Time(0.016, 0.002)),
}


def test_the_docstring_shows_a_verdict():
    assert doctest.testmod(speed_verdict).failed == 0


@pytest.mark.parametrize("reason", LIMITED)
def test_the_verdict_names_what_limits(reason):
    assert verdict(4, LIMITED[reason]) == (
        "Verdict: speed-up 2.50 on 4 ranks (efficiency 62 %); "
        f"limited by {reason}: 6.00 of 16.00 ms"
    )


def test_from_90_percent_on_nothing_limits():
    times = Times(ALONE, PART, UNSENT, Time(0.0109, 0.002), all_cores=Time(0.0218, 0.008))
    assert verdict(4, times) == (
        "Verdict: speed-up 3.67 on 4 ranks (efficiency 92 %), 2.00 over one process with all "
        "cores; nothing limits much"
    )


def test_the_reasons_add_up_to_what_a_step_takes_more_than_the_ideal_one():
    times = Times(ALONE, Time(0.013, 0.001), Time(0.019, 0.004), Time(0.027, 0.005))
    added = reasons(4, times)
    assert sum(added.values()) == pytest.approx(0.027 - 0.010)
    assert added == pytest.approx(
        {"batch size": 0.004, "cores": 0.003, "data": 0.003, "communication": 0.007}
    )


def ms(run, line):
    return float(run.find(rf"^  {line} +(\S+) \("))


@pytest.mark.wide_in("mpich")
def test_it_measures_both_and_ends_with_the_verdict(hvdrun):
    # Each rank waits for its batches as long as one process does; nothing else takes so long.
    run = hvdrun(2, "speed_test.py", "--slow-data", "0.1", "--no-cuda", *FEW)
    assert run.code == 0, run
    last = run.stdout.splitlines()[-1]
    alone, distributed = ms(run, "normal, 1 process, 1 thread.s."), ms(run, "distributed, 2 ranks")
    found = re.fullmatch(
        r"Verdict: speed-up (\S+) on 2 ranks \(efficiency (\d+) %\)(, \S+ over one process with "
        r"all cores)?; limited by data: (\S+) of (\S+) ms",
        last,
    )
    assert found, run
    assert float(found[1]) == pytest.approx(alone / distributed, abs=0.006)
    assert float(found[2]) == pytest.approx(50 * alone / distributed, abs=0.6)
    assert float(found[5]) == pytest.approx(distributed, abs=0.006)
    assert 0 < float(found[4]) < float(found[5])
    assert "Model mlp, 905,010 parameters; 128 images per step" in run.stdout


def test_one_rank_has_nothing_to_compare_with(alone):
    run = alone("speed_test.py")
    assert run.code == 1
    assert "1 rank(s) for batches of 128 images: expected at least 2 ranks" in run.stderr
