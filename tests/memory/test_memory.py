"""Predicted bytes are those that torch's own FSDP2 holds, counted in a fake world."""

import copy
import dataclasses

import pytest
import torch
import transformers
from memory_count import counted_peak
from small_models import Block, Decoder
from small_moe import MoE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from zoo import ZOO

from shardkit import (
    MeshSpec,
    MixedPrecisionPolicy,
    PlanError,
    accumulate,
    by_class,
    by_name,
    plan_model,
)
from shardkit.memory import estimate, plan_for_budget
from shardkit.memory.allocations import OptimizerBytes, timeline
from shardkit.memory.strategies import changed
from shardkit.memory.tracing import trace
from shardkit.sequence import tiled_loss
from shardkit.testing import fake_world

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TOKENS = torch.randint(0, 101, (3, 40))


# Of the models that need no values, one of each habit.
IN_SUITE = ["gemma2", "lora", "own_checkpointing", "resnet", "t5"]


def decoder(tied=False, layers=4):
    return Decoder(layers=layers, dim=24, vocabulary=101, tied=tied)


def mean(output):
    loss = getattr(output, "loss", None)
    loss = output if loss is None else loss
    return (loss if isinstance(loss, torch.Tensor) else loss[0]).float().square().mean()


def predicted_peak(model, plan, batch):
    step = trace(model, plan, batch, loss=mean)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    points = timeline(plan, step, OptimizerBytes.of("none"), buffers)
    return max(point.total for point in points) - step.batch_bytes


CASES = {
    "default": {},
    "tied": {},
    "tied, half precision": {"mp_policy": HALF},
    "half precision": {"mp_policy": HALF},
    "half precision, reduced in it": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    },
    "kept unsharded": {"reshard_after_forward": False},
    "all resharded": {"reshard_after_forward": True},
    "on fewer ranks": {"reshard_after_forward": 2, "mp_policy": HALF},
    "hybrid": {"mesh": MeshSpec.hybrid(2, 4), "mp_policy": HALF},
    "replicated": {"mesh": MeshSpec.hybrid(8, 1)},
    "alone": {"mesh": MeshSpec.sharded(1), "mp_policy": HALF},
    "checkpointed": {"checkpoint_activations": True},
    "selective": {"checkpoint_activations": "selective"},
    "checkpointed around units": {
        "units": ["layers.*.up", by_name("layers.*", checkpoint_activations=True)]
    },
    "prefetched": {"prefetch": 2, "mp_policy": HALF},
    "blocks only": {"units": by_class(Block)},
    "one unit": {"units": []},
    "float32 modules": {"float32": ["**norm", "head"], "mp_policy": HALF},
    "replicated modules": {"replicate": by_name("layers.1", "head"), "mp_policy": HALF},
}


@pytest.mark.parametrize("case", CASES)
def test_predicted_is_counted(case):
    model = decoder("tied" in case)
    plan = plan_model(model, **({"mesh": MeshSpec.sharded(8)} | CASES[case]))
    expected = predicted_peak(model, plan, TOKENS)
    assert counted_peak(model, plan, lambda m: mean(m(TOKENS)).backward()) == expected


def micro_steps(model, keep=None):
    for micro in range(3):
        with accumulate(model, last=micro == 2, keep_unsharded=keep):
            mean(model(TOKENS)).backward()


def partly_frozen(*frozen):
    model = decoder()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


@pytest.mark.parametrize("keep", [None, "frozen", True])
@pytest.mark.parametrize(
    "frozen", [(), ("embed", "layers.0", "layers.2")], ids=["all train", "frozen"]
)
def test_predicted_is_counted_with_micro_batches(frozen, keep):
    model = partly_frozen(*frozen)
    plan = plan_model(model, mesh=MeshSpec.sharded(8), mp_policy=HALF)
    # What ``accumulate`` keeps is as in a plan that keeps it.
    kept = [unit.name for unit in plan.units if keep and (keep is True or not plan.trains(unit))]
    keeping = changed(plan, kept, reshard_after_forward=False)
    options = {"optimizer": "none", "loss": mean, "micro_batches": 3}
    row = estimate(model, keeping, batch=TOKENS, **options)["ZeRO-3"]
    counted = counted_peak(model, plan, lambda m: micro_steps(m, keep))
    assert row.peak.total - TOKENS.nbytes == pytest.approx(counted, rel=0.001)


