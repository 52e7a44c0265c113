"""Compare the sharded training with the plain one: the differences, their bounds, and the reason for each bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardkit.demo.train import LEARNING_RATE, Run

Bound = tuple[float, str]  # the largest difference allowed, and why
EXACT: dict[str, Bound] = {
    "losses": (0, "the arithmetic is the same"),
    "final weights": (0, "the arithmetic is the same"),
    # Each shard's norm is a float32 sum of up to 33,000 squares, in 8 lanes or more: 33,000 / 8 roundings of 6e-8,
    # half of that after the root. Seen: 6e-6.
    "clip norms": (1e-4, "relative; float32 against float64"),
}
# With more than two ranks, or on a GPU, gradients are summed in another order, and training amplifies such roundings:
# 8e-7 in a weight after 60 steps on 3 ranks, 4e-5 after 150. A wrong or missing gradient moves weights by whole AdamW
# steps, three times this bound each.
ROUNDED: dict[str, Bound] = {
    "losses": (1e-3, "nats; gradients are summed in another order"),
    "final weights": (LEARNING_RATE / 3, "a third of an AdamW step; likewise"),
    "clip norms": (1e-2, "relative; of slightly different gradients"),
}
MOST_STEPS = 150  # where roundings grow


def is_exact(device_type: str, ranks: int) -> bool:
    """Return whether the arithmetic is the same on both sides: a sum of two does not depend on their order."""
    return device_type == "cpu" and ranks <= 2


@dataclass(frozen=True)
class Check:
    """The largest difference found, the largest allowed, and why; prints as a line."""

    name: str
    difference: float
    bound: float
    reason: str

    @property
    def holds(self) -> bool:
        """Whether the difference is within the bound; False for nan."""
        return self.difference <= self.bound

    def __str__(self) -> str:
        verdict = "ok" if self.holds else "FAILED"
        return f"  {self.name:13}  {self.difference:<9.3g}  {f'at most {self.bound:g}, {self.reason}':55}  {verdict}"


def compare(device_type: str, ranks: int, sharded: Run, plain: Run) -> list[Check]:
    """Return the checks of a sharded run against a plain one."""
    norms = torch.stack(sharded.norms) / torch.stack(plain.norms)
    found = {
        "losses": _difference(torch.stack(sharded.losses), torch.stack(plain.losses)),
        "final weights": max(_difference(sharded.weights[fqn], weight) for fqn, weight in plain.weights.items()),
        "clip norms": _difference(norms, torch.ones_like(norms)),
    }
    bounds = EXACT if is_exact(device_type, ranks) else ROUNDED
    return [Check(name, difference, *bounds[name]) for name, difference in found.items()]


def compare_resumed(losses: list[float], expected: list[float]) -> Check:
    """Return the check of a resumed training against the one that was not interrupted."""
    difference = _difference(torch.tensor(losses), torch.tensor(expected))
    return Check("losses", difference, ROUNDED["losses"][0], "nats; the batch is split, so summed, differently")


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; nan if there is one."""
    assert one.shape == other.shape
    return (one.cpu() - other.cpu()).abs().max().item()
