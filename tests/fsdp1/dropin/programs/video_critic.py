"""A generator and a critic of its samples, both FSDP inside one plain model, trained in turn; EMA in a class.

The average lives on rank 0 and is taken within summon_full_params. State is gathered by a helper, and the optimizers'
through DTensor-free dictionaries of FSDP.optim_state_dict.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import generator_of, parse, read, run, write
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy


class AttentionBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.modulation = nn.Parameter(torch.randn(1, 2, width) / width**0.5)

    def forward(self, x, e):
        shift, scale = (self.modulation + e.unsqueeze(1)).chunk(2, dim=1)
        h = self.norm(x) * (1 + scale) + shift
        x = x + self.mix(h).cumsum(1)
        return x + self.ffn(h)


class DiffusionWrapper(nn.Module):
    """A diffusion model and what turns its output into samples."""

    def __init__(self, width=8, layers=2, channels=4):
        super().__init__()
        self.model = nn.ModuleDict({"blocks": nn.ModuleList([AttentionBlock(width) for _ in range(layers)])})
        self.inp, self.out = nn.Linear(channels, width), nn.Linear(width, channels)
        self.time = nn.Linear(1, width)
        self.uniform_timestep = True

    def forward(self, noisy, timestep):
        e = self.time(timestep.view(-1, 1).to(self.time.weight.dtype))
        x = self.inp(noisy.to(self.inp.weight.dtype))
        for block in self.model["blocks"]:
            x = block(x, e)
        return self.out(x), noisy - timestep.view(-1, 1, 1) * self.out(x)


class EMA_FSDP:
    """An average in float32 on the CPU of rank 0."""

    def __init__(self, fsdp_module, decay):
        self.decay, self.shadow = decay, {}
        with FSDP.summon_full_params(fsdp_module, writeback=False, offload_to_cpu=False, rank0_only=True):
            if dist.get_rank() == 0:
                for name, param in fsdp_module.module.named_parameters():
                    self.shadow[self.clean(name)] = param.detach().clone().float().cpu()

    @staticmethod
    def clean(name):
        return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")

    @torch.no_grad()
    def update(self, fsdp_module):
        with FSDP.summon_full_params(fsdp_module, writeback=False, offload_to_cpu=False, rank0_only=True):
            if dist.get_rank() == 0:
                for name, param in fsdp_module.module.named_parameters():
                    self.shadow[self.clean(name)].mul_(self.decay).add_(
                        param.detach().float().cpu(), alpha=1 - self.decay
                    )

    @torch.no_grad()
    def copy_to(self, fsdp_module):
        with FSDP.summon_full_params(fsdp_module, writeback=True):
            for name, param in fsdp_module.module.named_parameters():
                value = self.shadow[self.clean(name)] if dist.get_rank() == 0 else torch.empty_like(param)
                value = value.to(param.dtype).clone()
                dist.broadcast(value, 0)
                param.copy_(value)


class EMA_Shards:
    """An average of what each rank has, without gathering."""

    def __init__(self, fsdp_module, decay):
        self.decay = decay
        self.shadow = {name: p.detach().clone().float().cpu() for name, p in fsdp_module.module.named_parameters()}

    @torch.no_grad()
    def update(self, fsdp_module):
        for name, param in fsdp_module.module.named_parameters():
            self.shadow[name].mul_(self.decay).add_(param.detach().float().cpu(), alpha=1 - self.decay)

    @torch.no_grad()
    def copy_to(self, fsdp_module):
        for name, param in fsdp_module.module.named_parameters():
            param.data.copy_(self.shadow[name].to(dtype=param.dtype, device=param.device))


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = DiffusionWrapper(), DiffusionWrapper()
        self.real_score = DiffusionWrapper()
        self.real_score.requires_grad_(False)

    def generator_loss(self, noise):
        sample = self.generator(noise, torch.ones(len(noise)))[1]
        with torch.no_grad():
            fake = self.critic(sample, torch.full((len(noise),), 0.5))[1]
            real = self.real_score(sample, torch.full((len(noise),), 0.5))[1]
            grad = torch.nan_to_num((fake - real) / (sample - real).abs().mean(dim=[1, 2], keepdim=True))
        return 0.5 * F.mse_loss(sample.float(), (sample.float() - grad.float()).detach())

    def critic_loss(self, noise, target):
        with torch.no_grad():
            sample = self.generator(noise, torch.ones(len(noise)))[1]
        noisy = 0.5 * sample + 0.5 * noise + 0.1 * target
        return F.mse_loss(self.critic(noisy, torch.full((len(noise),), 0.5))[0].float(), (noise - sample).float())


def fsdp_wrap(module, mixed_precision=False, wrap_strategy="size", min_num_params=100):
    policy = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32, cast_forward_inputs=False
    )
    if wrap_strategy == "transformer":
        auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=(AttentionBlock,))
    else:
        auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    return FSDP(
        module,
        auto_wrap_policy=auto_wrap_policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=policy if mixed_precision else None,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
        use_orig_params=True,
        sync_module_states=False,
    )


def fsdp_state_dict(model):
    policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        return model.state_dict()


class Trainer:
    def __init__(self, args):
        self.args, self.rank = args, dist.get_rank()
        self.step = 0
        torch.manual_seed(8)
        self.model = Distillation()
        options = {"mixed_precision": args.mixed_precision, "wrap_strategy": args.wrap}
        self.model.generator = fsdp_wrap(self.model.generator, **options)
        self.model.critic = fsdp_wrap(self.model.critic, **options)
        self.model.real_score = fsdp_wrap(self.model.real_score, **options)
        trained = [p for p in self.model.generator.parameters() if p.requires_grad]
        self.generator_optimizer = torch.optim.AdamW(trained, lr=0.01, betas=(0.0, 0.99), weight_decay=0.01)
        self.critic_optimizer = torch.optim.AdamW(
            [p for p in self.model.critic.parameters() if p.requires_grad], lr=0.01, betas=(0.0, 0.99)
        )
        self.name_to_trainable_params = {
            EMA_FSDP.clean(n): p for n, p in self.model.generator.named_parameters() if p.requires_grad
        }
        assert "model.blocks.0.ffn.0.weight" in self.name_to_trainable_params
        self.generator_ema = (EMA_Shards if args.ema_shards else EMA_FSDP)(self.model.generator, decay=0.9)
        if args.resume:
            self.load(args.resume)

    def save(self, path):
        state = {
            "generator": fsdp_state_dict(self.model.generator),
            "critic": fsdp_state_dict(self.model.critic),
            "generator_ema": self.generator_ema.shadow,
            "critic_optimizer": FSDP.optim_state_dict(self.model.critic, self.critic_optimizer),
            "generator_optimizer": FSDP.optim_state_dict(self.model.generator, self.generator_optimizer),
            "step": self.step,
        }
        write(state, path)

    def load(self, path):
        state = read(path)
        for name, optimizer in (("generator", self.generator_optimizer), ("critic", self.critic_optimizer)):
            module = getattr(self.model, name)
            with FSDP.state_dict_type(module, StateDictType.FULL_STATE_DICT):
                module.load_state_dict(state[name], strict=True)
            loaded = FSDP.optim_state_dict_to_load(module, optimizer, state[f"{name}_optimizer"])
            optimizer.load_state_dict(loaded)
        if self.rank == 0:
            self.generator_ema.shadow = state["generator_ema"]
        self.step = state["step"]

    def fwdbwd(self, train_generator):
        generator = generator_of(self.step)
        noise = torch.randn(2, 3, 4, generator=generator)
        self.model.eval()  # no dropout, but gradients
        if train_generator:
            loss = self.model.generator_loss(noise)
            loss.backward()
            norm = self.model.generator.clip_grad_norm_(self.args.max_grad_norm)
        else:
            loss = self.model.critic_loss(noise, torch.randn(2, 3, 4, generator=generator))
            loss.backward()
            norm = self.model.critic.clip_grad_norm_(self.args.max_grad_norm)
        assert norm.isfinite()
        return loss.item()

    def train(self):
        losses = []
        while self.step < self.args.steps:
            train_generator = self.step % 2 == 0
            optimizer = self.generator_optimizer if train_generator else self.critic_optimizer
            optimizer.zero_grad(set_to_none=True)
            losses.append(self.fwdbwd(train_generator))
            optimizer.step()
            if train_generator:
                self.generator_ema.update(self.model.generator)
            self.step += 1
            if self.args.out and self.step == self.args.save_at:
                self.save(self.args.out)
        self.generator_ema.copy_to(self.model.generator)
        with torch.no_grad():
            losses.append(self.model.generator(torch.ones(1, 3, 4), torch.ones(1))[1].float().mean().item())
        return losses


def main(argv=None):
    args = parse(
        argv, steps=5, max_grad_norm=10.0, wrap="size", mixed_precision=False,
        ema_shards=False, save_at=0, out="", resume="",
    )  # fmt: skip
    return Trainer(args).train()


if __name__ == "__main__":
    run(main)
