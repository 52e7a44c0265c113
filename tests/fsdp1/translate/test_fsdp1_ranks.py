"""shard_like_fsdp1 on four ranks: meshes from groups, values from meta and from the first rank,
errors on all.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from fsdp1_models import DIM, TOKENS, Decoder, fsdp1, hybrid_mesh, pairs
from small_models import Block, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from shardkit import PlanError, ShardkitError, init_on_meta
from shardkit.errors import TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1 import shard_like_fsdp1, translate_fsdp1
from shardkit.testing import assert_same_on_all_ranks

BLOCKS = {"auto_wrap_policy": ModuleWrapPolicy({Block})}


def built(offset=0.0):
    """A Decoder, all of whose values are ``offset`` larger on this rank."""
    model = Decoder()
    with torch.no_grad():
        for state in (*model.parameters(), *model.buffers()):
            state += offset
    return model


def states(model):
    """Parameters, full, and buffers."""
    states = dict(model.named_buffers())
    for name, param in model.named_parameters(remove_duplicate=False):
        states[name] = param.full_tensor() if isinstance(param, DTensor) else param.detach()
    return states


def assert_states(model, expected):
    own = states(model)
    assert own.keys() == expected.keys()
    for name, state in expected.items():
        assert torch.equal(own[name], state), name


class Scaled(nn.Module):
    """A layer times a number, which is replicated; ``generate`` reads a parameter of the root."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.out = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return self.scale * self.layer(x) @ self.out

    def generate(self, x):
        return x @ self.out


def mesh_of(model):
    return next(param.device_mesh for param in model.parameters() if isinstance(param, DTensor))


# Meshes.


@on_ranks(4)
def test_groups_and_meshes_become_the_mesh_of_the_plan():
    rank = dist.get_rank()
    nameless = init_device_mesh("cpu", (2, 2))
    replicate = [rank % 2, rank % 2 + 2]
    for given in (
        {"process_group": pairs()},
        {"device_mesh": nameless},
        {"device_mesh": hybrid_mesh()},
    ):
        mesh = mesh_of(shard_like_fsdp1(Decoder(), sharding_strategy="hybrid_shard", **given))
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert dist.get_process_group_ranks(mesh.get_group(0)) == replicate
    for strategy, shape in (("FULL_SHARD", (2,)), ("NO_SHARD", (2, 1))):
        mesh = mesh_of(
            shard_like_fsdp1(Decoder(), sharding_strategy=strategy, process_group=pairs()[1])
        )
        assert mesh.shape == shape
        assert mesh.mesh.flatten().tolist() == replicate
    mesh = mesh_of(shard_like_fsdp1(Decoder(), sharding_strategy="HYBRID_SHARD", ranks_per_node=2))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]


@on_ranks(4)
def test_groups_that_do_not_fit_are_refused():
    shard, replicate = pairs()
    line = init_device_mesh("cpu", (4,))
    for problem, arguments in {
        "together with process_group": {"process_group": shard, "device_mesh": line},
        "ProcessGroup, ProcessGroup for FULL_SHARD": {"process_group": (shard, replicate)},
        "ProcessGroup for HYBRID_SHARD": {"process_group": shard, "sharding_strategy": 4},
        "str for FULL_SHARD": {"process_group": "world"},
        r"shape \(4,\), but HYBRID_SHARD": {"device_mesh": line, "sharding_strategy": 4},
        r"shape \(2, 2\), but SHARD_GRAD_OP": {
            "device_mesh": hybrid_mesh(),
            "sharding_strategy": 2,
        },
    }.items():
        model = Decoder()
        before = snapshot(model)
        with pytest.raises(TranslationError, match=problem):
            shard_like_fsdp1(model, **arguments)
        assert snapshot(model) == before
    first = dist.new_group([0])
    if dist.get_rank():  # raises without waiting for rank 0
        with pytest.raises(
            TranslationError, match="process_group is int for FULL_SHARD on this rank"
        ):
            shard_like_fsdp1(Decoder(), process_group=first)


