"""Two optimizers on the same awkward model, for tests of stepping on local shards."""

import functools
from collections.abc import Callable

import torch
from grads_net import sharded_net
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

# Every element-wise optimizer of torch, with the options that give it another kind of state.
OPTIONS = {
    "ASGD": {"t0": 2.0, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
PLAIN_ONLY = [  # what torch does not have for DTensors
    ("Adagrad", {"fused": True}),
    ("Rprop", {"foreach": False}),
    ("Rprop", {"foreach": True}),
    ("SGD", {"fused": True}),
]


def factory(name, **options):
    return functools.partial(getattr(torch.optim, name), lr=0.05, **{**OPTIONS[name], **options})


def trainable(net):
    return [param for param in net.parameters() if param.requires_grad]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same_parameters(net, other):
    for (name, param), expected in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(param), local(expected)), name


def assert_same_state(optimizer, other):
    """The same keys, classes, placements and bits, parameter for parameter."""
    pairs = zip(optimizer.param_groups, other.param_groups, strict=True)
    params = [
        pair
        for ours, theirs in pairs
        for pair in zip(ours["params"], theirs["params"], strict=True)
    ]
    known = {id(param) for param, _ in params}
    assert all(id(key) in known for key in optimizer.state), (
        "state under something else than a parameter"
    )
    for param, theirs in params:
        state, expected = optimizer.state[param], other.state[theirs]
        assert state.keys() == expected.keys()
        for key, value in state.items():
            assert type(value) is type(expected[key]), key
            if isinstance(value, DTensor):
                assert value.placements == expected[key].placements == param.placements
                assert (value.shape, value.stride()) == (
                    expected[key].shape,
                    expected[key].stride(),
                )
            if isinstance(value, Tensor):
                assert value.dtype == expected[key].dtype
                assert torch.equal(local(value), local(expected[key])), key
            else:
                assert value == expected[key]


def two_nets(shape=(4,), **options):
    return sharded_net(shape, **options), sharded_net(shape, **options)
