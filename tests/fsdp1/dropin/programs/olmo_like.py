"""A trainer class around a model that says itself how to wrap it, and groups its parameters by walking over modules.

The policy is a plain function of (module, recurse, nonwrapped_numel); initial values are set after wrapping, within
the full parameters; the learning rate and the clipping of each step are the trainer's own; evaluation comes first.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import parse, read, read_own, run, write, write_own
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import FullOptimStateDictConfig, ShardedOptimStateDictConfig, ShardedStateDictConfig


class LayerNormBase(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, (x.size(-1),), weight=self.weight)


class OLMoBlock(nn.Module):
    def __init__(self, layer_id, width):
        super().__init__()
        self.layer_id, self.norm = layer_id, LayerNormBase(width)
        self.ff_proj, self.ff_out = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x, attention_bias=None):
        mixed = attention_bias.to(x.dtype).exp() @ self.norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(mixed)))


@dataclass
class Output:
    logits: torch.Tensor


class OLMo(nn.Module):
    def __init__(self, vocabulary=36, width=12, layers=3):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(vocabulary, width), "ln_f": LayerNormBase(width), "emb_drop": nn.Dropout(0.0)}
        )
        self.transformer.update({"blocks": nn.ModuleList([OLMoBlock(i, width) for i in range(layers)])})
        self.cache = {}

    def reset_parameters(self):
        """Values that do not depend on any generator."""
        with torch.no_grad():
            for offset, param in enumerate(self.parameters()):
                wave = torch.sin(torch.arange(param.numel(), device=param.device) * 1.7 + offset)
                param.copy_((wave * 0.2 + (param.dim() == 1)).view_as(param))

    def get_fsdp_wrap_policy(self, strategy):
        blocks = tuple(self.transformer.blocks)

        def fsdp_wrap_fn(module, recurse=True, nonwrapped_numel=0):
            if recurse:
                return True  # always recurse
            if strategy == "by_block_and_size":
                return isinstance(module, (OLMoBlock, nn.Linear))
            return module in blocks

        return fsdp_wrap_fn

    def forward(self, input_ids):
        x = self.transformer.emb_drop(self.transformer.wte(input_ids))
        size = input_ids.size(1)
        bias = self.cache.setdefault(size, torch.full((size, size), -1e4).triu(1) - 1.0)
        for block in self.transformer.blocks:
            x = block(x, attention_bias=bias)
        x = self.transformer.ln_f(x)
        return Output(F.linear(x, self.transformer.wte.weight))


def get_param_groups(model):
    """Every parameter once, by the kind of module that owns it; found on the wrapped model, whose names count."""
    decay, no_decay, all_params = set(), set(), {}
    for mn, m in model.named_modules():
        for pn, p in m.named_parameters():
            # both walks are recursive, so each parameter is seen often, under one name
            if not p.requires_grad:
                continue
            fpn = f"{mn}.{pn}" if mn else pn
            all_params[fpn] = p
            if pn.endswith("bias") or (pn.endswith("weight") and isinstance(m, LayerNormBase)):
                no_decay.add(fpn)
            elif pn.endswith("weight") and isinstance(m, (nn.Linear, nn.Embedding)):
                decay.add(fpn)
    assert not decay & no_decay
    assert not all_params.keys() - (decay | no_decay), sorted(all_params.keys() - (decay | no_decay))
    decay_sorted, no_decay_sorted = sorted(decay), sorted(no_decay)
    groups = [
        {"params": [all_params[n] for n in decay_sorted], "param_names": decay_sorted, "name": "decay"},
        {"params": [all_params[n] for n in no_decay_sorted], "param_names": no_decay_sorted, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Trainer:
    def __init__(self, cfg, olmo_model, fsdp_model, optim):
        self.cfg, self.model, self.fsdp_model, self.optim = cfg, olmo_model, fsdp_model, optim
        self.global_step, self.losses = 0, []

    def model_forward(self, batch):
        logits = self.fsdp_model(input_ids=batch).logits
        return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), batch[:, 1:])

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 36, (4, 7), generator=generator)

    def train_step(self):
        self.optim.zero_grad(set_to_none=True)
        micro_batches = self.batch(100 * self.global_step + dist.get_rank()).split(self.cfg.microbatch)
        total = torch.tensor(0.0)
        for index, micro_batch in enumerate(micro_batches):
            last = index + 1 == len(micro_batches)
            grad_sync_context = self.fsdp_model.no_sync if not last and self.cfg.sync_once else nullcontext
            with grad_sync_context():
                with torch.autocast("cpu", enabled=self.cfg.autocast, dtype=torch.bfloat16):
                    loss = self.model_forward(micro_batch) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        dist.reduce(total, 0)
        total.div_(dist.get_world_size())
        if self.cfg.max_grad_norm is not None:
            self.fsdp_model.clip_grad_norm_(self.cfg.max_grad_norm)
        for group in self.optim.param_groups:
            group["lr"] = self.cfg.lr * min(1.0, (self.global_step + 1) / 2)
        self.optim.step()
        self.global_step += 1
        self.losses.append(total.item() if dist.get_rank() == 0 else loss.item())

    def eval(self):
        self.optim.zero_grad(set_to_none=True)
        self.fsdp_model.eval()
        with torch.no_grad():
            self.losses.append(self.model_forward(self.batch(999)).item())
        self.fsdp_model.train()

    def save_checkpoint(self, path):
        """Unsharded: rank 0 writes two files. Sharded: each rank writes its own."""
        if self.cfg.sharded:
            with FSDP.state_dict_type(
                self.fsdp_model,
                state_dict_type=StateDictType.SHARDED_STATE_DICT,
                state_dict_config=ShardedStateDictConfig(offload_to_cpu=True),
                optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=True),
            ):
                state = {
                    "model": self.fsdp_model.state_dict(),
                    "optim": FSDP.optim_state_dict(self.fsdp_model, self.optim),
                }
            write_own({**state, "step": self.global_step}, path)
        else:
            with FSDP.state_dict_type(
                self.fsdp_model,
                state_dict_type=StateDictType.FULL_STATE_DICT,
                state_dict_config=FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
                optim_state_dict_config=FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
            ):
                model_state = self.fsdp_model.state_dict()
                optim_state = FSDP.optim_state_dict(self.fsdp_model, self.optim)
            write(model_state, f"{path}/model.pt")
            write({"optim": optim_state, "step": self.global_step}, f"{path}/optim.pt")

    def restore_checkpoint(self, path):
        if self.cfg.sharded:
            state = read_own(path)
            kind, model_state, optim_state = StateDictType.SHARDED_STATE_DICT, state["model"], state["optim"]
            configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
            self.global_step = state["step"]
        else:
            state = read(f"{path}/optim.pt")
            kind, optim_state = StateDictType.FULL_STATE_DICT, state["optim"]
            model_state = read(f"{path}/model.pt")
            configs = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
            self.global_step = state["step"]
        with FSDP.state_dict_type(self.fsdp_model, kind, *configs):
            self.fsdp_model.load_state_dict(model_state)
            for turn in range(dist.get_world_size()):  # one rank after another, to save memory
                if turn == dist.get_rank() or self.cfg.sharded:
                    flattened = FSDP.optim_state_dict_to_load(self.fsdp_model, self.optim, optim_state)
                dist.barrier()
        self.optim.load_state_dict(flattened)


def main(argv=None):
    cfg = parse(
        argv, steps=4, microbatch=2, lr=0.004, max_grad_norm=None, precision="fp32",
        wrap="by_block", sharded=False, autocast=False, sync_once=False, save_at=0, save_folder="", load_path="",
    )  # fmt: skip
    torch.manual_seed(6)
    olmo_model = OLMo()
    precision = None
    if cfg.precision == "mixed":
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    fsdp_model = FSDP(
        olmo_model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=precision,
        auto_wrap_policy=olmo_model.get_fsdp_wrap_policy(cfg.wrap),
        use_orig_params=True,
        limit_all_gathers=True,
        device_id=torch.device("cpu"),
    )
    with FSDP.summon_full_params(fsdp_model):
        olmo_model.reset_parameters()
    assert isinstance(olmo_model.transformer.blocks[0], FSDP)
    assert olmo_model.transformer.blocks[2].layer_id == 2
    optim = torch.optim.AdamW(get_param_groups(fsdp_model), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
    trainer = Trainer(cfg, olmo_model, fsdp_model, optim)
    if cfg.load_path:
        trainer.restore_checkpoint(cfg.load_path)
    else:
        trainer.eval()
    while trainer.global_step < cfg.steps:
        trainer.train_step()
        if cfg.save_folder and trainer.global_step == cfg.save_at:
            trainer.save_checkpoint(cfg.save_folder)
    trainer.eval()
    return trainer.losses


if __name__ == "__main__":
    run(main)
