"""Carrying out a plan: what changes in the model, what must not, and how a script starts."""

import copy
import pathlib
import re
import sys
import weakref
from datetime import timedelta
from functools import partial
from unittest import mock

import forks
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from meshes import mesh_of
from small_models import Decoder, step
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit import MeshSpec, PlanError, ranks, set_gradient_reduction, shard_model
from shardkit._fsdp import fsdp_units
from shardkit._torch import set_timeout, torch_version
from shardkit.apply import mesh, shard
from shardkit.sequence import training_mesh
from shardkit.testing import comm_counts, distributed, fake_world


def test_it_returns_the_same_model_in_place():
    model = Decoder()
    modules, keys = dict(model.named_modules()), list(model.state_dict())
    with fake_world(8):
        assert shard_model(model, checkpoint_activations=True, compile=True) is model
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == keys == [name for name, _ in model.named_parameters()]
    assert isinstance(model, FSDPModule)
    assert isinstance(model, Decoder)
    assert isinstance(model.head.weight, DTensor)


def test_only_a_few_numbers_are_exchanged():
    with (
        fake_world(8),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
        comm_counts() as counted,
    ):
        model = shard_model(Decoder(), mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)))
    assert counted.all_gathers == 0
    # All have a plan; it is the same, and so are shapes and values; all have succeeded, twice.
    values = 16 * len(list(model.parameters()))
    sent = [call.args[0].nbytes for call in reduce.call_args_list]
    assert sent == [8, 16, 16, values, 8, 8]


def test_few_calls_for_each_parameter():
    """Sharding 10,000 parameters takes at most 1.3 of the CPU time of ``fully_shard`` by hand: 127
    calls for each.
    """

    def calls(blocks):
        found, library = list[str](), str(pathlib.Path(mesh.__file__).parents[1])
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(blocks)))
        sys.setprofile(
            lambda frame, event, _: found.append(
                event * frame.f_code.co_filename.startswith(library)
            )
        )
        try:
            shard_model(model)
        finally:
            sys.setprofile(None)
        return found.count("call")

    with fake_world(2):
        assert calls(60) - calls(10) < 135 * 100


@distributed(world_size=4)
def test_beside_tensor_parallelism():
    """A 2x2 mesh: blocks split over "tp" by torch, sharded over "dp" by shardkit, against the plain
    model.
    """
    torch.manual_seed(0)
    plain = Decoder(dim=12)
    model = copy.deepcopy(plain)
    mesh = mesh_of((2, 2), "dp", "tp")
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_model(model, mesh=mesh["dp"])
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            step(each)
            optimizer.step()
            optimizer.zero_grad()
    weights = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        full = param.full_tensor()
        # Two halves of a product are summed by tp, where the plain model sums once: a few roundings
        # of 2**-24.
        assert torch.allclose(full, weights[name], rtol=0, atol=2e-6), name
    assert not torch.equal(plain.layers[0].up.weight, torch.zeros_like(plain.layers[0].up.weight))


@distributed(world_size=4)
def test_dtensors_on_all_axes():
    """As with torchtitan's ``full_dtensor``: batch and loss are DTensors too."""
    mesh = mesh_of((2, 2), "dp", "tp")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=False)).double()
    model = copy.deepcopy(plain)
    for layer, dim in ((model[0], 0), (model[2], 1)):
        for name, param in list(layer.named_parameters()):
            full = distribute_tensor(param.data, mesh, [Replicate(), Shard(dim)])
            setattr(layer, name, nn.Parameter(full))
    mixed = copy.deepcopy(model)
    mixed[0].bias = nn.Parameter(plain[0].bias.data.clone())
    for net, on in ((model, mesh), (mixed, mesh["dp"])):
        with pytest.raises(PlanError, match=r'over .*dp.* already.*Pass mesh=world_mesh\["dp"\]'):
            shard_model(net, mesh=on)
    if torch_version() < (2, 12):  # which has no dp_mesh_dims
        return
    batch = torch.arange(24).view(4, 6).double() / 24
    own = distribute_tensor(batch, mesh, [Shard(0), Replicate()])
    shard_model(model, mesh=mesh["dp"], units=["0", "2"], example_batch=own)
    set_gradient_reduction(model, "sum")  # the loss is that of all ranks
    for net, x in ((model, own), (plain, batch)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected)


# Forks end by os._exit: on a busy machine one exit in ten aborts in torch 2.13 ("terminate called
# without an active exception"), also without shardkit and after destroy_process_group, while gloo's
# threads end.
SCRIPT = """
import atexit, os, torch, torch.nn as nn
from shardkit import shard_model

torch.manual_seed(0)
model = shard_model(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weight = model[2].weight.full_tensor()
if torch.distributed.get_rank() == 0:
    print(torch.distributed.get_world_size(), weight.sum().item(), flush=True)
torch.distributed.barrier()
if torch.distributed.get_world_size() == 1:
    atexit._run_exitfuncs()
    print(torch.distributed.is_initialized(), flush=True)
"""


def run_script(tmp_path, *launcher):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = forks.python(*launcher, script)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


@distributed(world_size=4)
def test_groups_that_are_made_have_the_timeout_of_the_process_group():
    before = timeout_of(dist.group.WORLD)
    set_timeout(timedelta(seconds=77), dist.group.WORLD)
    try:
        by_node = fsdp_units(shard_model(nn.Linear(4, 4), mesh=MeshSpec.hybrid(2, 2)))[0]
        split = training_mesh(sp=2).get_group("sp")
    finally:
        set_timeout(before, dist.group.WORLD)
    groups = [by_node.mesh_info.shard_process_group, by_node.mesh_info.replicate_process_group]
    groups += [split]
    assert [group.size() for group in groups] == [2] * 3
    assert {timeout_of(group) for group in groups} == {timedelta(seconds=77)}
    # torch's own
    assert timeout_of(init_device_mesh("cpu", (2, 2)).get_group(0)) == timedelta(minutes=30)


