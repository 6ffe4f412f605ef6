"""The files of a Checkpointer: complete or not there, and what is damaged is passed over."""

import enum
import errno
import io
import json
import os
import random
import re
import resource
import sys
import tarfile
import traceback
import zipfile

import pytest
import torch

from hvdlite.recipes import CheckpointError, checkpoint_files
from hvdlite.recipes.checkpoint_files import KEY, VERSION, BackgroundWriter, CheckpointFolder
from tests.harness.needs import lacking
from tests.harness.programs import run_program

NAMES = [f"checkpoint-{step:09d}.pt" for step in range(9)]


def tree_of(step, elems=50):
    about = {"version": VERSION, "step": step, "generators": []}
    return {"model": {"weight": torch.full((elems,), float(step))}, KEY: about}


def opened(path, keep=None, steps=()):
    folder = CheckpointFolder(str(path), keep)
    folder.prepare()
    for step in steps:
        folder.write(step, tree_of(step))
    return folder


def value_of(tree):
    (value,) = set(tree["model"]["weight"].tolist())
    return value


def names_in(path):
    return sorted(each.name for each in path.iterdir())


def test_a_checkpoint_is_a_file_that_plain_torch_reads_safely(tmp_path):
    opened(tmp_path / "new" / "folder", steps=[1])
    read = torch.load(tmp_path / "new" / "folder" / NAMES[1], weights_only=True)
    assert value_of(read) == 1


def test_the_folders_above_new_ones_are_brought_to_the_disk_and_no_others(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "new" / "folder"
    opened(path)
    assert synced == [str(tmp_path / "new"), str(tmp_path)]
    opened(path)
    assert len(synced) == 2


def test_the_latest_steps_are_kept_and_the_same_step_is_replaced(tmp_path):
    folder = opened(tmp_path, keep=2, steps=[1, 2, 3, 3])
    assert names_in(tmp_path) == [NAMES[2], NAMES[3]]
    assert folder.newest()[0] == 3


def test_a_folder_with_an_old_checkpoints_name_stays_and_disturbs_nothing(tmp_path):
    (tmp_path / NAMES[1]).mkdir()
    folder = opened(tmp_path, keep=1, steps=[2, 3])
    assert names_in(tmp_path) == [NAMES[1], NAMES[3]]
    assert folder.newest()[0] == 3


def test_all_are_kept_where_that_is_asked_for(tmp_path):
    opened(tmp_path, keep=None, steps=range(5))
    assert names_in(tmp_path) == NAMES[:5]


def test_there_is_no_newest_in_an_empty_folder(tmp_path):
    assert opened(tmp_path).newest() is None


@pytest.mark.parametrize("part", [0, 0.01, 0.5, 0.99, -1])
def test_a_torn_file_is_passed_over_and_said(tmp_path, caplog, part):
    folder = opened(tmp_path, steps=[1, 2])
    torn = tmp_path / NAMES[2]
    data = torn.read_bytes()
    torn.write_bytes(data[: -1 if part == -1 else int(part * len(data))])
    step, tree = folder.newest()
    assert (step, value_of(tree)) == (1, 1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"rank 0: {torn} is passed over: ")


def test_another_file_with_an_archive_behind_it_is_passed_over(tmp_path, caplog):
    """torch would read the tar, by means that run code in it before 2.6."""
    folder = opened(tmp_path, steps=[1, 2])
    path = tmp_path / NAMES[2]
    with io.BytesIO() as made:
        with tarfile.open(fileobj=made, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("pickle"))
        path.write_bytes(made.getvalue() + path.read_bytes())
    assert zipfile.is_zipfile(path)
    assert folder.newest()[0] == 1
    assert "it does not begin as an archive of torch.save" in caplog.text


def test_no_single_byte_that_changes_makes_a_file_read_wrongly(tmp_path, caplog):
    folder = opened(tmp_path, steps=[1, 2])
    path = tmp_path / NAMES[2]
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        begins = [each.header_offset for each in archive.infolist()]
        directory = archive.start_dir
    drawn = random.Random(0).sample(range(len(data)), 150)
    headers = [begin + offset for begin in begins for offset in (0, 6, 8, 14, 18, 22, 26, 28, 31)]
    found = {"whole": 0, "passed over": 0}
    for place in {*drawn, *headers, *range(directory, len(data), 3)}:
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x21]) + data[place + 1 :])
        step, tree = folder.newest()  # and never an error: each is proven to be damaged
        assert value_of(tree) == step
        found["whole" if step == 2 else "passed over"] += 1
    assert found["passed over"] > 100  # the others are in padding and times


