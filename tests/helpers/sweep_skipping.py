"""Random patterns of skipped units: the gradients of one plain model, and the predicted collectives, on every rank.

Run by hand, about ten minutes: ``python tests/helpers/sweep_skipping.py [--ranks 4] [--steps 1000]``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
from typing import Any

import torch
import torch.distributed as dist
from skipping_nets import Net, Straight, Tower, batch, largest_difference, net
from torch import nn

from shardkit import CPUOffloadPolicy, MeshSpec, accumulate, by_name, plan_model, shard_model
from shardkit.apply.mesh import build_mesh
from shardkit.testing import RankPool, comm_counts
from shardkit.testing.counts import CommCounts

BOUND = 1e-14  # fp64: sums over ranks in another order
KINDS = {
    "plain": {},
    "recomputed": {"checkpoint_activations": True},
    "frozen tower": {"frozen": ("visual",)},
    "frozen prefix": {"tower": Straight, "frozen": ("visual.patch", "visual.blocks.0", "visual.blocks.1")},
    "another prefix": {"frozen": ("visual.patch", "visual.blocks.1", "visual.blocks.2")},
    "recomputed prefix": {"frozen": ("visual.patch", "visual.blocks.2"), "checkpoint_activations": True},
    "only the projector trains": {"frozen": ("visual", "embed", "layers", "head")},
    "frozen embedding": {"frozen": ("embed",), "checkpoint_activations": True},
    "hybrid": {"mesh": "hybrid"},
    "accumulated": {"micro_batches": 3},
    "two forwards": {"micro_batches": 2, "at_once": True, "checkpoint_activations": True},
    "gathered": {"reshard_after_forward": False},
    "prefetched": {"prefetch": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "evaluated between": {"evaluates": True},
    "pixels require grad": {"pixels_require_grad": True},
    "pixels require grad, frozen tower": {"pixels_require_grad": True, "frozen": ("visual",), "micro_batches": 2},
    "hybrid, all of it": {"mesh": "hybrid", "micro_batches": 2, "checkpoint_activations": True, "evaluates": True},
    "hybrid, offloaded": {
        "mesh": "hybrid",
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "frozen": ("visual",),
    },
}


def frozen(model: Net, names: tuple[str, ...]) -> Net:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def units(recompute: bool) -> list[Any]:
    skipped = by_name("visual", "layers.*.experts.*", may_skip=True, checkpoint_activations=recompute)
    return [skipped, by_name("visual.blocks.*", "embed"), by_name("layers.*", checkpoint_activations=recompute)]


def sharded(plain: Net, options: dict[str, Any], world: int) -> tuple[nn.Module, Any]:
    spec = MeshSpec.hybrid(2, world // 2) if options.pop("mesh", None) else MeshSpec.sharded(world)
    rules = units(options.pop("checkpoint_activations", False))
    model = copy.deepcopy(plain)
    plan = plan_model(model, units=rules, mesh=spec, **options)
    return shard_model(model, plan=plan, mesh=build_mesh(spec)), plan


def check(kind: str, steps: int, seed: int) -> float:
    """Train for some steps of random patterns on this rank; return the largest difference."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = dict(KINDS[kind])
    plain = frozen(net(options.pop("tower", Tower)), options.pop("frozen", ()))
    micro_batches, evaluates = options.pop("micro_batches", 1), options.pop("evaluates", False)
    make = functools.partial(batch, require_grad=options.pop("pixels_require_grad", False))
    at_once = options.pop("at_once", False)  # one backward for all
    model, plan = sharded(plain, options, world)
    source, worst, seen = random.Random(seed), 0.0, list[CommCounts]()
    for step in range(steps):
        likely = source.choice([0.0, 0.2, 0.5, 0.9])
        patterns = [[source.random() < likely for _ in range(world)] for _ in range(micro_batches)]
        losses: list[torch.Tensor] = []
        model.zero_grad()
        plain.zero_grad()
        with comm_counts() as counts:
            for number, images in enumerate(patterns):
                with accumulate(model, last=at_once or number == micro_batches - 1):
                    loss = model(*make(1000 * seed + step + 99 * number, rank, images[rank])).square().mean()
                    losses.append(loss)
                    if loss.requires_grad and not at_once:  # with only the projector training, not before an image
                        loss.backward()
            if at_once:
                sum(losses).backward()
        for number, images in enumerate(patterns):
            for other in range(world):
                loss = plain(*make(1000 * seed + step + 99 * number, other, images[other])).square().mean() / world
                if loss.requires_grad:
                    loss.backward()
        worst = max(worst, largest_difference(model, plain))
        assert worst < BOUND, (kind, step, patterns, worst)
        seen.append(counts)
        if evaluates and step % 3 == 0:
            with torch.no_grad():
                given = batch(step, rank, source.random() < 2, chosen=None)
                assert torch.allclose(model(*given), plain(*given), rtol=1e-13, atol=1e-15)
    assert steps < 20 or seen[-1] == seen[-2], "still telling each other which unit comes next"
    # The prediction for others holds where units run in the order of registration, which Tower's do not.
    in_order = kind in ("plain", "recomputed", "hybrid", "accumulated", "gathered", "offloaded", "evaluated between")
    assert not in_order or seen[-1] == plan.collectives(micro_batches), (kind, seen[-1], plan.collectives())
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="of all kinds together")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kinds = [kind for kind in given.kinds if "mesh" not in KINDS[kind] or given.ranks % 2 == 0]
    with RankPool(given.ranks, timeout=3600) as pool:
        for seed, kind in enumerate(kinds, given.seed):
            steps = -(-given.steps // len(kinds))
            worst = max(pool.run(check, kind, steps, seed))
            print(f"{given.ranks} ranks, {kind}: {steps} patterns, gradients within {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