# Values.


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_states_are_those_of_the_first_rank(strategy):
    arguments = {
        "sharding_strategy": strategy,
        "ranks_per_node": 2,
        "sync_module_states": True,
        **BLOCKS,
    }
    expected = states(built(0.0))
    model = shard_like_fsdp1(built(float(dist.get_rank())), **arguments)
    assert_states(model, expected)
    assert model.head.weight is model.embed.weight
    ignored = built(float(dist.get_rank()))
    shard_like_fsdp1(ignored, ignored_modules=[ignored.layers[2]], **arguments)
    assert (
        ignored.layers[2].up.weight[0, 0] == expected["layers.2.up.weight"][0, 0] + dist.get_rank()
    )
    assert torch.equal(ignored.layers[1].up.weight.full_tensor(), expected["layers.1.up.weight"])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_one_real_rank_and_meta_elsewhere(strategy):
    """llama-recipes: rank 0 loads the model, the others make room, and everything comes from rank
    0.
    """
    real = dist.get_rank() == 0
    with torch.device("cpu" if real else "meta"):
        model = Decoder()
    whole = []

    def make_room(module):
        loose = [
            param
            for param in model.parameters()
            if not isinstance(param, DTensor) and not param.is_meta
        ]
        whole.append(sum(param.numel() for param in loose))
        module.to_empty(device="cpu", recurse=False)

    shard_like_fsdp1(
        model,
        sharding_strategy=strategy,
        ranks_per_node=2,
        sync_module_states=True,
        param_init_fn=None if real else make_room,
        **BLOCKS,
    )
    assert_states(model, states(Decoder()))
    assert model.head.weight is model.embed.weight
    assert isinstance(model, FSDPModule)
    # No rank ever holds more than one unit whole: a block, or the root's embedding and norm.
    largest = max(sum(param.numel() for param in Block(DIM).parameters()), TOKENS * DIM + 2 * DIM)
    assert bool(whole) != real
    assert max(whole, default=0) <= largest


@pytest.mark.parametrize("shard", [shard_like_fsdp1, FSDP])
@pytest.mark.parametrize("others", ["cpu", "meta"])
@on_ranks(2)
def test_replicated_parameters_are_those_of_the_first_rank_too(shard, others):
    device = others if dist.get_rank() else "cpu"
    with torch.device(device):
        model = nn.Sequential(*(Scaled(1.0 + dist.get_rank()) for _ in range(2)))

    def make_room(module):
        module.to_empty(device="cpu", recurse=False)

    shard(
        model,
        sync_module_states=True,
        auto_wrap_policy=ModuleWrapPolicy({Scaled}),
        param_init_fn=make_room if device == "meta" else None,
    )
    scales = [param.item() for param in model.parameters() if param.ndim == 0]
    assert scales == [1.0, 1.0]


