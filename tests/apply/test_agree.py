"""Ranks that would do different things, start from different values, or fail: one error on every
rank, unchanged.
"""

import logging
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from small_models import Block, Decoder, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardkit import (
    MeshSpec,
    PlanError,
    apply_plan,
    full_state_dict,
    init_on_meta,
    materialize,
    plan_model,
    ranks,
    shard_model,
)
from shardkit._torch import torch_version
from shardkit.apply import shard as apply
from shardkit.errors import ShardkitError
from shardkit.fsdp1 import shard_like_fsdp1
from shardkit.ranks import raise_on_all_ranks
from shardkit.testing import assert_same_on_all_ranks, distributed, fake_world


def raised_by(call):
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value)


@distributed(world_size=4)
def test_ranks_with_different_plans():
    model = Decoder()
    before = snapshot(model)
    reshard = dist.get_rank() != 2
    text = raised_by(lambda: shard_model(model, reshard_after_forward=reshard))
    assert snapshot(model) == before
    texts = [""] * 4
    dist.all_gather_object(texts, text)
    assert texts == [text] * 4
    assert "rank 2 differs from rank 0 in reshard_after_forward of unit " in text
    assert "reshard_after_forward of unit layers.1 (false instead of true)" in text
    return texts


@distributed(world_size=4)
def test_ranks_with_different_models_on_two_axes():
    model = Decoder(vocabulary=11 + (dist.get_rank() == 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    text = raised_by(lambda: shard_model(model, mesh=mesh))
    assert "rank 3 differs from rank 0 in parameter embed.weight (" in text
    assert '(["embed.weight", [12, 8]' in text


@distributed(world_size=4)
def test_an_error_on_one_rank_is_raised_by_all():
    model = Decoder()
    if dist.get_rank() == 1:
        model = nn.ReLU()
    text = raised_by(lambda: shard_model(model))
    assert "model has no parameters to shard" in text
    assert ("- rank 1: PlanError: model has" in text) == (dist.get_rank() != 1)

    def rule(fqn, module):
        return {0: fqn == "norm"}[dist.get_rank()]

    text = raised_by(lambda: shard_model(Decoder(), units=rule))
    assert "3 of 4 ranks failed" in text
    assert "- rank 3: KeyError: 3" in text
    shard_model(Decoder())  # and the group still works


# Where torch cannot shard a model.


class Whole(torch.Tensor):
    """A tensor class without an operator that splits it, as torchao's int8 weights."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            raise NotImplementedError(f"Whole: {func}")
        return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].inner))


def whole():
    model = Decoder()
    for layer in model.layers[1:]:
        layer.up.weight = nn.Parameter(Whole(layer.up.weight.detach()), requires_grad=False)
    return model


def test_a_tensor_that_cannot_be_split_is_named():
    model = whole()
    with (
        fake_world(2),
        pytest.raises(PlanError, match=r"^layers.1.up.weight could not .* build it again.*Whole"),
    ):
        shard_model(model)
    with fake_world(2):
        shard_model(whole(), ignored_params=["layers.1.up.weight", "layers.2.up.weight"])


@pytest.mark.skipif(torch_version() >= (2, 13), reason="this torch shards integers")
def test_integers_that_torch_cannot_shard_are_named():
    model = Decoder()
    model.norm.register_parameter("codes", nn.Parameter(torch.arange(8), requires_grad=False))
    with fake_world(2), pytest.raises(PlanError, match=r"^norm\.codes could not .*ignored_params"):
        shard_model(model)


@pytest.mark.parametrize("reshard", [None, 2])
@distributed(world_size=4, timeout=60)
def test_a_failure_of_one_rank_is_one_of_all(reshard):
    """For an int fully_shard makes process groups, and the next unit's would wait for a rank that
    failed.
    """
    fully_shard = apply.fully_shard

    def fails(*args, **kwargs):
        fully_shard(*args, **kwargs)
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")

    with (
        mock.patch.object(apply, "fully_shard", fails),
        pytest.raises(PlanError, match="out of memory"),
    ):
        shard_model(Decoder(), units=Block, reshard_after_forward=reshard)
    shard_model(Decoder(), units=Block, reshard_after_forward=reshard)


# Values.


class Odd(nn.Module):
    """Every kind of tensor that a sample is taken of; three tensors of it do not differ between
    seeds.
    """

    def __init__(self):
        super().__init__()
        self.ones = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.randn(40, 3).t())  # not contiguous
        self.frozen = nn.Parameter(torch.randn(7, 2).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("phases", torch.randn(6, dtype=torch.complex64).conj())
        self.register_buffer("mask", torch.rand(64) > 0.5)
        self.register_buffer("count", torch.randint(2**40, ()))
        self.register_buffer("broken", torch.full((4,), torch.nan))
        self.register_buffer("wide", torch.randn(1, 3).expand(20, 3), persistent=False)
        self.register_buffer("empty", torch.randn(0, 3))


def seeded(cls, seed):
    torch.manual_seed(seed)
    return cls()


@distributed(world_size=2)
def test_different_seeds_are_named_or_the_first_ranks_values_taken():
    rank = dist.get_rank()
    model, reference = seeded(Odd, rank), seeded(Odd, 0)
    before = snapshot(model)
    plan = plan_model(model)
    for call in (
        lambda: shard_model(model),
        lambda: apply_plan(model, plan),
        lambda: shard_like_fsdp1(model),
    ):
        text = raised_by(call)
        assert text.startswith(
            "weight has different values on rank 1 than on rank 0; 6 of 9 parameters and buffe"
        )
        assert "torch.manual_seed(0)" in text
        assert "sync_module_states=True" in text
        assert snapshot(model) == before
    shard_model(model, sync_module_states=True)
    found, expected = full_state_dict(model, rank0_only=False), reference.state_dict()
    for name, value in {**expected, "wide": reference.wide}.items():
        held = model.wide if name == "wide" else found[name]
        assert torch.equal(held.nan_to_num(7), value.nan_to_num(7)), name
    apply_plan(seeded(Odd, rank), plan, sync_module_states=True)
    shard_model(seeded(Odd, 0))  # the same values need neither


@distributed(world_size=2)
def test_what_may_differ_and_what_may_not():
    rank = dist.get_rank()
    own = seeded(Odd, 0)
    own.weight.data += rank
    shard_model(own, ignored_params=[own.weight])  # each rank's own
    assert own.weight[0, 0].item() == seeded(Odd, 0).weight[0, 0].item() + rank

    more = seeded(Odd, 0)
    if rank:
        more.register_buffer("more", torch.ones(2))
    text = raised_by(lambda: shard_model(more))
    assert "differs from rank 0 in more ((2,) of torch.float32 instead of nothing)" in text
    assert "in sync_module_states (" in raised_by(
        lambda: shard_model(seeded(Odd, 0), sync_module_states=rank == 1)
    )

    with mock.patch("torch.__version__", "2.14.0" if rank else "2.13.0"):
        text = raised_by(lambda: shard_model(seeded(Odd, 0)))
    assert "rank 1 differs from rank 0 in torch (2.14.0 instead of 2.13.0)" in text

    sparse = seeded(Odd, 0)
    sparse.register_buffer("graph", torch.eye(3).to_sparse())
    assert "cannot broadcast graph" in raised_by(
        lambda: shard_model(sparse, sync_module_states=True)
    )
    shard_model(sparse)


@distributed(world_size=2)
def test_meta_on_some_ranks_is_left_alone_and_cannot_be_broadcast_to():
    def build():
        if dist.get_rank() == 0:
            return seeded(Decoder, 0)
        with init_on_meta():
            return seeded(Decoder, 1)

    text = raised_by(lambda: shard_model(build(), sync_module_states=True))
    assert "embed.weight ((11, 8) of torch.float32 on the meta device instead of (" in text
    model = shard_model(build())
    assert model.head.weight.is_meta == (dist.get_rank() == 1)
    torch.manual_seed(0)
    with init_on_meta():
        model = Decoder()
    materialize(shard_model(model, sync_module_states=True))  # nothing to broadcast
    assert torch.equal(model.head.weight.full_tensor(), seeded(Decoder, 0).head.weight)


@distributed(world_size=4)
def test_replicas_and_tensor_parallel_ranks():
    rank = dist.get_rank()
    for arguments in ({"mesh": MeshSpec.hybrid(2, 2)}, {"mesh": mesh_of((2, 2))}):
        text = raised_by(
            lambda arguments=arguments: shard_model(seeded(Decoder, rank // 2), **arguments)
        )
        assert text.startswith("embed.weight has different values on rank 2, 3 than on rank 0")
        model = shard_model(seeded(Decoder, rank), sync_module_states=True, **arguments)
        for name, param in seeded(Decoder, 0).named_parameters():
            held = model.get_parameter(name)
            assert_same_on_all_ranks(held.full_tensor())
            assert torch.equal(held.full_tensor(), param), name

    mesh = mesh_of((2, 2), "dp", "tp")

    def parallel(off):
        model = seeded(Decoder, 0)
        for layer in model.layers:
            parallelize_module(
                layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        # in its own part alone, so that the ranks of the other part see no difference themselves
        if off:
            model.layers[1].up.weight.to_local().data += 1
        return model

    model = parallel(off=False)
    assert isinstance(model.layers[0].up.weight, DTensor)
    shard_model(model, mesh=mesh["dp"])  # parts differ along tp, as they must
    text = raised_by(lambda: shard_model(parallel(off=rank == 3), mesh=mesh["dp"]))
    assert "layers.1.up.weight has different values on rank 3 than on rank 1; 1 of" in text
    model = shard_model(parallel(off=rank == 1), mesh=mesh["dp"], sync_module_states=True)
    theirs = 1.0 if mesh["tp"].get_local_rank() else 0.0
    whole = model.layers[1].up.weight.full_tensor()
    expected = seeded(Decoder, 0).layers[1].up.weight
    assert torch.equal(whole[8:], expected[8:] + 1) or not theirs
    assert torch.equal(whole[:8], expected[:8])


def parallel_over(mesh, seed):
    model = seeded(Decoder, seed)
    model.register_buffer("scale", torch.rand(3))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


@distributed(world_size=4)
def test_what_tensor_parallelism_replicates_is_equal_on_its_ranks_too():
    """Plain parameters and buffers, and DTensors that are replicated, such as a row-wise bias."""
    mesh = mesh_of((2, 2), "dp", "tp")
    along_tp = mesh["tp"].get_local_rank()
    text = raised_by(lambda: shard_model(parallel_over(mesh["tp"], along_tp), mesh=mesh["dp"]))
    assert text.startswith("embed.weight has different values on rank 1, 3 than on rank 0; ")
    only_a_bias = parallel_over(mesh["tp"], 0)
    only_a_bias.layers[1].down.bias.to_local().data += along_tp
    text = raised_by(lambda: shard_model(only_a_bias, mesh=mesh["dp"]))
    assert text.startswith("layers.1.down.bias has different values on rank 1, 3 than on rank 0; 1")

    model = parallel_over(mesh["tp"], dist.get_rank())
    shard_model(model, mesh=mesh["dp"], sync_module_states=True)
    for name, param in seeded(Decoder, 0).named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), param), name
    assert torch.equal(model.scale, parallel_over(mesh["tp"], 0).scale)


@distributed(world_size=4)
def test_a_model_of_other_tensor_parallel_ranks_is_an_error():
    """Their plans are not compared, since their parts may differ; names and shapes must not."""
    mesh = mesh_of((2, 2), "dp", "tp")
    model = parallel_over(mesh["tp"], 0)
    if mesh["tp"].get_local_rank():
        model.norm.bias = None
    text = raised_by(lambda: shard_model(model, mesh=mesh["dp"]))
    assert re.search(r"ranks 1, 3 differ from rank 0 in norm.bias \(nothing instead of", text)

    def fails(fqn, module):
        if dist.get_rank() == 3:
            raise KeyError(fqn)
        return fqn == "norm"

    model = parallel_over(mesh["tp"], 0)
    assert "KeyError" in raised_by(lambda: shard_model(model, units=fails, mesh=mesh["dp"]))


@distributed(world_size=2)
def test_one_element_of_what_stays_whole_is_compared_too():
    """A sample would pass it, and these values would differ for ever."""
    for name in ("norm.weight", "table"):
        model = Decoder(dim=64)
        model.register_buffer("table", torch.zeros(40, 3))
        state = model.get_parameter(name) if "." in name else model.table
        with torch.no_grad():
            state.view(-1)[11] += dist.get_rank()
        text = raised_by(lambda model=model: shard_model(model, replicate="norm"))
        assert text.startswith(f"{name} has different values on rank 1 than on rank 0; 1 of")


# An error of one rank is an error of all.


def fail_on(failing, error, groups):
    with raise_on_all_ranks(groups):
        if not groups or dist.get_rank() == failing:
            raise error


@distributed(world_size=4)
def test_groups_that_overlap_carry_a_reason_to_every_rank():
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with pytest.raises(ShardkitError, match="rank 1: ValueError: odd"):
        fail_on(1, ValueError("odd"), [rows[rank // 2], columns[rank % 2]])


@distributed(world_size=4)
def test_a_rank_that_waits_for_others_says_so():
    texts = []
    heard = logging.Handler()
    heard.emit = lambda record: texts.append(record.getMessage())
    ranks.logger.addHandler(heard)
    patience, ranks.PATIENCE = ranks.PATIENCE, 0.0
    try:
        with raise_on_all_ranks([None], call="save_checkpoint"):
            if dist.get_rank() != 0:
                time.sleep(1)
        ranks.PATIENCE = 1e6
        with raise_on_all_ranks([None], call="load_checkpoint"):
            pass
    finally:
        ranks.PATIENCE = patience
        ranks.logger.removeHandler(heard)
    if dist.get_rank() == 0:
        assert texts[0].startswith(
            "save_checkpoint has waited 0 s on rank 0 for other ranks. The call is"
        )
    assert not any(text.startswith("load_checkpoint") for text in texts)