def test_a_damaged_tensor_is_found_by_its_checksum(tmp_path, caplog):
    folder = opened(tmp_path, steps=[1, 2])
    path = tmp_path / NAMES[2]
    data = path.read_bytes()
    value = torch.tensor(2.0).numpy().tobytes()
    path.write_bytes(data.replace(value * 50, value * 49 + b"torn"))
    assert folder.newest()[0] == 1
    assert "the checksum of archive/data/0 in it is wrong" in caplog.text


def test_checksums_are_there_also_where_the_script_switches_them_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        folder = opened(tmp_path, steps=[1])
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert folder.newest()[0] == 1


class Kind(enum.Enum):
    GOOD = 1


REFUSED = "is whole, and torch.load(weights_only=True) refuses it: it has a "
WITHOUT_IT = "move it out of the folder to go on with the checkpoint before it"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (torch.ones(3), "holds step None in version None of the format, expected step 2"),
        (tree_of(7), "holds step 7 in version 1 of the format, expected step 2 in version 1"),
        ({KEY: {"version": 9, "step": 2}}, "holds step 2 in version 9"),
        ({KEY: 9}, "holds step None"),
        (random.Random(0), REFUSED + "random.Random; name the classes"),
        (tree_of(2) | {"kind": Kind.GOOD}, f"{REFUSED}{__name__}.Kind; name the classes"),
    ],
)
def test_a_whole_file_that_can_not_be_used_is_an_error_that_says_what_to_do(
    tmp_path, caplog, content, text
):
    folder = opened(tmp_path, steps=[1])
    torch.save(content, tmp_path / NAMES[2])
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / NAMES[2]} {text}")) as raised:
        folder.newest()
    assert str(raised.value).endswith(WITHOUT_IT)
    assert str(raised.value).isprintable()  # one line, no escapes
    assert not caplog.messages


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_the_disk_does_not_give_is_an_error_and_not_passed_over(
    tmp_path, monkeypatch, number
):
    folder = opened(tmp_path, steps=[1, 2])

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_files, "open_file", fail)
    text = f"{tmp_path / NAMES[2]} can't be read: [Errno {number}] {os.strerror(number)}; make it"
    with pytest.raises(CheckpointError, match=re.escape(text)) as raised:
        folder.newest()
    assert raised.value.__cause__.errno == number
    assert str(raised.value).endswith(WITHOUT_IT)


def test_a_disk_that_fails_at_any_read_of_a_file_is_an_error(tmp_path, monkeypatch):
    folder = opened(tmp_path, steps=[1, 2])
    left = 0

    class Failing(io.FileIO):
        def readinto(self, buffer):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readinto(buffer)

    def buffered(descriptor, _):
        return io.BufferedReader(Failing(descriptor), 16)

    monkeypatch.setattr(checkpoint_files, "open", buffered, raising=False)
    left = most = 1000
    assert folder.newest()[0] == 2
    text = f"{NAMES[2]} can't be read: [Errno 5] Input/output error; make"
    for reads in range(most - left):
        left = reads
        with pytest.raises(CheckpointError) as raised:
            folder.newest()
        assert text in str(raised.value), "".join(traceback.format_exception(raised.value))


def test_a_folder_that_can_not_be_listed_is_an_error(tmp_path):
    folder = opened(tmp_path / "folder", steps=[1])
    (tmp_path / "folder").rename(tmp_path / "elsewhere")
    (tmp_path / "folder").touch()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/folder can't be listed: .*; make it"):
        folder.newest()


