"""Shows a job while it runs: live, and hears keys, on a terminal; elsewhere by a line now and then.

It is called in each turn of the loop that supervises the job, asks no rank for anything, and takes
a small part of the time at most.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping

from hvdrun.job.course import Course, Event
from hvdrun.job.events import Interrupted, MetricsAsked, StacksAsked
from hvdrun.monitor import keys, view
from hvdrun.monitor.figures import Verdicts, figures_of, judge
from hvdrun.monitor.view import Look, render
from hvdrun.output.pane import Pane, is_in_front, place_of, size_of
from hvdrun.output.screen import Screen
from hvdrun.output.terminal import is_coloured

# How often the live part is worked out anew, and the verdict; less often where it takes longer
# than this part of the time.
EVERY_S, JUDGED_EVERY_S = 1.0, 5.0
MOST_OF_TIME = 0.02
# Between two lines, in the job's first minutes and then.
LINE_EVERY_S, LINE_LATER_EVERY_S = 10.0, 60.0
FIRST_S = 120.0
# The number under which the monitor asks; those of others are positive.
ASKER = -1

_KEYS = ("s stacks   m table   q end the job   ? help",)
_ASKED = ("the ranks are being asked where they are",)
_SURE = ("end the job, as Ctrl-C does?  y yes   any other key: no",)
_ENDING = ("s stacks   m table   Ctrl-C ends the job at once",)
_HELP = (
    "s  where each rank is in its Python code (hvdrun --stacks)",
    "m  where each rank's time goes (hvdrun --metrics)",
    "q  ends the job as Ctrl-C does, which asks nothing",
    "?  takes this help away",
)


class Monitor:
    """`tell` gets what a key asks of the job."""

    def __init__(
        self,
        course: Course,
        screen: Screen,
        selector: selectors.BaseSelector,
        tell: Callable[[Event], None],
        environ: Mapping[str, str],
    ) -> None:
        self._course = course
        self._screen = screen
        self._tell = tell
        self._environ = environ
        self._judged, self._judge_at = Verdicts(), float("-inf")
        self._show_at = self._line_at = float("-inf")
        self._foot: tuple[str, ...] = _KEYS
        self._is_over = False
        self._has_said_why = False
        self._keys: keys.Keys | None = None
        self._place = place_of(environ)
        self._pane: Pane | None = None
        if self._place is None:
            return
        fd, through = self._place
        self._pane = Pane(
            lambda data: screen.write_at_once(fd, data),
            lambda: not screen.writer.is_idle(),
            lambda: size_of(fd)[0],
        )
        screen.live = through, self._pane.feed
        if keys.are_possible():
            self._keys = keys.Keys(selector, self._typed)

    @property
    def takes_keys(self) -> bool:
        """What is typed is not for rank 0."""
        return self._keys is not None

    def wait_s(self, now: float) -> float:
        waits = self._show_at - now, self._pane.wait_s(now) if self._pane else None
        return max(0.0, min(wait for wait in waits if wait is not None))

    def tick(self, now: float) -> None:
        """Called in each turn. What fails in here must not end the job."""
        if self._is_over:
            return
        try:
            if now >= self._show_at:
                self._show(now)
            if self._pane is not None:
                self._pane.tick(now)
        except BrokenPipeError:  # for the loop, which ends the job
            raise
        except Exception as error:
            self.end()
            why = f"{type(error).__name__}: {error}"
            self._screen.output.say(f"hvdrun: --monitor has failed, and the job goes on: {why}")

    def answered(self, text: str) -> None:
        """What a key has asked for."""
        self._foot = _KEYS
        self._screen.output.say(f"hvdrun: {text}")

    def end(self) -> None:
        """Leaves the terminal as it was; what comes next is shown as always."""
        self._is_over = True
        self._screen.live = None
        if self._keys is not None:
            self._keys.end()
        if self._pane is not None:
            with contextlib.suppress(BrokenPipeError):
                self._pane.close()

    def _show(self, now: float) -> None:
        begin = time.monotonic()
        if now >= self._judge_at:
            self._judged = judge(self._course.measured.records, self._course.command.host_of)
            took_s = time.monotonic() - begin
            self._judge_at = now + max(JUDGED_EVERY_S, took_s / MOST_OF_TIME)
        if self._pane is None:
            self._say_line(now)
        else:
            self._draw(now)
        self._show_at = now + max(EVERY_S, (time.monotonic() - begin) / MOST_OF_TIME)

    def _draw(self, now: float) -> None:
        assert self._place is not None
        assert self._pane is not None
        if self._keys is not None:
            self._keys.look()
        if not is_in_front(self._place.fd):  # after `kill -STOP` and `bg`
            self._pane.leave()
            return
        foot = self._foot if self._keys is not None else ()
        if foot is _KEYS and self._course.ending.has_begun:
            foot = _ENDING
        coloured = is_coloured(self._environ)
        blocks = "utf" in (getattr(sys.stderr, "encoding", None) or "").lower()
        look = Look(*size_of(self._place.fd), coloured, blocks)
        self._pane.show(render(figures_of(self._course, now, self._judged), look, foot))

    def _say_line(self, now: float) -> None:
        figures = figures_of(self._course, now, self._judged)
        elapsed_s = figures.elapsed_s
        if self._course.ending.has_begun or not self._course.ranks.have_all_started:
            return
        if now < self._line_at or (figures.steps_per_s is None and elapsed_s < view.NO_STEP_S):
            return  # (The first line comes as soon as it can say how fast the job is.)
        self._line_at = now + (LINE_EVERY_S if elapsed_s < FIRST_S else LINE_LATER_EVERY_S)
        if not figures.has_pulses:
            if self._has_said_why:
                return
            self._has_said_why = True
        self._screen.output.say(f"hvdrun: {view.line(figures)}")

    def _typed(self, text: str) -> None:
        """The first key counts, as what was pasted is no answer to a question."""
        self._show_at = float("-inf")  # the foot changes
        key, foot, self._foot = text[0].lower(), self._foot, _KEYS
        if foot is _SURE:
            if key == "y":
                self._tell(Interrupted(signal.SIGINT))
            return
        if foot is _ASKED:
            self._foot = _ASKED
        if key == "s" and foot is not _ASKED:
            self._foot = _ASKED
            self._tell(StacksAsked(ASKER))
        elif key == "m":
            self._tell(MetricsAsked(ASKER))
            self._foot = foot if foot is _ASKED else _KEYS
        elif key == "q" and not self._course.ending.has_begun:
            self._foot = _SURE
        elif key in "?h" and foot is not _HELP:
            self._foot = _HELP
