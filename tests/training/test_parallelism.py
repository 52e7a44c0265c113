"""The programs of docs/parallelism.md train as one process does, and their checkpoints load into any
layout.
"""

import gc
import re
from pathlib import Path

import pytest
import torch
from cpu_ranks import on_ranks
from layouts import assert_equal, values_of
from memory_count import LiveStorages
from meshes import mesh_of
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from shardkit import MeshSpec, apply_plan, clip_grad_norm_, plan_model, shard_model
from shardkit._fsdp import fsdp_units
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.grads import global_token_count
from shardkit.memory import estimate
from shardkit.optim import step_on_local_shards
from shardkit.testing import comm_counts

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
PROGRAM = re.compile(r"```python\n(# torchrun --nproc-per-node 4 (\w+)\.py\n.*?)```", re.DOTALL)
PROGRAMS = {name: code for code, name in PROGRAM.findall(PAGE.read_text())}
READERS = {
    "tensor": 2,
    "pipeline": 2,
    "context": 2,
    "experts": 4,
}  # ranks with batches of their own


def in_float64(run, *args):
    """In float64 a wrong divisor cannot hide in rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run(*args)
    finally:
        torch.set_default_dtype(before)


def run_program(name, folder):
    """Run a program on this rank, with its checkpoints in a folder; return its names."""
    scope = {"__name__": "__main__"}
    code = PROGRAMS[name].replace('"runs/', f'"{folder}/')
    in_float64(exec, compile(code, f"{name}.py", "exec"), scope)
    return scope


def definitions(name):
    """Return the names of a program's classes and functions."""
    scope = {"__name__": "__main__"}
    exec(PROGRAMS[name].partition("mesh = init_device_mesh")[0], scope)
    return scope


def train_in_one_process(scope, readers):
    """Train the program's whole model on the batches of all its ranks."""
    torch.manual_seed(0)
    model = scope["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        loss, tokens = torch.zeros(()), torch.zeros(())
        for reader in range(readers):
            ids, labels = scope["batch"](step, reader)
            loss = loss + scope["summed_loss"](model(ids), labels)
            tokens = tokens + (labels != -100).sum()
        (loss / tokens).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


def assert_trained_alike(scope, whole):
    """Compare parameters and optimizer state; a stage has some of them."""
    values = values_of(scope["model"], scope["optimizer"])
    assert values
    for name, value in values.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12)


def test_every_program_of_the_page_is_run_here():
    assert PROGRAMS.keys() == READERS.keys()


@pytest.mark.parametrize("name", READERS)
@on_ranks(4)
def test_a_program_trains_as_one_process_does(name, tmp_path):
    scope = run_program(name, tmp_path)
    model, optimizer, norms = in_float64(train_in_one_process, scope, READERS[name])
    assert min(norms) > 0.5, "nothing to clip"
    assert [float(norm) for norm in scope["norms"]] == pytest.approx(norms, rel=1e-12)
    assert_trained_alike(scope, values_of(model, optimizer))
    if (tmp_path / name).exists():  # what it saved loads into the whole model
        load_checkpoint(tmp_path / name, model, optimizer)
        whole = values_of(model, optimizer)
        assert_equal(values_of(scope["model"], scope["optimizer"]), whole, some=True)


class WithGain(nn.Module):
    """A block with a scalar parameter, which shardkit replicates."""

    def __init__(self, block):
        super().__init__()
        self.block, self.gain = block, nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * self.block(x)


@pytest.mark.parametrize(
    ("schedule", "reshard"), [(ScheduleGPipe, True), (ScheduleInterleaved1F1B, False)]
)
@on_ranks(4)
def test_a_schedule_reduces_once_and_its_checkpoint_loads_without_stages_and_back(
    schedule, reshard, tmp_path
):
    in_float64(train_by_schedule, schedule, reshard, tmp_path)


