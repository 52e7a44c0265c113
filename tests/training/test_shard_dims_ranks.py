"""Experts on another dim than 0 train like one process, and save, load and initialize to the bit.

``tests/helpers/sweep_dims.py`` has the cases, and more of them to run by hand.
"""

import pytest
import sweep_dims

from shardkit.testing import distributed

IN_SUITE = ["hsdp", "bf16 wire", "meta", "state"]


@pytest.mark.parametrize("name", IN_SUITE)
@distributed(world_size=4, backend="gloo")
def test_on_other_dims(name):
    sweep_dims.run_case(name)
