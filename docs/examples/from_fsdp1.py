"""A program for FSDP1, on FSDP2. Only the import of ``FSDP`` is new: see the line that is commented
out.

torchrun --nproc-per-node 8 from_fsdp1.py
"""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn

# from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType,
# FullStateDictConfig
from shardkit.fsdp1 import FullStateDictConfig, StateDictType
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.wrap import transformer_auto_wrap_policy


def build():
    blocks = [
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(3)
    ]
    return nn.Sequential(nn.Embedding(100, 32), *blocks, nn.Linear(32, 100))


def main(path="model.pt", steps=4):
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    )
    model = FSDP(build(), auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(100, (4, 16), device=device)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)
    ):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