def test_one_script_alone_and_under_torchrun(tmp_path):
    alone, said = run_script(tmp_path)
    assert alone[::2] == ["1", "False"], (
        "our group is destroyed before the interpreter takes it down"
    )
    assert said.count("no process group and no torchrun, so this process trains alone") == 1
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    forked = ["--run-path", "--start-method=fork"]  # so that ranks need not import torch
    together, said = run_script(tmp_path, *launcher, *forked)
    assert together[0] == "2"
    assert "trains alone" not in said
    # the mean of two equal gradients
    assert float(together[1]) == pytest.approx(float(alone[1]), abs=1e-6)


LAST = """
import torch
from shardkit import shard_model

torch.manual_seed(0)
model = shard_model(torch.nn.Linear(4, 4))  # it keeps the group, and so gloo's threads, after the group is destroyed
for _ in range(20):
    torch.distributed.all_reduce(torch.ones(1000))
"""


def test_a_program_may_end_with_a_collective(tmp_path):
    """Ranks in new interpreters, since a fork ends otherwise: gloo's threads may not free tensors
    in one that is ending.
    """
    script = tmp_path / "last.py"
    script.write_text(LAST)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = forks.python(*launcher, script)
    assert done.returncode == 0, done.stderr


def test_fake_tensors_can_be_sharded_and_trained():
    """As memory trackers do it: nothing is computed, and still the ranks agree for real."""
    with fake_world(8), FakeTensorMode():
        model = Decoder()
        shard_model(model)
        step(model)
        assert model.head.weight.grad.placements == model.head.weight.placements


class Devices:
    """Several CUDA devices: which is selected, in place of torch.accelerator's."""

    def __init__(self, patch, count, selected=0):
        self.selected, self.is_started = selected, False
        patch.setattr(torch.accelerator, "device_count", lambda: count)
        patch.setattr(torch.accelerator, "current_device_index", self.current)
        patch.setattr(torch.accelerator, "set_device_index", partial(setattr, self, "selected"))
        for module in (mesh, ranks):
            patch.setattr(module, "accelerator", lambda: "cuda")
        for name in (*mesh._LOCAL_RANKS, "RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)

    def current(self):
        """torch starts CUDA here; it does not where it counts devices."""
        self.is_started = True
        return self.selected


def test_the_local_rank_is_what_the_launcher_calls_it(monkeypatch):
    names = mesh._LOCAL_RANKS

    def selected(count, rank):
        devices.selected = 0
        mesh._select_device(rank)
        return devices.selected

    devices = Devices(monkeypatch, 8)
    assert selected(8, 13) == 5, "where nobody says it, ranks fill one host after the other"
    for name in reversed(names):
        monkeypatch.setenv(name, str(names.index(name)))
        assert selected(8, 13) == names.index(name)
    devices = Devices(monkeypatch, 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert selected(1, 13) == 0, "each rank is shown its own device only"
    assert devices.is_started, "or a DeviceMesh selects LOCAL_RANK"


@pytest.mark.parametrize(("chosen", "expected"), [(0, 3), (2, 2)])
def test_a_group_of_the_program_gets_its_device_before_the_first_tensor(
    monkeypatch, chosen, expected
):
    """NCCL's ranks on one device are an error; a mesh selects only before tensors are made."""
    with fake_world(8, rank=3):
        devices = Devices(monkeypatch, 8, chosen)
        first = []

        def stop(*args):
            first.append(devices.selected)
            raise PlanError("far enough")

        monkeypatch.setattr(shard, "raise_on_all_ranks", stop)
        with pytest.raises(PlanError, match="far enough"):
            shard_model(Decoder())
        assert first == [expected]


def test_a_process_alone_keeps_the_device_it_selected(monkeypatch):
    devices = Devices(monkeypatch, 8, 1)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    made = mock.Mock(side_effect=RuntimeError("far enough"))
    monkeypatch.setattr(torch.distributed, "init_process_group", made)
    with pytest.raises(RuntimeError, match="far enough"):
        shard_model(Decoder())
    assert devices.selected == 1
    assert devices.is_started, "or a DeviceMesh warns that no device is selected"


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS is 8"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2"),
        # a shell of salloc and the script of sbatch, which are one process each
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_a_launcher_without_variables_of_torchrun_is_refused(monkeypatch, variables, refused):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if refused is None:
        shard_model(Decoder())
        torch.distributed.destroy_process_group()
        return
    with pytest.raises(PlanError, match=rf"^{refused}, .* `srun .*torchrun .* MASTER_PORT"):
        shard_model(Decoder())
    assert not torch.distributed.is_initialized()


def test_only_a_group_of_ours_is_destroyed_at_exit(monkeypatch):
    with fake_world(2):
        ours = weakref.ref(torch.distributed.group.WORLD)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "last_value", ValueError(), raising=False)
            mesh._destroy(ours)
        assert torch.distributed.is_initialized(), "an error ends the process"
    with fake_world(2):
        mesh._destroy(ours)
        assert torch.distributed.is_initialized(), "a later group, which somebody else made"


def test_ignored_parameters_that_train_are_said_to(caplog):
    ranks._warned.clear()
    with fake_world(2):
        shard_model(Decoder(), ignored_params=["head.weight"])
    assert re.search(r"head.weight trains outside of all units.*All-reduce", caplog.text)
