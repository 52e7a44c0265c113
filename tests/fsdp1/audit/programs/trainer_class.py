# ruff: noqa
"""A trainer class: the model is an attribute, the wrapping a method, and annotations name the class."""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict  # audit: decision import

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # audit: mapped import


class Trainer:
    model: Optional[FSDP]  # audit: mapped FullyShardedDataParallel

    def __init__(self, config):
        self.config = config
        self.optimizer = None
        self.build()
        self.ema = self.wrapped(make_ema())
        self.scaler = fsdp.sharded_grad_scaler.ShardedGradScaler(enabled=config.fp16)  # audit: mapped ShardedGradScaler

    def build(self):
        model = make(self.config)
        self.model = self.wrapped(model).to("cuda")

    def wrapped(self, model) -> "FSDP":
        return fsdp.FullyShardedDataParallel(
            model, use_orig_params=True, sync_module_states=True
        )  # audit: mapped FullyShardedDataParallel

    @property
    def networks(self):
        return [self.model, self.ema]

    def fit(self, loader):
        for step, batch in enumerate(loader):
            context = self.model.no_sync() if step % 2 else nullcontext()  # audit: mapped likely no_sync
            with context:
                self.scaler.scale(self.model(batch)).backward()
            self.model.clip_grad_norm_(self.config.clip, norm_type=2.0)  # audit: mapped likely clip_grad_norm_
            update_ema(self.ema.module, self.model.module)  # audit: mapped likely module

    def save(self, path):
        with fsdp.FullyShardedDataParallel.state_dict_type(
            self.model, fsdp.StateDictType.SHARDED_STATE_DICT
        ):  # audit: noted state_dict_type
            state = {
                "model": self.model.state_dict(),
                "optimizer": fsdp.FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer),
            }  # audit: noted likely state_dict, noted optim_state_dict
        dcp.save(state, checkpoint_id=path)

    def load(self, path):
        state = load_sharded_optimizer_state_dict(
            self.model.state_dict(), "optimizer", reader(path)
        )  # audit: decision torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict
        flat = fsdp.FullyShardedDataParallel.optim_state_dict_to_load(
            self.model, self.optimizer, state["optimizer"]
        )  # audit: noted optim_state_dict_to_load
        self.optimizer.load_state_dict(flat)

    def inspect(self):
        for network in self.networks:
            for unit in fsdp.FullyShardedDataParallel.fsdp_modules(network):  # audit: mapped fsdp_modules
                print(unit.process_group, unit.mixed_precision)