def train_by_schedule(schedule, reshard, folder):
    """Train two stages, or with an interleaved schedule four of which each rank has two."""
    scope = definitions("pipeline")
    plain_model = scope["Model"]

    def model_with_gains():
        model = plain_model()
        for name, block in model.blocks.items():
            model.blocks[name] = WithGain(block)
        return model

    mesh = mesh_of((2, 2), "pp", "dp")
    pp, dp = mesh["pp"], mesh["dp"]
    is_interleaved = issubclass(schedule, PipelineScheduleMulti)
    numbers = [pp.get_local_rank()]
    if is_interleaved:
        numbers.append(pp.get_local_rank() + 2)

    def build():
        """Return this rank's stages, one module that has them under the names of the whole model,
        and their optimizer.
        """
        parts = nn.ModuleList()
        whole_names = nn.Module()
        whole_names.blocks = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(0)
            part = scope["cut"](model_with_gains(), number, 2 * len(numbers))
            parts.append(shard_model(part, mesh=dp, reshard_after_forward=reshard))
            whole_names.blocks.update(part.blocks)
        whole_names.embed, whole_names.head = parts[0].embed, parts[-1].head
        optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-2)
        return parts, whole_names, step_on_local_shards(optimizer)

    parts, model, optimizer = build()
    scope |= {"Model": model_with_gains, "model": parts}
    stages = []
    for number, part in zip(numbers, parts, strict=True):
        stages.append(
            PipelineStage(part, number, 2 * len(numbers), torch.device("cpu"), group=pp.get_group())
        )
    run = schedule(
        stages if is_interleaved else stages[0], 4, loss_fn=scope["mean_loss"], scale_grads=False
    )
    norms = []
    for step in range(3):
        ids, labels = scope["batch"](step, dp.get_local_rank())
        scope["tokens"] = global_token_count((labels != -100).sum(), parts)
        with comm_counts() as counts:
            run.step(ids) if stages[0].is_first else run.step(target=labels)
        norms.append(clip_grad_norm_(parts, 0.5, group=pp.get_group()).item())
        optimizer.step()
        optimizer.zero_grad()
    units = len(fsdp_units(parts))
    assert counts.reduce_scatters == units
    assert counts.all_gathers == (units * 5 if reshard else units)
    whole, whole_optimizer, expected = train_in_one_process(scope, readers=2)
    assert norms == pytest.approx(expected, rel=1e-12)
    assert_trained_alike(
        {"model": model, "optimizer": optimizer}, values_of(whole, whole_optimizer)
    )

    trained = values_of(model, optimizer)
    save_checkpoint(folder / "stages", model, optimizer)
    loaded = shard_model(model_with_gains(), sync_module_states=True)
    loaded_optimizer = torch.optim.AdamW(loaded.parameters())
    load_checkpoint(folder / "stages", loaded, loaded_optimizer)
    assert_equal(trained, values_of(loaded, loaded_optimizer), some=True)
    save_checkpoint(folder / "whole", loaded, loaded_optimizer)
    _, other, other_optimizer = build()
    load_checkpoint(folder / "whole", other, other_optimizer)
    assert_equal(values_of(other, other_optimizer), trained)


@on_ranks(4)
def test_the_peak_of_a_stage_is_its_estimate_and_the_activations_in_flight():
    scope = definitions("pipeline")
    mesh = mesh_of((2, 2), "pp", "dp")
    pp, dp = mesh["pp"], mesh["dp"]
    number = pp.get_local_rank()
    ids, labels = scope["batch"](0, dp.get_local_rank())
    part = scope["cut"](scope["Model"](), number, 2)
    plan = plan_model(part, mesh=MeshSpec((2,), ("dp",)), reshard_after_forward=False)
    given = {"batch": ids[:2], "optimizer": "sgd"}
    if number == 1:
        given["batch"] = torch.zeros(2, 10, 16, requires_grad=True)  # activations
        given["loss"] = lambda logits: scope["summed_loss"](logits, labels[:2])
    row = estimate(part, plan, micro_batches=4, **given)["ZeRO-2"]
    alone = estimate(part, plan, **given)["ZeRO-2"]
    ends = [p for p in alone.timeline if (p.moment, p.unit) == ("after forward", "(root)")]
    in_flight = 2 - number
    predicted = row.peak.total + (in_flight - 1) * ends[0].activations

    storages = LiveStorages()
    with storages.resizes(), storages:
        apply_plan(part, plan, dp)
        stage = PipelineStage(part, number, 2, torch.device("cpu"), group=pp.get_group())
        run = Schedule1F1B(stage, 4, loss_fn=scope["summed_loss"])
        for _ in range(2):  # the first step makes what later ones reuse
            gc.collect()
            before = storages.peak = storages.live
            run.step(ids) if stage.is_first else run.step(target=labels)
            part.zero_grad()
        shards = sum(param.to_local().nbytes for param in part.parameters())
    counted = storages.peak - before + shards
    received = 4 * torch.zeros(2, 10, 16).nbytes  # buffers that torch 2.15 makes in each step
    assert counted <= predicted + received
    assert predicted <= 1.05 * counted
