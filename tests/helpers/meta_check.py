"""Comparing a materialized model with ordinary construction, bit for bit, on whatever ranks there
are.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shardkit.meta import init_on_meta, materialize

Build = Callable[[], nn.Module]


def shard(model, **kwargs):
    """Every child that has a forward and parameters of its own is a unit, and the root has the
    rest.

    FSDP2 takes no scalars (CLIP's logit_scale): they stay whole, and are materialized all the same.
    """
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    if sum(1 for _ in model.parameters()) == len(
        {p for c in model.children() for p in c.parameters()}
    ):
        for child in model.children():
            owned = {p for p in child.parameters() if p.ndim}
            others = {p for c in model.children() if c is not child for p in c.parameters()}
            if (
                owned
                and not owned & others
                and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            ):
                fully_shard(child, ignored_params=scalars, **kwargs)
    return fully_shard(model, ignored_params=scalars, **kwargs)


def build_sharded(build, **kwargs):
    """Build under init_on_meta and shard."""
    with init_on_meta():
        model = build()
    return shard(model, **kwargs)


def check_same_as_ordinary(build, seed=11, **kwargs):
    """Build both ways from one seed, and compare values, ties, requires_grad and the random state
    afterwards.
    """
    torch.manual_seed(seed)
    plain = build()
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build_sharded(build, **kwargs)
    before = {
        name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    assert materialize(model) is model
    assert before == {
        name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    assert torch.equal(after, torch.get_rng_state()), (
        "the random state is not the one after ordinary construction"
    )
    assert differences(plain, model) == []
    return model


def both(build, seed=3):
    """A model of ordinary construction, and a materialized one from the same seed."""
    torch.manual_seed(seed)
    plain = build()
    torch.manual_seed(seed)
    return plain, materialize(build_sharded(build))


def net():
    """The smallest model that has two units."""
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


def differences(plain, model):
    """Names of parameters and buffers of which this rank's part is not bit for bit the same, or not
    tied alike.
    """
    different = []
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(plain, kind)(remove_duplicate=False))
        actual = dict(getattr(model, kind)(remove_duplicate=False))
        if expected.keys() != actual.keys():
            return [f"({kind}: other names)"]
        assert (
            any(isinstance(value, DTensor) for value in actual.values()) or kind == "named_buffers"
        )
        shared = {}
        for name, tensor in expected.items():
            tied = shared.setdefault(id(tensor), id(actual[name])) == id(actual[name])
            if not (tied and same(tensor, actual[name])):
                different.append(name)
    return different


def same(plain, actual):
    """Whether this rank's part of a tensor is that of a plain one, with its dtype and
    requires_grad.
    """
    if plain.requires_grad != actual.requires_grad or plain.shape != actual.shape:
        return False
    if isinstance(actual, DTensor):
        # torch's own way of cutting; without a source rank it does not communicate.
        expected = distribute_tensor(
            plain.detach(), actual.device_mesh, actual.placements, src_data_rank=None
        )
        local = actual.to_local().detach()
        # a collective sends plain memory
        return same_bits(expected.to_local(), local) and not local.is_conj()
    return same_bits(plain.detach(), actual.detach())


def same_bits(a, b):
    """Equal in dtype, device, shape and every bit, NaN and -0.0 included."""
    if a.dtype != b.dtype or a.device != b.device or a.shape != b.shape:
        return False
    a, b = (
        tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for tensor in (a, b)
    )
    return torch.equal(a, b)
