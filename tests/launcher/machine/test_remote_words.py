"""Every login shell reads hvdrun's remote command alike."""

import shutil
import subprocess

import pytest

from hvdrun.machine.remote_words import for_any_shell
from tests.harness.needs import lacking

SHELLS = {"sh": "dash", "bash": "bash", "zsh": "zsh", "fish": "fish", "tcsh": "tcsh"}
ODD = ["a b", "it's", "", '$HOME `id` "x"', "back\\slash \\n", "what!", "100%d", "two\nlines", "ü"]


@pytest.mark.parametrize("shell", SHELLS)
def test_words_arrive_as_they_are_in_every_shell(shell):
    if not shutil.which(shell):
        lacking(f"this test needs {shell}: apt-get install {SHELLS[shell]}")
    for words in (["plain", "-x=1", "A" * 5000], ODD):
        command = for_any_shell(["/usr/bin/printf", "%s\\0", *words])
        done = subprocess.run([shell, "-c", command], capture_output=True, text=True, timeout=60)
        assert done.stdout.split("\0")[:-1] == words, done.stderr


def test_plain_words_need_no_second_shell():
    """A forced command may pass its words on without any shell."""
    assert for_any_shell(["/venv/bin/python", "-I", "a_b=c"]) == "/venv/bin/python -I a_b=c"
    assert for_any_shell(["/my venv/python"]).startswith("sh -c '")
