"""Where the secret comes from, and which ones are refused."""

import os

import pytest

from hvdrun.errors import UsageError
from hvdrun.rendezvous.secret import check_needed, is_loopback, key_of, take

SECRET = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_the_variable_is_taken_away_so_that_no_process_inherits_it():
    environ = {"HVDLITE_RENDEZVOUS_SECRET": SECRET, "A": "1"}
    assert take(environ, None) == SECRET
    assert environ == {"A": "1"}


def test_the_file_comes_before_the_variable_which_goes_all_the_same(file):
    environ = {"HVDLITE_RENDEZVOUS_SECRET": "x" * 40}
    assert take(environ, str(file)) == SECRET
    assert environ == {}


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_kubernetes_secret_is_a_link_to_a_file_of_root_and_the_pods_group(file, tmp_path, mode):
    if os.geteuid():
        pytest.skip("only root can make a file of root")
    (tmp_path / "link").symlink_to(file)
    file.chmod(mode)
    assert take({}, str(tmp_path / "link")) == SECRET


def test_a_short_secret_is_refused_and_not_shown():
    with pytest.raises(UsageError) as error:
        take({"HVDLITE_RENDEZVOUS_SECRET": "tiger"}, None)
    assert "has 5 characters" in str(error.value)
    assert "openssl rand -hex 32" in str(error.value)
    assert "tiger" not in str(error.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_file_that_others_can_read_or_change_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(UsageError, match=r"other users can read or change it.*chmod 600"):
        take({}, str(file))


@pytest.mark.parametrize("mode", [0o640, 0o660, 0o620])
def test_a_file_of_the_user_that_its_group_can_read_or_change_is_refused(file, mode, monkeypatch):
    if not os.geteuid():
        os.chown(file, 4321, 4321)
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    file.chmod(mode)
    with pytest.raises(UsageError, match=r"others of its group can read or change it.*chmod 600"):
        take({}, str(file))


def test_another_users_file_is_refused(file):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(file, 4321, 4321)
    with pytest.raises(UsageError, match="belongs to user 4321"):
        take({}, str(file))


def test_another_users_symlink_to_a_file_of_the_users_is_refused(file, tmp_path):
    if os.geteuid():
        pytest.skip("only root can give a link away")
    link = tmp_path / "another's"
    link.symlink_to(file)
    os.lchown(link, 4321, 4321)
    with pytest.raises(UsageError, match="this symlink belongs to user 4321"):
        take({}, str(link))


@pytest.mark.parametrize(
    ("path", "says"), [("/nowhere/at/all", "No such file"), ("/dev/null", "this is not a file")]
)
def test_a_file_that_can_not_be_read_is_named(path, says):
    with pytest.raises(UsageError, match=f"--rendezvous-secret-file {path}: {says}"):
        take({}, path)


def test_an_empty_file_is_refused_and_not_taken_for_none(file):
    file.write_text("\n")
    with pytest.raises(UsageError, match="has 0 characters"):
        take({}, str(file))


def test_only_hosts_that_meet_over_loopback_need_none():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
        check_needed(host, "")
    for host in ("server1", "10.0.0.1", "0.0.0.0", "::", "localhost.example.org"):
        assert not is_loopback(host)
        check_needed(host, SECRET)
        with pytest.raises(UsageError, match=r"must share a secret.*openssl rand -hex 32"):
            check_needed(host, "")


def test_keys_have_32_bytes_and_differ():
    assert len(key_of("")) == 32
    assert len({key_of(""), key_of(SECRET), key_of(SECRET + "0")}) == 3
