"""full_state_dict and sharded_state_dict: what state_dict() of the unsharded model gives, on the
right ranks.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of as zoo_mesh
from state_models import LAYOUTS, OTHERS, Net, assert_same_state, fsdp, seeded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit.checkpoint import named_full_tensors
from shardkit.errors import ShardkitError
from shardkit.state import (
    full_params,
    full_state_dict,
    load_full_state_dict,
    sharded_state_dict,
)

# Equal to the plain model's state.


@pytest.mark.parametrize("layout", OTHERS)
@on_ranks(4)
def test_it_is_the_state_of_the_plain_model(layout):
    expected = seeded(Net).state_dict()
    model = LAYOUTS[layout](seeded(Net))
    live = sharded_state_dict(model)
    assert list(live) == list(expected)
    assert isinstance(live["blocks.0.up.weight"], DTensor) == (layout != "plain")
    found = full_state_dict(model)
    if dist.get_rank():
        assert found == {}
    else:
        assert_same_state(found, expected)
        assert found["head.weight"] is found["embed.weight"]
        assert found._metadata == expected._metadata
    everywhere = full_state_dict(model, rank0_only=False)
    assert_same_state(everywhere, expected)
    for value in everywhere.values():  # a copy
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert_same_state(full_state_dict(model, rank0_only=False), expected)
    live["blocks.0.up.weight"].zero_()
    assert not full_state_dict(model, rank0_only=False)["blocks.0.up.weight"].any()


# Where, and in what dtype.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["plain", "tensor_parallel"])
@on_ranks(4)
def test_dtype_is_of_floating_point_tensors(layout, dtype):
    found = full_state_dict(LAYOUTS[layout](seeded(Net)), dtype=dtype, rank0_only=False)
    for name, value in seeded(Net).state_dict().items():
        if isinstance(value, torch.Tensor):
            expected = value.to(dtype) if value.is_floating_point() else value
            assert found[name].dtype == expected.dtype, name
            assert torch.equal(found[name], expected), name
    assert found["head.weight"] is found["embed.weight"]


@on_ranks(4)
def test_no_values_no_state():
    with torch.device("meta"):
        model = fsdp(Net())
    with pytest.raises(
        ShardkitError, match=r"embed\.weight, .* on the meta device\. .*Materialize the model"
    ):
        full_state_dict(model)


@on_ranks(2)
def test_arguments_that_differ_between_ranks_are_named_on_every_rank():
    model = fully_shard(nn.Linear(4, 4), mesh=zoo_mesh((2,)))
    state = full_state_dict(model, rank0_only=False)
    odd = dist.get_rank() == 1
    src, dtype = ("all", torch.bfloat16) if odd else ("rank0", None)

    calls = {
        "rank0_only": lambda: full_state_dict(model, rank0_only=odd),
        r"dtype \(torch.bfloat16 instead of None": lambda: full_state_dict(model, dtype=dtype),
        "bucket_bytes": lambda: next(named_full_tensors(model, bucket_bytes=8 + odd)),
        "src": lambda: load_full_state_dict(model, state, src=src),
        "with_grads": lambda: full_params(model, with_grads=odd).__enter__(),
    }
    for argument, call in calls.items():
        with pytest.raises(ShardkitError, match=f"^rank 1 differs from rank 0 in {argument}"):
            call()
    with pytest.raises(
        ShardkitError, match=r"rank 1 differs from rank 0 in .*writeback \(nothing instead of false"
    ):
        full_state_dict(model) if odd else full_params(model).__enter__()
    assert_same_state(full_state_dict(model, rank0_only=False), state)


def test_a_quantized_weight_without_its_scales_is_refused():
    """As bitsandbytes keeps them: on the module, and in its state under names of their own."""
    layer = nn.Linear(4, 4, bias=False)
    layer.quant_state = object()
    with pytest.raises(ShardkitError, match=r"^weight has no scales in state_dict"):
        full_state_dict(layer)
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    layer.state = SimpleNamespace(SCB=None)
    with pytest.raises(ShardkitError, match=r"0\.weight has no scales in state_dict"):
        full_state_dict(nn.Sequential(layer))
    layer.register_buffer("SCB", torch.ones(4))
    assert set(full_state_dict(nn.Sequential(layer))) == {"0.weight", "0.SCB"}
