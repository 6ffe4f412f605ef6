"""The ranks that a stall report names: one list of those of all hosts, in order."""

from __future__ import annotations

import random
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.harness.compiled import with_core

ROOM = 127  # bytes of a list


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """The lists of several reports' hosts → the list of each report."""
    source = Path(__file__).with_name("rows.c")
    program = with_core(tmp_path_factory.mktemp("rows") / "program", source)

    def join(reports):
        lines = "".join(f"{'|'.join(lists)}\n" for lists in reports)
        done = subprocess.run([program], input=lines, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout.splitlines()

    return join


def in_words(ranks, room=10**9):
    """As a host writes its ranks, with what has no room cut off."""
    ranks = sorted(ranks)
    begins = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    parts = [
        f"{a}-{b}" if b > a + 1 else f"{a}, {b}" if b > a else f"{a}"
        for a, b in zip(begins, ends, strict=True)
    ]
    text = ", ".join(parts)
    return text if len(text) <= room else f"{text[: room - 3]}..."


def numbers(text):
    found = []
    for part in text.split(", ") if text else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        (["2", "0", "3"], "0, 2, 3"),
        (["0, 2", "1, 3"], "0-3"),
        (["0-3", "8-11", "4-7"], "0-11"),
        (["", "1", ""], "1"),
        # Of a list that is cut, all that may be missing is after its last whole number.
        (["5", "0, 7...", "1"], "0, ..."),
        (["7,...", "3", "9"], "3, 7, ..."),
        (["2, 70-...", "1, 90"], "1, 2, ..."),
        (["...", "3"], "..."),
    ],
)
def test_lists_of_hosts_become_one(joined, lists, text):
    assert joined([lists]) == [text]


def test_whatever_is_named_is_right_and_what_is_cut_comes_last(joined):
    choose = random.Random(1)
    reports, all_ranks = [], []
    for _ in range(2000):
        size, num_hosts = choose.randint(1, 300), choose.randint(1, 6)
        part, in_turns = choose.choice((0.1, 0.5, 0.95)), choose.random() < 0.5
        hosts = [set() for _ in range(num_hosts)]
        for rank in range(size):
            if choose.random() < part:
                hosts[rank % num_hosts if in_turns else choose.randrange(num_hosts)].add(rank)
        all_ranks.append(set().union(*hosts))
        choose.shuffle(hosts)
        reports.append([in_words(each, ROOM) for each in hosts])
    texts = joined(reports)
    num_cut = 0
    for text, ranks in zip(texts, all_ranks, strict=True):
        assert len(text) <= ROOM
        if not text.endswith("..."):
            assert text == in_words(ranks)
            continue
        num_cut += 1
        named = numbers(text.removesuffix("...").removesuffix(", "))
        assert named == sorted(ranks)[: len(named)]
        assert all(a < b for a, b in pairwise(named))
    assert 100 < num_cut < 1900
