"""Every function of state in memory, in every layout of units: values to the bit, in and out."""

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from layouts import LAYOUTS, assert_equal, assert_plain_values, built, plain, stage, values_of
from meshes import mesh_of

from shardkit.checkpoint import named_full_tensors
from shardkit.grads import clip_grad_norm_
from shardkit.state import (
    full_optimizer_state_dict,
    full_params,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)


@pytest.mark.parametrize("layout", [*LAYOUTS, "stage"])
@on_ranks(4)
def test_every_function_gives_and_takes_the_plain_values(layout):
    layout = LAYOUTS.get(layout, stage)
    expected, some = values_of(*built(plain)), layout is stage
    net, optimizer = built(layout)
    state, moments = (
        full_state_dict(net, rank0_only=False),
        full_optimizer_state_dict(net, optimizer, rank0_only=False),
    )
    found = state | {
        f"{n}/{key}": value for n, entry in moments["state"].items() for key, value in entry.items()
    }
    assert_equal(found, expected, some=some)
    assert_equal(dict(named_full_tensors(net)), expected, some=True)
    with full_params(net, writeback=True):
        assert_equal(
            {name: param.detach().clone() for name, param in net.named_parameters()},
            expected,
            some=True,
        )
    lead, lead_moments = full_state_dict(net), full_optimizer_state_dict(net, optimizer)
    for src, given, entries in (("all", state, moments), ("rank0", lead, lead_moments)):
        other, stepped = built(layout, seed=2)
        load_full_state_dict(other, given, src=src)
        load_full_optimizer_state_dict(other, stepped, entries, src=src)
        assert_plain_values(other, stepped, layout)


@pytest.mark.parametrize("p", [2.0, 1.0, float("inf")])
@on_ranks(4)
def test_one_norm_across_stages(p):
    """As the plain model's; within the order of a sum of some hundred squares in float32."""
    group = mesh_of((2, 2), "pp", "dp")["pp"].get_group()
    whole, (net, _) = built(plain)[0], built(stage)
    for model in (whole, net):
        for param in model.parameters():
            if param.numel():  # torch has no infinity norm of nothing, nor gathers it
                param.grad = param.detach().clone()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0, p)
    apart = clip_grad_norm_(net, torch.inf, p)
    norm = clip_grad_norm_(net, 1.0, p, group=group)
    assert torch.allclose(norm, expected, rtol=1e-5, atol=0)
    assert norm > 1
    assert apart < expected or p == torch.inf
    wanted = {name: param.grad for name, param in whole.named_parameters()}
    for name, param in net.named_parameters():
        assert param.grad is None or torch.allclose(
            param.grad.full_tensor(), wanted[name], rtol=1e-5
        ), name
    assert len({float(each) for each in gathered(norm)}) == 1


def gathered(value):
    found = [value.clone() for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return found
