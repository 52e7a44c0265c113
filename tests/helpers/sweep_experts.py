"""Experts on a mesh of their own, on 8 gloo ranks in float64, against one process.

torchrun --nproc-per-node 8 tests/helpers/sweep_experts.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from expert_net import ExpertNet, expert_plan, train_both
from torch.distributed.device_mesh import init_device_mesh

from shardkit import apply_plan, set_gradient_reduction

SHAPES = [(2, 2, 2), (1, 8), (4, 2), (2, 4), (8, 1), (2, 1, 4), (4, 1, 2), (2, 4, 1)]


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    most = 0.0
    for shape in SHAPES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "efsdp", "ep")[-len(shape) :])
        for reduction in ("mean", "sum"):
            model = ExpertNet().split(mesh["ep"])
            apply_plan(model, expert_plan(model, mesh), mesh)
            set_gradient_reduction(model, reduction)
            found = train_both(model, ExpertNet())
            most = max(most, found)
            if dist.get_rank() == 0:
                print(f"{shape} {reduction}: {found:.1e}", flush=True)
    dist.destroy_process_group()
    return int(most > 1e-15)


if __name__ == "__main__":
    sys.exit(main())
