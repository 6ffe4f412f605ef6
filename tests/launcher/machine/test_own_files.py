"""A job writes its files where its user said, whatever other users have put there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrun.errors import UsageError
from hvdrun.machine.own_files import identity, open_file, open_folder, replace
from hvdrun.output.output_dir import OutputDir
from hvdrun.preflight.cache import AnswerCache
from tests.harness.needs import lacking

OTHER_USER = 4242  # needs no entry in /etc/passwd
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def mine(tmp_path):
    """A file that no other user may read or change."""
    path = tmp_path / "mine"
    path.write_text("kept")
    return path


@pytest.fixture
def shared(tmp_path):
    """A folder like /tmp."""
    if os.geteuid() != 0:
        lacking("what another user has made needs root")
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def link(path, target, user=OTHER_USER):
    path.symlink_to(target)
    os.chown(path, user, user, follow_symlinks=False)
    return path


def folder_of_another(path):
    path.mkdir()
    os.chown(path, OTHER_USER, OTHER_USER)
    return path


def write(path, text="new", flags=NEW, **options):
    with open(open_file(str(path), flags, **options), "w") as file:
        file.write(text)


@pytest.mark.parametrize("where", ["a folder of all", "a folder of theirs", "a folder of mine"])
def test_another_users_symlink_in_the_files_place_is_refused(shared, mine, tmp_path, where):
    theirs = folder_of_another(shared / "theirs")
    folder = {"a folder of all": shared, "a folder of theirs": theirs}.get(where, tmp_path)
    path = link(folder / "out", mine)
    with pytest.raises(PermissionError) as caught:
        write(path)
    assert caught.value.strerror == f"this symlink belongs to user {OTHER_USER}"
    assert caught.value.filename == str(path)
    assert mine.read_text() == "kept"
    link(folder / "dangling", tmp_path / "made")
    with pytest.raises(PermissionError):
        write(folder / "dangling")
    assert not (tmp_path / "made").exists()


def test_so_it_is_on_the_way_where_others_may_put_one(shared, mine, tmp_path):
    theirs = folder_of_another(shared / "theirs")
    for folder in (shared, theirs):
        path = link(folder / "way", tmp_path)
        with pytest.raises(PermissionError) as caught:
            write(path / "mine")
        assert caught.value.filename == str(path)
        with pytest.raises(PermissionError):
            open_folder(str(path / "made"), 0o700)
    assert mine.read_text() == "kept"
    assert not (tmp_path / "made").exists()


def test_the_way_up_from_ones_own_folder_leads_to_what_is_theirs(
    shared, mine, tmp_path, monkeypatch
):
    theirs = folder_of_another(shared / "theirs")
    (theirs / "own" / "below").mkdir(parents=True)
    link(theirs / "way", tmp_path)
    (theirs / "out").write_text("theirs")
    os.chown(theirs / "out", OTHER_USER, OTHER_USER)
    monkeypatch.chdir(theirs / "own")
    for path in ("../way/mine", "../out", "below/../../out", "../../theirs/out"):
        with pytest.raises(PermissionError, match=f"belongs to user {OTHER_USER}"):
            write(path)
    assert mine.read_text() == "kept"
    write("below/../out")
    write("../own/out")
    write(f"{'../' * 40}{tmp_path}/mine")
    assert mine.read_text() == "new"


def test_where_only_trusted_users_put_things_others_links_are_a_way_like_any(shared, tmp_path):
    """/projects/latest may be a colleague's."""
    own = shared / "own"
    own.mkdir()
    link(own / "way", tmp_path)
    write(own / "way" / "out")
    assert (tmp_path / "out").read_text() == "new"


def test_own_links_and_roots_are_followed_and_what_they_lead_to_is_looked_at(
    shared, mine, tmp_path, monkeypatch
):
    write(link(shared / "root", mine, user=0))
    assert mine.read_text() == "new"
    for owner, allowed in ((77, True), (78, False)):
        path = link(shared / f"of {owner}", "../mine", user=owner)
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 77)
            if allowed:
                write(path, f"by {owner}")
            else:
                with pytest.raises(PermissionError):
                    write(path)
    assert mine.read_text() == "by 77"
    first = link(tmp_path / "first", link(shared / "second", mine), user=0)
    with pytest.raises(PermissionError, match="symlink"):
        write(first)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="Too many levels"):
        write(loop)


