"""Never lost: killed at any point, on a full disk and on a read-only one, the previous checkpoint
loads.
"""

import concurrent.futures
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardkit.checkpoint
from shardkit.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from shardkit.errors import CheckpointError
from shardkit.testing import RankFailure, RankPool

SOURCES = str(Path(shardkit.checkpoint.__file__).parent)
KILLS = 20


def net(value, size=9):
    model = nn.Linear(size, size)
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def sharded(value, size=9):
    return fully_shard(net(value, size), mesh=mesh_of((2,)))


def value_of(path, size=9):
    """The one value that every element has; loading checks every checksum."""
    model = net(-1.0, size)
    extra = load_checkpoint(path, model)
    values = {value for param in model.parameters() for value in param.flatten().tolist()}
    assert values == {extra["value"]}
    return extra["value"]


# --- Killed ---------------------------------------------------------------------------------------


class Killer:
    """Counts lines of shardkit.checkpoint as this process executes them, and kills it at one of
    them.
    """

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self


def save_and_die(path, value, rank, at, **options):
    """Save, and be killed at the line number ``at`` of this rank; how many there were."""
    model = sharded(value)
    killer = Killer(at if dist.get_rank() == rank else None)
    threading.settrace(killer)  # for the thread of an asynchronous save
    sys.settrace(killer)
    try:
        save_checkpoint(path, model, extra={"value": value}, **options).wait()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return killer.seen


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, backend="gloo") as ranks:
        yield ranks


