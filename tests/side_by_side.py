"""The whole suite in several processes, as one that waits for its ranks leaves a core idle.

``pytest_runtestloop`` forks once everything is collected and imported. Each process takes one file
after the other, the longest and those with ranks first, as what is short ends together. Each has
pools of its own. The parent reports all of it, a file at a time, as if it had run it. Only on
Linux, where a fork before the first test is safe, and only for what is worth it: a few files run as
ever.
"""

import itertools
import os
import pickle
import signal
import sys
from pathlib import Path

import pytest

WORTH_IT = 10  # files, beside the first with ranks
# beside the parent: one process more than cores, as each waits at times
FORKS = min(os.cpu_count() or 1, 3)
LONGEST = {"test_dropin_programs", "test_parity", "test_examples"}  # begun first
Group = list[pytest.Item]  # of one file


def pytest_runtestloop(session):
    """Run the collected items; None leaves it to pytest."""
    groups = [
        list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)
    ]
    first, *others = sorted(range(len(groups)), key=lambda number: _place(groups[number])) or [0]
    option = session.config.option
    if (
        option.collectonly
        or option.usepdb
        or session.testsfailed
        or sys.platform != "linux"
        or os.cpu_count() == 1
    ):
        return None
    if len(others) < WORTH_IT or not any(_has_ranks(group) for group in groups):
        return None
    # Made before the fork, so that only the parent cleans up; the fork ends without that.
    folder = Path(session.config._tmp_path_factory.mktemp("side_by_side"))
    _Several(session, groups, others, folder).run(first)
    return True


def _place(group):
    return group[0].path.stem not in LONGEST, not _has_ranks(group)


def _has_ranks(group):
    names = vars(getattr(group[0], "module", None) or object)
    return "distributed" in names or "on_ranks" in names


class _Several:
    """The processes' common knowledge.

    The numbers of the files that any may run stand in a pipe, which gives each number to one of
    them. What a fork has to say about file 7 is the file ``7`` in the folder.
    """

    def __init__(self, session, groups, others, folder):
        self.session, self.groups, self.folder = session, groups, folder
        self.unread = set(others)  # files that nothing is reported of
        self.queue, end = os.pipe()
        os.write(end, b"".join(number.to_bytes(4, "little") for number in others))
        os.close(end)

    def run(self, first):
        """Be the parent: fork, run the first file, then others, and report the forks'."""
        children = [self._fork() for _ in range(FORKS)]
        codes = []
        try:
            for number in itertools.chain([first], self._claimed()):
                self.unread.discard(number)
                _run(self.session, self.groups[number])
                self._report()
            while children:
                _, status = os.waitpid(children[0], 0)
                codes.append(os.waitstatus_to_exitcode(status))
                del children[0]
                self._report()
            self._report_lost(codes)
        finally:
            os.close(self.queue)
            for child in children:  # stopped by -x or Ctrl-C
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def _fork(self):
        child = os.fork()
        if not child:
            _end_as_a_fork(self._serve)
        return child

    def _claimed(self):
        while number := os.read(self.queue, 4):
            yield int.from_bytes(number, "little")

    def _serve(self):
        """Be a fork: run files, and write down what became of them."""
        parent, plugins = os.getppid(), self.session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture = plugins.getplugin("capturemanager")  # its files are the parent's
        capture.stop_global_capturing()
        capture.start_global_capturing()
        for number in self._claimed():
            recorder = _Recorder(self.session.config)
            plugins.register(recorder)
            try:
                _run(self.session, self.groups[number])
            finally:  # also what -x stops
                plugins.unregister(recorder)
                unfinished = self.folder / f"{number}.unfinished"
                unfinished.write_bytes(pickle.dumps(recorder.reports))
                unfinished.rename(self.folder / str(number))
            if os.getppid() != parent:
                return

    def _report(self):
        """Report the files that the forks have finished."""
        for number in sorted(self.unread):
            file = self.folder / str(number)
            if file.exists():
                self.unread.discard(number)
                reports = pickle.loads(file.read_bytes())
                for item in self.groups[number]:
                    # none where a fork was stopped before it
                    self._log(item, reports.get(item.nodeid, []))

    def _report_lost(self, codes):
        """Fail what a fork has taken and not finished."""
        for number in sorted(self.unread):
            for item in self.groups[number]:
                said = f"the process that ran this file's tests ended; exit codes of all: {codes}"
                lost = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
                self._log(
                    item,
                    [
                        item.config.hook.pytest_report_to_serializable(
                            config=item.config, report=lost
                        )
                    ],
                )

    def _log(self, item, reports):
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in reports:
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        _stop_if_asked(self.session)


class _Recorder:
    """Keeps the reports of each item, in a form that another process can read."""

    def __init__(self, config):
        self.config = config
        self.reports = {}

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.reports.setdefault(report.nodeid, []).append(data)


def _run(session, group):
    """What pytest's own loop does, for one file; its fixtures end with it."""
    for item, following in itertools.zip_longest(group, group[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        _stop_if_asked(session)


def _stop_if_asked(session):
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _end_as_a_fork(body):
    """Run ``body`` and end without what the parent's end is for: summaries, and the caller's
    ``finally``.
    """
    code = 1
    try:
        body()
        code = 0
    # the parent stops too, when it reads of the failure
    except (pytest.Session.Failed, pytest.Session.Interrupted):
        code = 0
    finally:
        os._exit(code)
