"""Direct preference optimization: a policy and a frozen reference, both GPT-2 and both FSDP, by one trainer class.

Both models come from one dictionary of keyword arguments. Samples are drawn with generate inside
summon_full_params.
"""

import functools
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import checkpoint_modules, class_named, parse, run
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, PROMPT, ANSWER = 61, 4, 4


def preference_batches(steps, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        prompt = torch.randint(1, VOCABULARY, (batch_size, PROMPT), generator=generator)
        chosen = torch.cat([prompt, prompt.flip(1)], dim=1)
        rejected = torch.cat([prompt, torch.randint(1, VOCABULARY, prompt.shape, generator=generator)], dim=1)
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def batch_logps(logits, labels):
    """Sums of the log probabilities of the answers' tokens."""
    labels = labels[:, 1:].clone()
    labels[:, : PROMPT - 1] = -100
    mask = labels != -100
    labels[~mask] = 0
    logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (logps * mask).sum(-1)


def all_gather_if_needed(values, world_size):
    if world_size == 1:
        return values
    gathered = [torch.empty_like(values) for _ in range(world_size)]
    dist.all_gather(gathered, values)
    return torch.cat(gathered, dim=0)


class FSDPTrainer:
    """Shards policy and reference model at the level of blocks, and trains the policy."""

    def __init__(self, policy, reference_model, args, rank, world_size):
        self.args, self.rank, self.world_size = args, rank, world_size
        wrap_class = class_named(policy, "GPT2Block")
        shared_fsdp_kwargs = {
            "auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={wrap_class}),
            "sharding_strategy": ShardingStrategy.FULL_SHARD,
            "cpu_offload": CPUOffload(offload_params=False),
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
            "device_id": torch.device("cpu"),
            "ignored_modules": None,
            "limit_all_gathers": False,
            "use_orig_params": False,
            "sync_module_states": False,
        }
        dtype = getattr(torch, args.policy_mp) if args.policy_mp else None
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
        self.policy = FSDP(policy, **shared_fsdp_kwargs, mixed_precision=precision)
        if args.activation_checkpointing:
            checkpoint_modules(self.policy, lambda module: isinstance(module, wrap_class))
        self.reference_model = FSDP(reference_model, **shared_fsdp_kwargs)
        self.optimizer = torch.optim.RMSprop(self.policy.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 3))
        dist.barrier()

    def concatenated_forward(self, model, batch):
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits.to(torch.float32)
        logps = batch_logps(logits, tokens)
        half = len(batch["chosen"])
        return logps[:half], logps[half:]

    def loss_of(self, batch, metrics, prefix):
        chosen, rejected = self.concatenated_forward(self.policy, batch)
        with torch.no_grad():
            reference_chosen, reference_rejected = self.concatenated_forward(self.reference_model, batch)
        logits = (chosen - rejected) - (reference_chosen - reference_rejected)
        losses = -F.logsigmoid(self.args.beta * logits)
        margins = all_gather_if_needed((self.args.beta * logits).detach(), self.world_size)
        metrics[f"{prefix}/margin"].extend(margins.tolist())
        metrics[f"{prefix}/loss"].extend(all_gather_if_needed(losses.detach(), self.world_size).tolist())
        return losses.mean()

    def samples(self, batch):
        """Greedy samples of the policy: generate needs the root's parameters in full, units gather their own."""

        def context(model):
            return FSDP.summon_full_params(model, writeback=False, recurse=False)

        with context(self.policy), torch.no_grad():
            output = self.policy.generate(
                batch["prompt"],
                attention_mask=torch.ones_like(batch["prompt"]),
                max_length=PROMPT + 3,
                do_sample=False,
                pad_token_id=0,
            )
        return all_gather_if_needed(output.contiguous(), self.world_size)

    def evaluate(self, losses):
        self.policy.eval()
        metrics = defaultdict(list)
        for batch in preference_batches(2, 2, seed=50 + self.rank):
            with torch.no_grad():
                losses.append(self.loss_of(batch, metrics, "eval").item())
            if self.args.sample:
                losses.append(float(self.samples(batch).float().mean()))
        self.policy.train()

    def train(self):
        losses = []
        self.reference_model.eval()
        self.evaluate(losses)
        batches = preference_batches(self.args.steps * self.args.accumulation, 2, seed=self.rank)
        for _ in range(self.args.steps):
            metrics = defaultdict(list)
            for _ in range(self.args.accumulation):
                loss = self.loss_of(next(batches), metrics, "train")
                (loss / self.args.accumulation).backward()
                losses.append(loss.item())
            if self.args.max_grad_norm:
                metrics["grad_norm"].append(self.policy.clip_grad_norm_(self.args.max_grad_norm).item())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.evaluate(losses)
        return losses


def build():
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def main(argv=None):
    args = parse(
        argv, steps=3, accumulation=2, lr=0.001, beta=0.5, seed=3, max_grad_norm=0.0, policy_mp="",
        activation_checkpointing=False, sample=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    policy, reference = build(), build()
    reference.load_state_dict(policy.state_dict())
    return FSDPTrainer(policy, reference, args, dist.get_rank(), dist.get_world_size()).train()


if __name__ == "__main__":
    run(main)
