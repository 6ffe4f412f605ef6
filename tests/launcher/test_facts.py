"""What hvdrun finds out about its own environment."""

import pytest

from hvdrun.facts import own_path


@pytest.mark.parametrize(
    ("path", "prefix", "expected"),
    [
        ("/bin", "/env", "/env/bin:/bin"),
        ("/bin:/env/bin", "/env", "/bin:/env/bin"),
        ("", "/env", "/env/bin"),
        ("/bin", "/usr", "/bin"),
    ],
    ids=["not active", "active", "no PATH", "no virtual environment"],
)
def test_python_is_that_of_hvdruns_environment_also_where_it_is_not_active(path, prefix, expected):
    assert own_path(path, prefix, base_prefix="/usr") == expected
