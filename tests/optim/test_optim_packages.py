"""Optimizers of packages: the unsharded step, and the same after a checkpoint on another mesh, or a refusal."""

from __future__ import annotations

import re

import pytest

from shardkit.testing import distributed

REFUSED = r"refused: .* Call step_on_whole_matrices\(optimizer\)\."
JOINED = r"refused: .*Use an element-wise one.*"
SUMMED = "(bits|within .*e-1[5-9]), resumed (bits|within .*e-1[5-9])"
# By name, what is expected of step_on_local_shards and of step_on_whole_matrices. All others: sweep_optimizers.py.
PACKAGES = {
    "came_pytorch.CAME": (REFUSED, "bits, resumed bits"),
    "madgrad": ("bits, resumed bits",) * 2,  # state under a name
    "aggmo": ("bits, resumed bits",) * 2,  # state in a list
    "shampoo": (REFUSED, "bits, resumed bits"),
    # A checkpoint does not keep the memory order of its preconditioners, by which products are rounded.
    "soap": (REFUSED, "bits, resumed (bits|within .*e-1[5-9])"),
    "prodigyopt.Prodigy": (JOINED, SUMMED),
    "prodigyopt.Prodigy(slice_p=3)": (JOINED, "refused: .*its step calls slice on a part of a parameter.*"),
    "dadaptlion": (JOINED, SUMMED),
    # Makes whole masks when it is built.
    "spam": (r"FAILS: ShardkitError: optimizer.state: a plain tensor of shape \(7, 12\) .*", "bits, resumed bits"),
    "stablespam": (REFUSED, "bits, resumed bits"),  # a state_dict of its own
}


@pytest.mark.parametrize("name", PACKAGES)
@distributed(world_size=2, backend="gloo")
def test_a_packages_optimizer(name):
    for package in ("came_pytorch", "prodigyopt", "pytorch_optimizer"):
        pytest.importorskip(package)
    import sweep_optimizers

    found = sweep_optimizers.both(dict(sweep_optimizers.optimizers())[name])
    for door, wanted in zip(("local", "whole"), PACKAGES[name], strict=True):
        assert re.fullmatch(wanted, found[door], re.DOTALL), found
