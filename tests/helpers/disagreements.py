"""A training loop in which one rank does something else, by kind, and what ``watch`` must say of it."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardkit import accumulate, by_name, clip_grad_norm_, full_state_dict, global_token_count, shard_model, watch
from shardkit.apply.mesh import build_mesh
from shardkit.plan import MeshSpec

WORLD, ODD, STEP = 4, 1, 3  # rank ODD disagrees in step STEP


class Kind(NamedTuple):
    """A disagreement: what the report's first line and the odd rank's own line must say."""

    problem: str
    row: str = ""
    odd: int = ODD


def on_rank_1(call: str) -> str:
    return rf"ranks differ in call \d+: .* on rank.*{call}.* on rank"  # the others' may be named first


def both(others: str, rank_1: str) -> str:
    """The two calls with their ranks: whoever reported first is named first, and one may be missing still."""
    of_others, of_rank_1 = rf"{others}[^(]* on ranks (0, [23]|2-3|0, 2-3)", rf"{rank_1}[^(]* on rank 1"
    return f"{of_others}.*{of_rank_1}|{of_rank_1}.*{of_others}"


KINDS = {
    "skips a unit": Kind(both("all-gather of tower", r"all-gather of layers\.2"), r"all-gather of layers\.2"),
    "other order": Kind(on_rank_1(r"all-gather of layers\.3"), r"layers\.3"),
    "other unit": Kind(on_rank_1("all-gather of spare"), "all-gather of spare"),
    "one more forward": Kind(on_rank_1(r"all-gather of layers\.0"), r"again|py:\d+, from"),
    "other last": Kind(both(r"accumulate\(last=True", r"accumulate\(last=False")),
    "clips alone": Kind(on_rank_1(r"clip_grad_norm_\(max_norm=1\.0"), "clips alone"),
    "clips to less": Kind(both(r"clip_grad_norm_\(max_norm=1\.0", r"clip_grad_norm_\(max_norm=0\.5")),
    "saves alone": Kind(on_rank_1(r"full_state_dict\(\)"), "saves alone"),
    "counts alone": Kind(on_rank_1(r"global_token_count\(\)"), "counts alone"),
    "fewer steps": Kind(on_rank_1("the end of the watch"), "the end of the watch"),
    "raises": Kind(on_rank_1("raised ValueError"), "ValueError: bad sample; .*raises"),
    "is late": Kind(
        r"rank 1 did not make call \d+ within \d+ s", r"last call: reduce-scatter of layers\.0; .*time\.sleep"
    ),
    "own barrier": Kind(r"rank 1 did not make call|ranks differ", "dist.barrier"),
    "is killed": Kind("rank 1 silent for", r"silent for \d+ s; last known call: "),
    "is stopped": Kind("rank 1 silent for", r"silent for \d+ s; last known call: "),
    "first is killed": Kind("rank 0 silent for", r"silent for \d+ s; last known call: ", odd=0),
    "first is stopped": Kind("rank 0 silent for", r"silent for \d+ s; last known call: ", odd=0),
}


class Net(nn.Module):
    """Layers of one size, so that gloo pairs gathers of different units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.tower, self.spare = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, kind: str = "") -> torch.Tensor:
        for i, layer in enumerate(reversed(self.layers) if kind == "other order" else self.layers):
            x = layer(x)
            if i == 1 and kind != "skips a unit":
                x = x + (self.spare if kind == "other unit" else self.tower)(x)
        return x