@on_ranks(4)
def test_meta_models_are_reset_as_fsdp1_resets_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)) for _ in range(2)
            )
            self.head = nn.Linear(7, 3)

    policy = ModuleWrapPolicy({nn.Sequential})
    with torch.device("meta"):
        ours, theirs = Net(), Net()
    torch.manual_seed(3)
    shard_like_fsdp1(ours, auto_wrap_policy=policy)
    torch.manual_seed(3)
    wrapped = fsdp1(theirs, auto_wrap_policy=policy, use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        expected = {
            name.replace("_fsdp_wrapped_module.", ""): state.clone()
            for name, state in states(wrapped).items()
        }
    assert_states(ours, expected)


@on_ranks(4)
def test_a_recorded_model_gets_the_values_of_its_construction():
    for arguments in (
        {},
        {"sync_module_states": True, "mixed_precision": MixedPrecision(buffer_dtype=torch.float16)},
    ):
        with init_on_meta():
            model = Decoder()
        translate_fsdp1(model, **BLOCKS, **arguments).apply(model)
        expected = states(Decoder())
        if arguments:
            expected["positions"] = expected["positions"].half()
        assert_states(model, expected)


@on_ranks(4)
def test_a_recorded_model_gets_the_values_of_the_first_rank_that_is_real():
    def build():
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    expected = states(build())
    if dist.get_rank() == 0:
        model = build()
        model.load_state_dict(expected)
    else:
        with init_on_meta():
            model = build()
    shard_like_fsdp1(model, sync_module_states=True, auto_wrap_policy={nn.Linear})
    from_first = {}
    for name, state in expected.items():
        from_first[name] = state.clone()
        dist.broadcast(from_first[name], 0)
    assert_states(model, from_first)


@on_ranks(2)
def test_the_code_of_a_translation_broadcasts_the_values_of_the_first_rank():
    translation = translate_fsdp1(Decoder(), sync_module_states=True, **BLOCKS)
    model = built(float(dist.get_rank()))
    exec(compile(translation.to_python(), "translated", "exec"), {"model": model})
    assert_states(model, states(built(0.0)))


# Training.


@on_ranks(2)
def test_what_runs_in_training_is_as_after_shard_model():
    torch.manual_seed(0)
    plain = Scaled()
    model = copy.deepcopy(plain)
    replaced = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_like_fsdp1(model, auto_wrap_policy={nn.Linear})
    with torch.no_grad():
        assert torch.equal(model.generate(torch.ones(2, 4)), plain.generate(torch.ones(2, 4)))
    outputs = []
    for either in (plain, model):
        optimizer = torch.optim.SGD(either.parameters(), lr=0.1)
        either(torch.ones(2, 4)).sum().backward()
        if either is model:
            with pytest.raises(ShardkitError, match="that sharding has replaced"):
                replaced.step()
        with torch.no_grad():
            either(torch.ones(2, 4))  # leaves the root unsharded, with values of before the step
        optimizer.step()
        outputs.append(either(torch.ones(2, 4)))
    torch.testing.assert_close(*outputs)


# Errors.


def fails(error, match, model, **arguments):
    with pytest.raises(error, match=match) as caught:
        shard_like_fsdp1(model, **arguments)
    assert_same_on_all_ranks(torch.tensor([ord(letter) for letter in type(caught.value).__name__]))


@on_ranks(4)
def test_what_one_rank_is_told_otherwise_is_an_error_on_all():
    differs = dist.get_rank() == 2
    model = Decoder()
    before = snapshot(model)
    fails(
        PlanError,
        "differs from rank 0 in .*reshard_after_forward of unit",
        model,
        sharding_strategy="SHARD_GRAD_OP" if differs else "FULL_SHARD",
        **BLOCKS,
    )
    fails(
        PlanError,
        "rank 2 differs from rank 0 in sync_module_states",
        model,
        sync_module_states=differs,
    )
    precision = MixedPrecision(
        torch.bfloat16, buffer_dtype=torch.bfloat16 if differs else torch.float32
    )
    fails(PlanError, "rank 2 differs from rank 0 in buffer_dtype", model, mixed_precision=precision)
    with pytest.raises(
        TranslationError if differs else PlanError, match="auto_wrap_policy 3 raised TypeError"
    ):
        shard_like_fsdp1(model, auto_wrap_policy=3 if differs else None)
    if differs:
        model.register_buffer("more", torch.ones(2))
    for sync in (True, False):
        fails(PlanError, "rank 2 differs from rank 0 in more", model, sync_module_states=sync)
    if differs:
        del model.more
    assert snapshot(model) == before


@on_ranks(4)
def test_an_initializer_that_fails_or_is_missing_is_an_error_on_all():
    def make(module, differs):
        if differs and isinstance(module, nn.Embedding):
            raise OSError("no such file")
        module.to_empty(device="cpu", recurse=False)

    with torch.device("meta"):
        first, second, third = Decoder(), Decoder(), Block()
        third.scale = nn.Parameter(torch.ones(3))
    differs = dist.get_rank() == 1
    fails(
        TranslationError,
        "OSError: no such file",
        first,
        param_init_fn=functools.partial(make, differs=differs),
        **BLOCKS,
    )
    fails(
        TranslationError,
        "on the meta device after param_init_fn was called",
        second,
        param_init_fn=lambda module: None,
        **BLOCKS,
    )
    before = snapshot(third)
    fails(TranslationError, "has no reset_parameters", third)
    assert snapshot(third) == before


@on_ranks(2)
def test_buffers_on_meta_of_ignored_modules_cannot_be_broadcast():
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    fails(
        TranslationError,
        r"1\.running_mean.* on the meta device .* ignored modules",
        model,
        sync_module_states=True,
        ignored_modules=[model[1]],
    )
