"""Optimizers of packages: the unsharded step, and the same after a checkpoint on another mesh, or a refusal."""

from __future__ import annotations

import re

import pytest

from shardkit.testing import distributed

JOINED = r"FAILS: ShardkitError: optimizer changed '\w+' in group 0 to .*"
# By name, what is expected of step_on_local_shards(elementwise=True), None where that is no promise that its user could
# make, and of step_on_whole_matrices. All others: sweep_optimizers.py.
PACKAGES = {
    "came_pytorch.CAME": (None, "bits, resumed bits"),
    "madgrad": ("bits, resumed bits",) * 2,  # state under a name
    "aggmo": ("bits, resumed bits",) * 2,  # state in a list
    "shampoo": (None, "bits, resumed bits"),
    # A checkpoint does not keep the memory order of its preconditioners, by which products are rounded.
    "soap": (None, "bits, resumed (bits|within .*e-1[5-9])"),
    "prodigyopt.Prodigy": (None, JOINED),
    "dadaptlion": (None, JOINED),
    "spam": (None, "bits, resumed bits"),  # makes whole masks when it is built
    "stablespam": (None, "bits, resumed bits"),  # a state_dict of its own
}


@pytest.mark.parametrize("name", PACKAGES)
@distributed(world_size=2, backend="gloo")
def test_a_packages_optimizer(name):
    for package in ("came_pytorch", "prodigyopt", "pytorch_optimizer"):
        pytest.importorskip(package)
    import sweep_optimizers

    found = sweep_optimizers.both(dict(sweep_optimizers.optimizers())[name])
    for door, wanted in zip(("local", "whole"), PACKAGES[name], strict=True):
        assert wanted is None or re.fullmatch(wanted, found[door], re.DOTALL), found