def test_a_budget_counts_what_micro_batches_keep():
    model = partly_frozen("embed", "layers.0", "layers.1")
    plan = plan_model(model, mesh=MeshSpec.sharded(8))
    options = {"batch": TOKENS, "loss": mean, "optimizer": "none"}
    weighed = {"plan": plan, "reserve": 0, "micro_batches": 3, **options}
    everything, *_, kept = plan_for_budget(model, "1GiB", **weighed).weighed
    choice = plan_for_budget(model, (everything.peak.total + kept.peak.total) // 2, **weighed)
    gathers = [
        plan.collectives(3).all_gathers for plan in (everything.plan, choice.plan, kept.plan)
    ]
    assert gathers[0] > gathers[1] > gathers[2] == 6
    assert counted_peak(model, choice.plan, micro_steps) == pytest.approx(
        choice.peak.total - TOKENS.nbytes, rel=0.001
    )


@pytest.mark.parametrize("case", ["default", "hybrid"])
def test_predicted_is_counted_on_other_dims(case):
    """torch copies what is not on dim 0 once more when it gathers, and when it reduces."""
    model = MoE(layers=3, dim=24, experts=3)
    plan = plan_model(model, **({"mesh": MeshSpec.sharded(8)} | CASES[case]))
    assert any(dict(unit.shard_dims).keys() & {"layers.0.experts.up"} for unit in plan.units)
    batch = TOKENS % 11
    expected = predicted_peak(model, plan, batch)
    on_dim_0 = dataclasses.replace(
        plan, units=tuple(dataclasses.replace(u, shard_dims=()) for u in plan.units)
    )
    assert predicted_peak(model, on_dim_0, batch) != pytest.approx(expected, rel=0.01)
    assert counted_peak(model, plan, lambda m: mean(m(batch)).backward()) == pytest.approx(
        expected, rel=0.001
    )


@pytest.mark.parametrize(
    "settings", [{}, {"mp_policy": HALF, "checkpoint_activations": "selective"}], ids=str
)
def test_predicted_is_counted_beside_tensor_parallelism(settings):
    """Ranks along "tp" have other columns, other tokens between the layers, and uneven vocabularies."""
    model, tokens = decoder(), Shard(1)
    layers = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
    }
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        for block in model.layers:
            parallelize_module(block, mesh["tp"], layers)
        parallelize_module(model, mesh["tp"], ends)
        plan = plan_model(model, mesh=mesh["dp"], example_batch=TOKENS, **settings)
        expected = predicted_peak(model, plan, TOKENS)
        counted = counted_peak(model, plan, lambda m: mean(m(TOKENS)).backward(), mesh["dp"])
        assert counted == expected
        held = [param.to_local().untyped_storage().nbytes() for param in model.parameters()]
        assert plan.held_bytes() == sum(held)


def test_predicted_is_counted_where_blocks_share_a_unit():
    """A unit inside of several blocks runs again in backward for each that is checkpointed."""
    model = decoder()
    for block in model.layers:
        block.up, block.down = model.layers[0].up, model.layers[0].down
    plan = plan_model(model, mesh=MeshSpec.sharded(8))
    weighed = {"plan": plan, "batch": TOKENS, "loss": mean, "optimizer": "none", "reserve": 0}
    most = plan_for_budget(model, "1GiB", **weighed).weighed[0].peak.total
    choice = plan_for_budget(model, int(0.8 * most), **weighed)
    assert {unit.checkpoint_activations for unit in choice.plan.units if unit.blocks} == {
        True,
        False,
    }
    counted = counted_peak(model, choice.plan, lambda m: mean(m(TOKENS)).backward())
    assert counted == pytest.approx(choice.peak.total - TOKENS.nbytes, rel=0.001)


