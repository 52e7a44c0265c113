"""RankPool: what it reports when ranks misbehave, that the next call is fine, and that no process
is left.
"""

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from subprocess import PIPE

import forks
import pytest
import torch
import torch.distributed as dist

from shardkit.testing import RankFailure, RankPool

LIMIT = 2.0  # seconds for calls that hang on purpose
ENOUGH = 60  # seconds for a process to end that has been told to


# --- RankPool: calls that work --------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, timeout=30) as ranks_of_two:
        yield ranks_of_two


def rank_and(*args, **kwargs):
    return dist.get_rank(), args, kwargs


def pid_of_rank():
    return os.getpid()


def random_numbers():
    import numpy

    return torch.rand(1).item(), random.random(), numpy.random.rand()


def speak():
    print("from Python")
    os.system("echo out of a child process")
    print("to stderr", file=sys.stderr)


def surroundings():
    return (
        os.getcwd(),
        os.environ.get("SHARDKIT_TEST_WORD"),
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
    )


def destroy_group():
    dist.destroy_process_group()


def test_results_come_in_the_order_of_ranks_with_all_arguments():
    with RankPool(4) as four:
        assert four.run(rank_and, 1, "two", key=[3]) == [
            (n, (1, "two"), {"key": [3]}) for n in range(4)
        ]


def test_every_call_starts_from_the_same_seeds_on_every_rank(pair):
    first = pair.run(random_numbers)
    assert first[0] == first[1]
    assert pair.run(random_numbers) == first


def test_what_ranks_print_is_shown_after_their_rank(pair, capsys):
    pair.run(speak)
    shown = capsys.readouterr().out.splitlines()
    for rank in range(2):
        for line in ("from Python", "out of a child process", "to stderr"):
            assert f"[rank {rank}] {line}" in shown
    assert len(shown) == 6


def test_ranks_follow_the_directory_and_environment(pair, monkeypatch, tmp_path):
    pair.run(pid_of_rank)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDKIT_TEST_WORD", "now")
    assert pair.run(surroundings) == [(str(tmp_path), "now", str(rank), "2") for rank in range(2)]
    monkeypatch.delenv("SHARDKIT_TEST_WORD")
    assert pair.run(surroundings)[0][1] is None


def test_ranks_start_processes_as_a_program_does(pair):
    assert pair.run(forks.start_method) == 2 * [forks.start_method()]


def test_a_call_that_destroys_its_group_does_not_harm_the_next(pair):
    pair.run(destroy_group)
    assert pair.run(dist.get_world_size) == [2, 2]


# --- RankPool: calls that fail --------------------------------------------------------------------


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def raise_on_every_rank(by_rank):
    raise ValueError(f"rank {dist.get_rank()}" if by_rank else "all")


def hang_on_rank_1():
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()


def kill_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash_on_rank_1():
    if dist.get_rank() == 1:
        print("last words")
        os.abort()
    dist.barrier()


def exit_on_rank_1(code, exit_function):
    if dist.get_rank() == 1:
        exit_function(code)
    dist.barrier()


def return_a_lambda():
    return lambda: None


def failure_of(ranks_of_two, function, *args, title):
    """The failure's message; checks its first line, and that the next call works
    in new processes.
    """
    before = ranks_of_two.run(pid_of_rank)
    with pytest.raises(RankFailure, match=title) as failure:
        ranks_of_two.run(function, *args)
    assert set(ranks_of_two.run(pid_of_rank)).isdisjoint(before)
    assert ranks_of_two.run(rank_and) == [(0, (), {}), (1, (), {})]
    return str(failure.value)


def test_a_rank_that_raises_is_reported_with_its_traceback(pair):
    text = failure_of(
        pair,
        raise_on_rank_1,
        title="raise_on_rank_1: rank 1 raised KeyError; rank 0 did not finish",
    )
    assert text.count("KeyError: 'lost'") == 1
    assert 'raise KeyError("lost")' in text
    assert "worker.py" not in text  # our own frames say nothing
    assert "in barrier" in text  # where rank 0 waited


