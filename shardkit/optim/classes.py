"""Which optimizers update each element from that element alone, and so may see a shard for a tensor."""

from __future__ import annotations

from torch.optim import Optimizer

from shardkit.errors import ShardkitError, message
from shardkit.optim.probe import difference

# Not element-wise, but its step on DTensors is right (torch 2.13; test_optim_classes.py). Adafactor, LBFGS, Lamb,
# CAME, Prodigy and bitsandbytes' optimizers fail there.
RUNS_ON_DTENSORS = ("Muon",)

SUBJECT = "optimizer"
RULE = "On a shard only an update that reads one element at a time is the update of the whole parameter"


def check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    """Raise unless the optimizer is seen to be element-wise, or cannot be tried and is vouched for. Local, pure."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    try:
        found = difference(optimizer)
    except Exception as error:  # whatever a class raises that was not made for plain copies
        if vouched:
            return
        problem = f"is {name}, which cannot be tried on small plain tensors: {type(error).__name__}: {error}"
        fix = "If its update is element-wise, say so with elementwise=True"
        raise ShardkitError(message(SUBJECT, problem, RULE, fix)) from error
    if found is not None:
        torchs = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")]
        runs = any(base in RUNS_ON_DTENSORS for base in torchs)
        fix = "Step it as it is, on DTensors" if runs else "Use an element-wise one, such as AdamW, Lion or SGD"
        problem = f"is {name}, whose {found!r} for a tensor differs from that for its halves"
        raise ShardkitError(message(SUBJECT, problem, RULE, fix))