@pytest.mark.parametrize("name", IN_SUITE)
def test_predicted_is_counted_in_the_zoo(name):
    entry = ZOO[name]
    model, batch = entry.build(), entry.batch(0)
    plan = plan_model(model, mesh=MeshSpec.sharded(4))
    expected = predicted_peak(model, plan, batch)
    counted = counted_peak(model, plan, lambda m: mean(m(**batch)).backward())
    # a few small tensors live a moment longer in one or the other
    assert counted == pytest.approx(expected, rel=0.01)


class Positive(nn.Module):
    """How many rows it returns depends on values."""

    def forward(self, x):
        return x[x[:, 0] > 0]


def test_what_reads_values_is_measured_on_copies():
    model = nn.Sequential(Positive(), nn.BatchNorm1d(8), nn.Dropout(), Block(), Block(), Block())
    batch = (torch.randn(64, 8),)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = plan_model(model, mesh=MeshSpec.sharded(4), example_batch=batch)
    expected = predicted_peak(model, plan, batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(PlanError, match="batch fails in the model on fake tensors"):
        trace(copy.deepcopy(model).to("meta"), plan, batch, loss=mean)
    assert expected == counted_peak(model, plan, lambda m: mean(m(*batch)).backward())


@pytest.mark.parametrize("policy", [True, "selective"])
def test_a_hub_config_that_asks_for_a_cache_is_traced_without(policy):
    """Checkpointed blocks would fill it twice; the model that runs has to be told so, the one that
    is planned not.
    """

    def build(**cache):
        config = transformers.LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_hidden_layers=4,
            **cache,
        )
        return transformers.LlamaForCausalLM(config)

    model, batch = build(), {"input_ids": TOKENS}
    assert model.config.use_cache is True
    plan = plan_model(model, mesh=MeshSpec.sharded(4), checkpoint_activations=policy)
    expected = predicted_peak(model, plan, batch)
    counted = counted_peak(build(use_cache=False), plan, lambda m: mean(m(**batch)).backward())
    assert counted == pytest.approx(expected, rel=0.001)
    assert model.config.use_cache is True


# Tiles.


class Llama(transformers.LlamaForCausalLM):
    """Without positions in the batch its attention has no mask, which fake tensors
    must not hide.
    """

    def forward(self, input_ids):
        hidden = self.model(input_ids, use_cache=False).last_hidden_state
        return tiled_loss(self.lm_head, hidden, input_ids, tiles=8)


TILES = {"**.mlp": 5}
IN_TILES = {
    "whole": {"units": ["model.layers.*"]},
    "tiles": {"units": "model.layers.*", "tiles": TILES},
    "checkpointed": {"units": [by_name("model.layers.*", checkpoint_activations=True)]},
    "checkpointed, tiles": {
        "units": by_name("model.layers.*", checkpoint_activations=True),
        "tiles": TILES,
    },
    "a unit, half precision": {
        "tiles": TILES,
        "units": ["**.mlp", "model.layers.0"],
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16),
    },
}


def test_predicted_is_counted_and_tiles_save():
    peaks, tokens = {}, torch.randint(31, (2, 150))
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=160,
        num_attention_heads=2,
        num_hidden_layers=2,
    )
    for name, arguments in IN_TILES.items():
        model = Llama(config)
        plan = plan_model(model, mesh=MeshSpec.sharded(8), **arguments)
        expected = predicted_peak(model, plan, tokens)
        peaks[name] = counted_peak(model, plan, lambda m: mean(m(tokens)).backward())
        assert expected == pytest.approx(peaks[name], rel=0.001), name
    # the activations of one tile, not of two MLPs
    assert peaks["tiles"] < 0.5 * peaks["whole"], peaks
    # not of the MLP of one block
    assert peaks["checkpointed, tiles"] < 0.6 * peaks["checkpointed"], peaks