def test_a_file_that_another_user_has_made_beforehand_is_refused_where_anybody_may(
    shared, tmp_path
):
    theirs = folder_of_another(shared / "theirs")
    for folder in (shared, theirs, tmp_path):
        path = folder / "out"
        path.write_text("theirs")
        os.chown(path, OTHER_USER, OTHER_USER)
        if folder == tmp_path:  # if the folder's owner has allowed it
            write(path)
            assert path.read_text() == "new"
            continue
        with pytest.raises(PermissionError, match=f"this file belongs to user {OTHER_USER}"):
            write(path)
        assert path.read_text() == "theirs"
    os.mkfifo(shared / "pipe")
    os.chown(shared / "pipe", OTHER_USER, OTHER_USER)
    with pytest.raises(PermissionError):  # and not opened, which would wait for a reader
        write(shared / "pipe")


def test_a_file_that_has_been_given_a_second_name_there_is_refused(shared, mine):
    os.link(mine, shared / "out")
    with pytest.raises(PermissionError, match="has a second name"):
        write(shared / "out")
    assert mine.read_text() == "kept"


def test_what_is_ones_own_is_written_as_ever(shared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a" / "b" / "out"
    with pytest.raises(FileNotFoundError):
        write(path)
    write("a/./b//out", "much more", make=True)
    write("a/../a/b/out")
    assert path.read_text() == "new"
    write(path, " and more", os.O_WRONLY | os.O_APPEND)
    assert path.read_text() == "new and more"
    write(shared / "out")
    write(shared / "out", "again")
    assert (shared / "out").read_text() == "again"
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "a")
    with pytest.raises(IsADirectoryError):
        write("/")
    with pytest.raises(NotADirectoryError):
        write(path / "out", make=True)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none", flags=os.O_WRONLY)


def test_an_absolute_path_needs_no_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    write(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "new"


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_leads_to_an_open_file_is_that_file(path):
    code = (
        f"import os; from hvdrun.machine.own_files import open_file; os.write(open_file({path!r},"
    )
    code += f" {NEW}), b'here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"here", b"")


def test_the_very_file_of_before_is_opened_or_none(tmp_path):
    path = tmp_path / "out"
    fd = open_file(str(path), NEW)
    made = identity(fd)
    os.close(fd)
    write(path, flags=os.O_WRONLY, same_as=made)
    path.rename(tmp_path / "kept")
    path.write_text("another")
    with pytest.raises(PermissionError, match="not the same file as before"):
        write(path, flags=os.O_WRONLY, same_as=made)
    assert path.read_text() == "another"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    folder = open_folder(str(tmp_path / "new" / "folder"), 0o700)
    try:
        assert os.fstat(folder).st_mode & 0o777 == 0o700
        replace(folder, "file", b"one")
        replace(folder, "file", b"two", 0o644)
        (tmp_path / "new" / "folder" / "sub").mkdir()
        with pytest.raises(IsADirectoryError):
            replace(folder, "sub", b"three")
    finally:
        os.close(folder)
    left = {path.name: path for path in Path(tmp_path, "new", "folder").iterdir()}
    assert sorted(left) == ["file", "sub"]
    assert left["file"].read_text() == "two"
    assert left["file"].stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("what", ["", "rank.1", "rank.1/stdout"])
def test_output_of_ranks_goes_through_no_symlink_of_another_user(shared, tmp_path, what):
    target = tmp_path / "target"
    target.mkdir()
    path = shared / "logs" / what
    if what:
        path.parent.mkdir(parents=True)
        os.chown(shared / "logs", OTHER_USER, OTHER_USER)
    link(path, target / "file" if what.endswith("stdout") else target)
    with pytest.raises(UsageError) as caught:
        OutputDir(str(shared / "logs"), 2)
    assert str(caught.value) == (
        f"--output-dir {shared / 'logs'}: this symlink belongs to user {OTHER_USER} ({path});"
        " name a folder that you can write to"
    )
    assert not any(target.iterdir())


@pytest.mark.usefixtures("shared")
def test_nor_through_one_in_a_folder_that_is_another_users_alone(tmp_path):
    """Whoever names it trusts that user with the folder, and not with what leads out of it."""
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o755)
    os.chown(logs, OTHER_USER, OTHER_USER)
    target = tmp_path / "target"
    target.mkdir()
    path = link(logs / "rank.0", target)
    with pytest.raises(UsageError, match=f"this symlink belongs to user {OTHER_USER} \\({path}\\)"):
        OutputDir(str(logs), 1)
    assert not any(target.iterdir())


def test_what_is_remembered_of_hosts_is_taken_from_no_folder_of_another_user(shared, tmp_path):
    cache = AnswerCache(tmp_path / "own")
    cache.put("key", "value")
    (old,) = (tmp_path / "own").iterdir()
    os.utime(old, (0, 0))
    theirs = folder_of_another(shared / "cache")
    for folder in (link(shared / "way", tmp_path / "own"), theirs):
        cache = AnswerCache(folder)
        cache.put("other", "value")
        assert cache.get("other") is None
    assert not any(theirs.iterdir())
    assert old.exists()  # and it was not removed through the link