def test_a_named_pipe_is_passed_over_and_not_waited_for(tmp_path, caplog):
    folder = opened(tmp_path, steps=[1])
    os.mkfifo(tmp_path / NAMES[2])
    assert folder.newest()[0] == 1
    assert caplog.messages == [
        f"rank 0: {tmp_path / NAMES[2]} is passed over: it is no regular file"
    ]


def test_a_folder_named_as_a_checkpoint_is_passed_over(tmp_path, caplog):
    folder = opened(tmp_path, steps=[1])
    (tmp_path / NAMES[2]).mkdir()
    assert folder.newest()[0] == 1
    assert "is passed over: it is no regular file" in caplog.text


def test_a_damaged_file_does_not_count_among_those_to_keep(tmp_path, caplog):
    folder = opened(tmp_path, keep=2, steps=[1, 2])
    (tmp_path / NAMES[4]).write_bytes(b"torn")
    assert folder.newest()[0] == 2
    folder.check_next(3)
    folder.write(3, tree_of(3))
    assert names_in(tmp_path) == [NAMES[2], NAMES[3], NAMES[4]]
    folder.write(5, tree_of(5))
    assert names_in(tmp_path) == [NAMES[3], NAMES[4], NAMES[5]]


def test_a_step_before_checkpoints_that_are_there_is_refused(tmp_path):
    folder = opened(tmp_path, steps=[1, 5])
    folder.check_next(5)
    with pytest.raises(ValueError, match=f"step 4 is before {NAMES[5]} in .*; call restore"):
        folder.check_next(4)


def test_what_a_killed_writer_has_left_is_removed_at_the_start_and_nothing_else(tmp_path):
    others = [".checkpoint-1.pt.unfinished", "checkpoint-000000001.pt.unfinished", "notes"]
    for name in (*others, f".{NAMES[3]}.unfinished"):
        (tmp_path / name).touch()
    opened(tmp_path)
    assert names_in(tmp_path) == sorted(others)


def test_a_full_disk_leaves_the_checkpoints_before_and_nothing_else(tmp_path):
    folder = opened(tmp_path, keep=1, steps=[1])
    writer = BackgroundWriter(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        writer.start(2, tree_of(2, elems=50_000))
        with pytest.raises(
            CheckpointError, match=rf"{NAMES[2]} could not be written: .*large"
        ) as raised:
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(raised.value.__cause__, OSError)
    assert names_in(tmp_path) == [NAMES[1]]
    writer.wait()  # it is said once
    writer.start(3, tree_of(3))
    writer.wait()
    assert names_in(tmp_path) == [NAMES[3]]


def test_an_error_that_nobody_waits_for_is_logged_at_the_end(tmp_path, caplog):
    writer = BackgroundWriter(opened(tmp_path))
    (tmp_path / f".{NAMES[2]}.unfinished").mkdir()
    writer.start(2, tree_of(2))
    writer.wait_at_last()
    assert f"{NAMES[2]} could not be written: [Errno 17] File exists" in caplog.text


def test_a_symlink_of_another_user_is_not_followed(tmp_path):
    if os.geteuid() != 0:
        lacking("root, to make a file of another user")
    shared, target = tmp_path / "shared", tmp_path / "target"
    shared.mkdir()
    shared.chmod(0o777)
    target.mkdir()
    (shared / "checkpoints").symlink_to(target)
    os.lchown(shared / "checkpoints", 12345, 12345)
    with pytest.raises(PermissionError, match="this symlink belongs to user 12345"):
        opened(shared / "checkpoints", steps=[1])
    assert names_in(target) == []


@pytest.mark.wide
def test_a_kill_at_any_moment_loses_no_checkpoint_that_was_complete(tmp_path):
    run = run_program(
        [sys.executable, "-m", "tests.recipes.killed_writers", tmp_path, "20", "1"], 120
    )
    assert run.code == 0, run
    summary = json.loads(run.stdout)
    assert summary["kills"] == 20
    # Between two writes a kill falls by chance alone; into each phase of a write, some by design.
    assert all(kills for phase, kills in summary["in"].items() if phase != "between"), summary
