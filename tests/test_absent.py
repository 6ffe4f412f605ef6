"""What Horovod has and hvdlite has not."""

import pytest

import hvdlite
import hvdlite.torch
from hvdlite.absent import REASONS


@pytest.mark.parametrize("name", sorted(REASONS))
def test_a_name_of_horovods_that_is_not_there_is_an_error_that_says_why(name):
    with pytest.raises(AttributeError, match=f"hvdlite has no {name}: .+"):
        getattr(hvdlite.torch, name)


def test_the_error_for_elastic_says_what_to_do_instead():
    assert not hasattr(hvdlite, "elastic")
    with pytest.raises(AttributeError, match=r"no elastic training .* write checkpoints"):
        hvdlite.elastic.run(print)


def test_any_other_name_is_the_usual_error():
    for module in (hvdlite, hvdlite.torch):
        with pytest.raises(AttributeError, match="hvdlite has no attribute 'allreduse'"):
            print(module.allreduse)
    assert "__getattr__" not in hvdlite.__all__