def test_the_same_error_of_all_ranks_is_shown_once(pair):
    text = failure_of(pair, raise_on_every_rank, False, title="ranks 0, 1 raised ValueError")
    assert text.count("ValueError: all") == 1


def test_a_hang_is_reported_in_time_with_the_stack_of_each_rank():
    with RankPool(4, timeout=LIMIT) as four:
        four.run(rank_and)
        start = time.monotonic()
        with pytest.raises(RankFailure) as failure:
            four.run(hang_on_rank_1)
        assert LIMIT <= time.monotonic() - start < LIMIT + 5
        assert four.run(dist.get_rank) == [0, 1, 2, 3]
    waiting, hanging = str(failure.value).split("--- rank 1 did not finish within 2 s ---")
    assert "--- ranks 0, 2, 3 did not finish within 2 s ---" in waiting
    assert "in barrier" in waiting
    assert "in hang_on_rank_1" in hanging
    assert "in wait" in hanging


def test_a_killed_rank_is_named_with_its_signal(pair):
    failure_of(pair, kill_rank_1, title="kill_rank_1: rank 1 was killed by SIGKILL")


def test_a_crashed_rank_is_shown_with_its_stack_and_last_words(pair):
    text = failure_of(pair, crash_on_rank_1, title="crash_on_rank_1: rank 1 was killed by SIGABRT")
    assert "in crash_on_rank_1" in text
    assert "last words" in text


def test_a_rank_that_exits_is_named_with_its_code(pair):
    failure_of(pair, exit_on_rank_1, 0, os._exit, title="rank 1 exited with code 0")


def test_a_return_value_that_cannot_be_pickled_is_reported(pair):
    assert "return_a_lambda.<locals>.<lambda>" in failure_of(
        pair, return_a_lambda, title="ranks 0, 1 raised"
    )


needs_pidfd = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="waits for processes that are not its children"
)


# --- RankPool: no process is left behind ----------------------------------------------------------


def ended(pids):
    """Whether all processes end, waiting for them."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(handle):
            if not select.select([handle], [], [], ENOUGH)[0]:
                return False
    return True


def test_close_ends_the_processes_and_the_pool_can_be_used_again():
    reopened = RankPool(2)
    pids = reopened.run(pid_of_rank)
    reopened.close()
    assert ended(pids)
    assert set(reopened.run(pid_of_rank)).isdisjoint(pids)
    reopened.close()
    reopened.close()


SCRIPT = """
import os, signal, sys
import torch.distributed as dist
from shardkit.testing import RankPool

def hang(fifo):
    if dist.get_rank() == 0:
        signal.pause()
    print("hangs", file=open(fifo, "w"), flush=True)
    dist.barrier()

if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(os.getpid), pool._directory, flush=True)
    if len(sys.argv) > 1:
        pool.run(hang, sys.argv[1])
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "script.py"


def pids_and_directory(stdout):
    first, second, directory = stdout.readline().split()
    return [int(first), int(second)], directory


@needs_pidfd
def test_an_open_pool_ends_with_its_program(script):
    with subprocess.Popen([sys.executable, script], stdout=PIPE, stderr=PIPE, text=True) as parent:
        pids, directory = pids_and_directory(parent.stdout)
        _, errors = parent.communicate(timeout=ENOUGH)
    assert ended(pids)
    assert not os.path.exists(directory)
    assert (parent.returncode, errors) == (0, "")


@needs_pidfd
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_in_a_collective_end_when_their_parent_is_interrupted_or_killed(script, how):
    os.mkfifo(script.parent / "stdout")
    parent = forks.start(script.parent, script, script.parent / "fifo")
    with open(script.parent / "stdout") as stdout:
        pids, directory = pids_and_directory(stdout)
        with open(script.parent / "fifo") as fifo:
            assert fifo.readline() == "hangs\n"
        os.kill(parent.pid, how)
        parent.join(ENOUGH)
    assert ended(pids)
    assert not os.path.exists(directory)
    assert parent.exitcode == -how
    errors = (script.parent / "stderr").read_text()
    assert how is signal.SIGKILL or errors.strip().endswith("KeyboardInterrupt")