def listing(path):
    return sorted(os.listdir(path))


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (KILLS // 2, {}),
        (KILLS // 4, {"overwrite": True}),
        (KILLS // 4, {"async_": True, "keep": 1}),
    ],
    ids=["new", "overwrite", "async-keep"],
)
def test_killed_at_random_points_a_whole_checkpoint_loads(kills, options, tmp_path, pool):
    overwrite = "overwrite" in options
    second = tmp_path / "step-2"
    first = second if overwrite else tmp_path / "step-1"
    lines = pool.run(save_and_die, tmp_path / "dry" / "step-1", 1.0, 0, None, **options)
    assert min(lines) > 300
    draw = random.Random(f"{options}")
    outcomes = set()
    for kill in range(kills):
        save_checkpoint(first, net(1.0), extra={"value": 1.0}, overwrite=True)
        rank = kill % 2
        # As many points in the last lines of rank 0, where everything is put in place, as in all
        # others.
        at = draw.randint(1 if kill % 4 else lines[rank] - 150, lines[rank])
        with pytest.raises(RankFailure, match=r"was killed by SIGKILL"):
            pool.run(save_and_die, second, 2.0, rank, at, **options)
        found = first if overwrite else latest_checkpoint(tmp_path)
        outcomes.add(value_of(found))
        if not overwrite and found == first:
            assert not second.exists()
        save_checkpoint(second, net(3.0), extra={"value": 3.0}, overwrite=True)
        assert value_of(second) == 3.0
        assert not [name for name in listing(tmp_path) if name.startswith(".")], (
            f"left behind by rank {rank} at {at}"
        )
        if not overwrite:
            shutil.rmtree(second)
    assert 1.0 in outcomes


# --- No room, no permission -----------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@on_ranks(2)
def save_two(root, said, async_=False):
    """A small checkpoint, and a large one that fails on every rank."""
    if not (root / "step-1").exists():
        save_checkpoint(root / "step-1", sharded(1.0), extra={"value": 1.0})
    dist.barrier()
    with pytest.raises(CheckpointError, match=said):
        save_checkpoint(root / "step-2", sharded(2.0, size=400), async_=async_).wait()


@pytest.mark.parametrize("async_", [False, True])
def test_on_a_full_disk_all_ranks_raise_and_the_previous_one_loads(async_, small_disk):
    save_two(small_disk, r"No space left on device: '.*step-2\.tmp/model\.safetensors'", async_)
    assert listing(small_disk) == ["step-1"]
    assert value_of(latest_checkpoint(small_disk)) == 1.0


def test_on_a_read_only_disk_all_ranks_raise_and_the_previous_one_loads(small_disk):
    save_two(small_disk, "No space left on device")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    save_two(small_disk, "Read-only file system")
    assert value_of(latest_checkpoint(small_disk)) == 1.0  # loading needs to write nothing


@pytest.mark.parametrize(("function", "rank"), [("pwrite", 1), ("fsync", 1), ("pwrite", 0)])
@on_ranks(2)
def test_what_one_rank_meets_all_raise_with_its_reason(function, rank, tmp_path):
    save_checkpoint(tmp_path / "step-1", sharded(1.0), extra={"value": 1.0})
    original = getattr(os, function)

    def fails(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == rank:
        setattr(os, function, fails)
    try:
        with pytest.raises(
            CheckpointError, match=rf"rank {rank}: OSError: .*No space left on device"
        ):
            save_checkpoint(tmp_path / "step-2", sharded(2.0))
    finally:
        setattr(os, function, original)
    dist.barrier()
    assert listing(tmp_path) == ["step-1"]
    assert value_of(tmp_path / "step-1") == 1.0


@pytest.mark.parametrize("keep", [None, 2])
def test_a_disk_that_is_full_of_what_a_killed_save_left_recovers(keep, small_disk):
    draft = small_disk / ".step-2.tmp"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(bytes(200 << 10))
    save_checkpoint(small_disk / "step-2", net(1.0, size=180), extra={"value": 1.0}, keep=keep)
    assert listing(small_disk) == ["step-2"]
    assert value_of(small_disk / "step-2", size=180) == 1.0


# --- In the background ----------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from shardkit.checkpoint import save_checkpoint
save_checkpoint(sys.argv[1], torch.nn.Linear(3, 3), async_=True)
"""


def test_the_end_of_a_script_waits_for_the_save(tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "a")], check=True)
    assert latest_checkpoint(tmp_path) == tmp_path / "a"


def test_the_end_of_a_script_says_that_its_last_save_failed(tmp_path, gate, caplog):
    save_checkpoint(tmp_path / "a", net(1.0), async_=True)
    (tmp_path / "a").touch()  # a file, where the directory is to be
    gate[0].set()
    shardkit.checkpoint.background.pending().error()
    shardkit.checkpoint.background._report_unseen()
    assert "save_checkpoint: the last checkpoint was not saved: " in caplog.text
    with pytest.raises(
        CheckpointError, match=r"save_checkpoint failed \(NotADirectoryError: .*Not a directory"
    ):
        shardkit.checkpoint.background.pending().wait()
    assert listing(tmp_path) == ["a"]


@pytest.fixture
def gate(monkeypatch):
    """Writing waits for the event; what began and ended is listed, and the memory
    that was written.
    """
    opened, log, memory = threading.Event(), [], []
    original = shardkit.checkpoint.save.write_checkpoint

    def write(path, files, parts, *others, **options):
        log.append(f"begin {path.name}")
        memory.append({values.data_ptr() for _, (values, _) in parts if values.is_floating_point()})
        assert opened.wait(60)
        original(path, files, parts, *others, **options)
        log.append(f"end {path.name}")

    monkeypatch.setattr(shardkit.checkpoint.save, "write_checkpoint", write)
    return opened, log, memory


def test_saves_have_the_values_of_their_call_and_the_second_waits_for_the_first_and_uses_its_memory(
    tmp_path, gate
):
    opened, log, memory = gate
    model = net(1.0)
    handle = save_checkpoint(tmp_path / "a", model, extra={"value": 1.0}, async_=True)
    assert not handle.done()
    with pytest.raises(concurrent.futures.TimeoutError):  # the builtin one from Python 3.11 on
        handle.wait(0.001)
    model.load_state_dict(net(2.0).state_dict())
    second = threading.Thread(
        target=lambda: save_checkpoint(
            tmp_path / "b", model, extra={"value": 2.0}, async_=True
        ).wait()
    )
    second.start()
    second.join(0.1)
    opened.set()
    second.join(60)
    assert handle.done()
    assert log == ["begin a", "end a", "begin b", "end b"]
    assert [value_of(tmp_path / name) for name in "ab"] == [1.0, 2.0]
    assert memory[0] == memory[1]


@pytest.mark.parametrize("then", ["wait", "save", "load"])
def test_a_failure_is_raised_once_where_somebody_waits(then, tmp_path, monkeypatch):
    model = net(1.0)
    save_checkpoint(tmp_path / "good", model, extra={"value": 1.0})

    def write(*content, **options):
        raise CheckpointError("the disk broke")

    with monkeypatch.context() as patch:
        patch.setattr(shardkit.checkpoint.save, "write_checkpoint", write)
        handle = save_checkpoint(tmp_path / "a", model, async_=True)
    with pytest.raises(CheckpointError, match="the disk broke"):
        {
            "wait": handle.wait,
            "save": lambda: save_checkpoint(tmp_path / "b", model),
            "load": lambda: load_checkpoint(tmp_path / "good", model),
        }[then]()
    handle.wait()
    assert value_of(tmp_path / "good") == 1.0
    assert not (tmp_path / "b").exists()


@on_ranks(2)
def test_collectives_of_training_and_of_the_save_do_not_mix(tmp_path):
    model = sharded(1.0)
    handles = []
    for step in range(5):
        handles.append(
            save_checkpoint(tmp_path / f"step-{step}", model, extra={"value": 1.0}, async_=True)
        )
        for _ in range(20):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2
    handles[-1].wait()
    dist.barrier()
    assert all(value_of(tmp_path / f"step-{step}") == 1.0 for step in range(5))


@on_ranks(2)
def test_a_save_whose_group_is_gone_is_a_checkpoint_error(tmp_path):
    """As where destroy_process_group() did not wait for it; what it leaves behind goes with the
    next save.
    """
    original = shardkit.checkpoint.save.write_checkpoint

    def late(*content, **options):
        for group in list(shardkit.checkpoint.background._groups.values()):
            dist.destroy_process_group(group)
        shardkit.checkpoint.background._groups.clear()
        original(*content, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardkit.checkpoint.save, "write_checkpoint", late)
        handle = save_checkpoint(tmp_path / "a", sharded(1.0), async_=True)
        with pytest.raises(CheckpointError, match=r"before destroy_process_group\(\)"):
            handle.wait()
    assert not (tmp_path / "a").exists()
    dist.barrier()
    save_checkpoint(tmp_path / "a", sharded(1.0))
    assert listing(tmp_path) == ["a"]
