"""Histories of ranks that tell what they have measured."""

from hvdrun.job.actions import Answer
from hvdrun.job.events import MetricsAsked, RankSaid
from hvdrun.machine import notes
from hvdrun.records import Record
from hvdrun.reports.late import so_far
from tests.launcher.job.histories import all_well, asked, begun_history, closes, ended, ends, over

MEASURED = b'{"steps": 3, "seconds": 2, "waited": 1}'

MEASURED_BY_RANKS = {
    "ranks send what they have measured, and one sends nonsense": begun_history(
        [
            (1.9, RankSaid(0, notes.SUMMARY, MEASURED)),
            (1.9, RankSaid(2, notes.SUMMARY, b'{"steps": 3}')),
            *all_well(2.0),
        ],
        closes(2.1),
    ),
    "a rank fails after ranks have sent what they have measured": begun_history(
        [
            (1.8, RankSaid(0, notes.SUMMARY, MEASURED.replace(b"3", b"21"))),
            (9.9, RankSaid(2, notes.SUMMARY, MEASURED)),
            ended(10.0, 1, "code 4"),
            *asked(10.1, 0, 2, 3),
            *over(10.2),
        ],
        ends(10.0),
        4,
        culprit=1,
    ),
    "a rank fails before there are steps that can be compared": begun_history(
        [
            (1.8, RankSaid(0, notes.SUMMARY, MEASURED)),
            ended(2.0, 1, "code 4"),
            *asked(2.1, 0, 2, 3),
            *over(2.2),
        ],
        ends(2.0),
        4,
        culprit=1,
    ),
    "somebody asks how the ranks fare": begun_history(
        [
            (1.8, MetricsAsked(4)),
            (1.9, RankSaid(0, notes.SUMMARY, MEASURED)),
            (1.9, MetricsAsked(5)),
            *all_well(2.0),
        ],
        [
            (1.8, Answer(4, so_far({}, 4, str))),
            (1.9, Answer(5, so_far({0: Record(3, 2, 1)}, 4, lambda rank: "a"))),
            *closes(2.1),
        ],
    ),
}
