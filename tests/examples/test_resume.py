"""examples/resume.py: an interrupted training goes on as if nothing had happened."""

import pytest


def digest(run):
    return run.find(r"^Digest of the parameters: (\w+)$")


@pytest.mark.wide
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(hvdrun, tmp_path):
    def train(name, *arguments):
        checkpoint = str(tmp_path / name)
        run = hvdrun(2, "resume.py", "--checkpoint", checkpoint, "--epochs", "2", *arguments)
        assert run.code == 0, run
        return run

    uninterrupted = train("whole.pt")
    begun = train("parts.pt", "--stop-after", "1")
    resumed = train("parts.pt")

    assert "Trained 2 of 2 epochs, 2 now." in uninterrupted.stdout
    assert "Trained 1 of 2 epochs, 1 now." in begun.stdout
    assert "Trained 2 of 2 epochs, 1 now." in resumed.stdout
    assert digest(begun) != digest(uninterrupted)
    assert digest(resumed) == digest(uninterrupted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.pt", "whole.pt"]