def step(model: nn.Module, kind: str) -> None:
    """One step; ``kind`` is empty unless this rank disagrees in it."""
    if kind == "raises":
        raise ValueError("bad sample")  # raises
    with accumulate(model, last=kind != "other last"):
        model(torch.randn(2, 16), kind).square().sum().backward()
    if kind == "one more forward":
        model(torch.randn(2, 16))  # again
    if kind == "clips alone":
        clip_grad_norm_(model, 1.0)  # clips alone
    if kind == "saves alone":
        full_state_dict(model)  # saves alone
    if kind == "counts alone":
        global_token_count(2, model)  # counts alone
    if kind == "is late":
        time.sleep(60)
    if kind == "own barrier":
        dist.barrier()
    if kind.endswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind.endswith("is stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)


def rank_of(kind: str, rank: int, folder: Path, after: float, how: str, mesh: tuple[int, ...]) -> None:
    """Train as one rank; what is logged goes to the file of the rank."""
    output = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.basicConfig(format="%(created).2f %(message)s", stream=sys.stderr, force=True)
    torch.set_num_threads(1)
    rendezvous = (folder / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    if how == "script":
        os.environ["SHARDKIT_WATCH"] = str(after)
    spec = MeshSpec.hybrid(*mesh) if len(mesh) == 2 else MeshSpec.sharded(*mesh)
    units = [by_name("layers.*"), by_name("tower"), by_name("spare")]
    model = shard_model(Net(), units=units, mesh=build_mesh(spec))
    try:
        with watch(model, after=after, end=how == "end") if how != "script" else nullcontext():
            train(model, kind, rank, 2000 if how == "end" else 40)  # else the loop may end before the report
    except BaseException as error:
        print(f"{time.time():.2f} {type(error).__name__}: {error}", file=sys.stderr)
    print("left", file=sys.stderr, flush=True)
    os._exit(0)


def train(model: nn.Module, kind: str, rank: int, steps: int) -> None:
    """Train, until this rank disagrees or longer."""
    for number in range(2 if kind == "fewer steps" and rank == ODD else steps):
        bad = number == STEP and rank == KINDS[kind].odd
        if bad:
            print(f"{time.time():.2f} bad", file=sys.stderr)
        if kind == "clips to less":
            clip_grad_norm_(model, 0.5 if bad else 1.0)
        step(model, kind if bad else "")
        time.sleep(0.02)
    print(f"{time.time():.2f} bad", file=sys.stderr)


class Outcome(NamedTuple):
    """The first report on any rank, how long after the disagreement, and what each rank wrote."""

    report: str
    seconds: float
    output: list[str]


def run(kind: str, folder: Path, after: float = 0.5, how: str = "with", mesh: tuple[int, ...] = (WORLD,)) -> Outcome:
    """Run all ranks until the report comes, at most 60 s; then end them. With ``how="end"`` wait for them to end."""
    context = get_context("forkserver")  # of forks.serve, which has imported torch
    args = [(kind, rank, folder, after, how, mesh) for rank in range(WORLD)]
    ranks = [context.Process(target=rank_of, args=each) for each in args]
    for each in ranks:
        each.start()
    until = time.monotonic() + 60
    outcome = Outcome("", float("nan"), [])
    while time.monotonic() < until and any(each.is_alive() for each in ranks):
        outcome = read(kind, folder)
        if how != "end" and is_named(kind, outcome.report):
            break
        time.sleep(0.05)
    for each in ranks:
        each.kill()
        each.join()
    return read(kind, folder) if how == "end" else outcome


def read(kind: str, folder: Path) -> Outcome:
    """Read what the ranks wrote: the report that fits, since a busy machine also makes ranks late, or the first."""
    output = [file.read_text() if (file := folder / str(rank)).exists() else "" for rank in range(WORLD)]
    reports = re.findall(r"^(\d+\.\d+) (watch: .*(?:\n- .*)*)", "\n".join(output), re.MULTILINE)
    began = re.search(r"^(\d+\.\d+) bad", "\n".join(output), re.MULTILINE)
    at, report = next((each for each in reports if is_named(kind, each[1])), reports[0] if reports else ("nan", ""))
    return Outcome(report, float(at) - float(began[1]) if began else float("nan"), output)


def is_named(kind: str, report: str) -> bool:
    """Whether the report names the rank and the unit or call."""
    first, *rows = report.splitlines() or [""]
    odd = [row for row in rows if re.match(rf"- rank {KINDS[kind].odd}: ", row)]
    return bool(re.search(KINDS[kind].problem, first)) and bool(odd) and bool(re.search(KINDS[kind].row, odd[0]))
