"""``@on_ranks(4)``: a test on four ranks of the CPU, connected by gloo also where there are GPUs."""

from shardkit.testing import distributed


def on_ranks(number, timeout=60):
    return distributed(world_size=number, backend="gloo", timeout=timeout)
