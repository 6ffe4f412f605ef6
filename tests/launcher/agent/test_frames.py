"""Frames between hvdrun, host agents and keepers."""

from hvdrun.agent import frames


def test_each_kind_has_a_letter_of_its_own():
    kinds = {
        name: value
        for name, value in vars(frames).items()
        if name.isupper() and isinstance(value, bytes) and len(value) == 1
    }
    assert len(kinds) > 20
    assert len(set(kinds.values())) == len(kinds)
