"""A training loop in which one rank does something else, and what ``watch`` must say of it."""

import faulthandler
import logging
import os
import re
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardkit import accumulate, by_name, clip_grad_norm_, shard_model
from shardkit.apply.mesh import build_mesh
from shardkit.plan import MeshSpec
from shardkit.watching import watch
from shardkit.watching.watcher import Watcher

WORLD = 4
STEP = 3  # in which one rank disagrees


class Expected(NamedTuple):
    """What the report's first line, and the line of the rank that disagrees, must match."""

    problem: str
    row: str = ""
    rank: int = 1  # that disagrees


def differ(others, rank_1):
    """The sentence about a call that all four ranks made."""
    return rf"ranks differ in call \d+: {others} on ranks 0, 2-3, {rank_1} on rank 1\. "


SILENT = r"silent for \d+ s; last known call: "
EXPECTED = {
    "skips a unit": Expected(
        differ("all-gather of tower", r"all-gather of layers\.2"),
        r"all-gather of layers\.2; .*py:\d+: x = layer\(x\), from",
    ),
    "skips a smaller unit": Expected(
        differ("all-gather of narrow", "all-gather of wide"),
        r"all-gather of wide; .*py:\d+: x = x \+ self\.wide",
    ),
    "clips to less": Expected(
        differ(r"clip_grad_norm_\(max_norm=1\.0.*\)", r"clip_grad_norm_\(max_norm=0\.5.*\)"),
        r"0\.5 if disagrees",
    ),
    "raises": Expected(
        differ(r"accumulate\(last=True.*\)", "raised ValueError"),
        "ValueError: bad sample; .*# raises",
    ),
    "is late": Expected(
        r"rank 1 did not make call \d+ within \d+ s",
        r"last call: reduce-scatter of layers\.0; .*time\.sleep",
    ),
    "is killed": Expected("rank 1 silent for", SILENT),
    "is late, then is killed": Expected("rank 1 silent for", SILENT),
    "first is stopped": Expected("rank 0 silent for", SILENT, rank=0),
}


class Net(nn.Module):
    """Layers of one size, so that gloo pairs gathers of different units, and units of others, where
    it aborts.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.tower = nn.Linear(16, 16)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(16, 4)

    def forward(self, x, kind=""):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i != 1:
                continue
            if kind != "skips a smaller unit":
                x = x + self.narrow(x).mean()
            x = x + self.wide(x).mean()
            if kind != "skips a unit":
                x = x + self.tower(x)
        return x


def step(model, kind):
    """One step; ``kind`` is empty unless this rank disagrees in it."""
    if kind == "raises":
        raise ValueError("bad sample")  # raises
    with accumulate(model, last=True):
        model(torch.randn(2, 16), kind).square().sum().backward()
    if kind == "is late":
        time.sleep(60)
    if kind == "is late, then is killed":
        time.sleep(2)  # and is reported as late
    if kind.endswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind.endswith("is stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)


def rank_of(kind, rank, folder, after, how, mesh):
    """Train as one rank; what is logged goes to the file of the rank."""
    output = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    faulthandler.disable()  # pytest's, which writes elsewhere when gloo aborts
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.basicConfig(format="%(created).2f %(message)s", stream=sys.stderr, force=True)
    torch.set_num_threads(1)
    rendezvous = (folder / "rendezvous").as_uri()
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    if how == "gpu":  # where calls are compared later
        Watcher._ask = lambda *_: None
    if how == "script":
        os.environ["SHARDKIT_WATCH"] = str(after)
    spec = MeshSpec.hybrid(*mesh) if len(mesh) == 2 else MeshSpec.sharded(*mesh)
    units = [by_name("layers.*"), by_name("tower"), by_name("wide"), by_name("narrow")]
    model = shard_model(Net(), units=units, mesh=build_mesh(spec))
    try:
        with watch(model, after=after, end=how == "end") if how != "script" else nullcontext():
            # else the loop may end before the report
            train(model, kind, rank, 2000 if how == "end" else 40)
    except BaseException as error:
        print(f"{time.time():.2f} {type(error).__name__}: {error}", file=sys.stderr)
    print("left", file=sys.stderr, flush=True)
    os._exit(0)


def train(model, kind, rank, steps):
    """Train, until this rank disagrees or longer."""
    for number in range(steps):
        disagrees = number == STEP and rank == EXPECTED[kind].rank
        if kind == "clips to less":
            clip_grad_norm_(model, 0.5 if disagrees else 1.0)
        step(model, kind if disagrees else "")
        time.sleep(0.02)


class Outcome(NamedTuple):
    """The last report, what each rank wrote, and each report's first line."""

    report: str
    output: list[str]
    logged: list[str]


def run(kind, folder, after=0.5, how="with", mesh=(WORLD,)):
    """Run all ranks until the report comes, or to their end if ``how`` is "end" or "wait", at most
    60 s.
    """
    context = get_context("forkserver")  # of forks.serve, which has imported torch
    ranks = []
    for rank in range(WORLD):
        arguments = (kind, rank, folder, after, how, mesh)
        ranks.append(context.Process(target=rank_of, args=arguments))
        ranks[-1].start()
    until = time.monotonic() + 60
    while time.monotonic() < until and any(rank.is_alive() for rank in ranks):
        if how in ("with", "script", "gpu") and is_named(kind, read(folder).report):
            break
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
        rank.join()
    return read(folder)


def read(folder):
    """Read what the ranks wrote."""
    files = [folder / str(rank) for rank in range(WORLD)]
    output = [file.read_text() if file.exists() else "" for file in files]
    reports = re.findall(r"^\d+\.\d+ (watch: .*(?:\n- .*)*)", "\n".join(output), re.MULTILINE)
    # On a busy machine ranks may also be late before the disagreement.
    last = reports[-1] if reports else ""
    return Outcome(last, output, [report.splitlines()[0] for report in reports])


def is_named(kind, report):
    """Whether the report names the rank and the unit or call."""
    expected = EXPECTED[kind]
    row = re.search(rf"^- rank {expected.rank}: (.*)", report, re.MULTILINE)
    if row is None or not re.search(expected.row, row[1]):
        return False
    return re.search(expected.problem, report.splitlines()[0]) is not None
