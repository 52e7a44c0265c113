"""Seconds of GPU that a group needs, before it has run: arithmetic, with guesses that are written
down here.

A step takes its operations at 40 % of an H200's peak (60 % of what FSDP2 reaches elsewhere is not
compute-bound code), a third more where blocks are recomputed, and a twentieth of that rate in
float32, which has no tensor cores.
"""

from __future__ import annotations

from benchmarks.models import SHAPES
from benchmarks.train.case import Case
from benchmarks.train.flops import per_token
from benchmarks.train.group import Group

# operations a second, bfloat16 or float32 (datasheet: 67e12)
RATE = {True: 0.40 * 989e12, False: 0.70 * 67e12}
# CUDA's context, first kernels of each library; imports happen while the last group is measured
PROCESS = 4.0
# a model on meta, its shards, and freeing them
BUILD = {"tiny": 0.1, "1B": 1.0, "7B": 1.5, "8B": 1.5, "70B": 3.0}
# the first time for a block's shape, cold cache; there is one kind of block, and a loss
COMPILE = 20.0
AGAIN = 8.0  # the same from the cache on disk
OFFLOADED = 1.5  # copies to and from the CPU, and its AdamW, for a rank of 8 of 8B
DISK = 60.0  # 16 GB written and read twice, at about 1 GB/s
OTHERS = {"outside": 15.0, "disk": DISK, "ceilings": 4.0}


def seconds(group: Group) -> float:
    """Of one group, from its start to its end."""
    if group.kind in OTHERS:
        return PROCESS + OTHERS[group.kind]
    compiled = [_compiled(case) for case in group.cases]
    first = [shape not in compiled[:number] for number, shape in enumerate(compiled)]
    return PROCESS + sum(
        _of_case(group, case, new) for case, new in zip(group.cases, first, strict=True)
    )


def step(case: Case) -> float:
    """Of one training step."""
    shape = SHAPES[case.model.removeprefix("hf-")]
    again = {"none": 1.0, "selective": 1.15, "unit": 4 / 3}[case.checkpointing]
    compute = per_token(shape, case.sequence).full * case.tokens * again / RATE[case.bf16]
    return compute + (OFFLOADED if case.offload else 0.03)


def _compiled(case: Case) -> tuple[object, ...]:
    """What blocks of a case are compiled for; another case with the same finds it in the cache on
    disk.
    """
    return case.model, case.sequence, case.micro_batch, case.checkpointing, case.bf16


def _of_case(group: Group, case: Case, new: bool) -> float:
    builds = {"each": 1, "apart": group.rounds, "together": 2}[group.kind]
    compiles = (COMPILE if new else AGAIN) + AGAIN * (builds - 1) if case.compile else 0.0
    switches = group.rounds if group.kind == "together" else 0
    steps = (
        builds * group.warm_up + group.rounds * group.steps + switches + (case.name in group.watch)
    )
    return builds * BUILD[case.model.removeprefix("hf-")] + compiles + steps * step(case)
