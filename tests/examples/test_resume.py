"""examples/resume.py: an interrupted training goes on as if nothing had happened."""

import pytest


def digest(run):
    return run.find(r"^Digest of the parameters: (\w+)$")


@pytest.mark.wide
def test_interrupted_in_mid_epoch_and_resumed_equals_uninterrupted_bit_for_bit(hvdrun, tmp_path):
    def train(name, *arguments):
        folder = str(tmp_path / name)
        run = hvdrun(2, "resume.py", "--checkpoints", folder, "--epochs", "2", *arguments)
        assert run.code == 0, run
        return run

    uninterrupted = train("whole")
    begun = train("parts", "--stop-after", "11")
    resumed = train("parts")

    steps = int(uninterrupted.find(r"^Trained (\d+) steps, \1 now\.$"))
    assert steps // 2 > 11  # which is in the middle of the first epoch
    assert "Trained 11 steps, 11 now." in begun.stdout
    assert f"Trained {steps} steps, {steps - 11} now." in resumed.stdout
    assert digest(begun) != digest(uninterrupted)
    assert digest(resumed) == digest(uninterrupted)
