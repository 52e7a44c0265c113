"""A frozen language model that looks at images: new layers between its own, each part wrapped twice
and by hand.

The model itself is no FSDP module, so every part is a root: gradients are clipped part by part. The
language model's own blocks are unfrozen, as FSDP needs for freeing them, and left out of the
optimizer by an attribute.
"""

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from harness import Block, generator_of, parse, read, write
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import enable_wrap, wrap

WIDTH, VOCABULARY = 12, 30


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.to_kv, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x, media):
        kv = self.to_kv(media)
        seen = (self.query(x) @ kv.transpose(1, 2)).softmax(-1) @ kv
        return x + self.gate.tanh() * self.out(seen)


class LanguageModel(nn.Module):
    """Every second block has a layer in front of it that looks at what was set as media."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.old_decoder_blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.gated_cross_attn_layers = nn.ModuleList(
            [None if i % 2 else CrossAttention() for i in range(3)]
        )
        self.bias = nn.Parameter(torch.zeros(VOCABULARY), requires_grad=False)
        self.media = None

    def forward(self, tokens):
        x = self.embed(tokens)
        for look, block in zip(self.gated_cross_attn_layers, self.old_decoder_blocks, strict=True):
            x = block(x if look is None else look(x, self.media))
        return self.head(x) + self.bias


class Flamingo(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_encoder = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())
        self.perceiver = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.lang_encoder = LanguageModel()
        self.requires_grad_(False)
        for part in (
            self.perceiver,
            self.lang_encoder.gated_cross_attn_layers,
            self.lang_encoder.embed,
        ):
            part.requires_grad_(True)

    def forward(self, vision_x, tokens):
        with torch.no_grad():
            vision_x = self.vision_encoder(vision_x)
        self.lang_encoder.media = self.perceiver(vision_x)
        logits = self.lang_encoder(tokens)
        self.lang_encoder.media = None
        return logits

    def wrap_fsdp(self, wrapper_kwargs):
        lang = self.lang_encoder
        lang.old_decoder_blocks.requires_grad_(True)
        with enable_wrap(wrapper_cls=FSDP, **wrapper_kwargs):
            self.perceiver = wrap(wrap(self.perceiver))
            lang.old_decoder_blocks = nn.ModuleList(
                wrap(wrap(block)) for block in lang.old_decoder_blocks
            )
            lang.gated_cross_attn_layers = nn.ModuleList(
                wrap(wrap(layer)) if layer is not None else None
                for layer in lang.gated_cross_attn_layers
            )
            lang.embed, lang.head = wrap(wrap(lang.embed)), wrap(wrap(lang.head))
            self.vision_encoder = wrap(wrap(self.vision_encoder))
        for param in lang.old_decoder_blocks.parameters():
            param.exclude_from_optimizer = True

    def clip_grad_norm_(self, max_norm):
        self.perceiver.clip_grad_norm_(max_norm)
        for layer in self.lang_encoder.gated_cross_attn_layers:
            if layer is not None:
                layer.clip_grad_norm_(max_norm)
        self.lang_encoder.embed.clip_grad_norm_(max_norm)


def optimizer_of(model, args):
    groups = {True: [], False: []}
    for name, param in model.named_parameters():
        if param.requires_grad and not getattr(param, "exclude_from_optimizer", False):
            assert "old_decoder_blocks" not in name
            groups["gated_cross_attn" in name].append(param)
    decays = [{"params": params, "weight_decay": 0.1 * decays} for decays, params in groups.items()]
    return torch.optim.AdamW(decays, lr=args.learning_rate)


def trained_only(model, state):
    """Without what was frozen from the start, as names of the wrapped model say."""
    frozen = {
        name.replace("_fsdp_wrapped_module.", "")
        for name, p in model.named_parameters()
        if not p.requires_grad
    }
    return {
        name: value
        for name, value in state.items()
        if name not in frozen and "old_decoder_blocks" not in name
    }


def save(model, optimizer, path):
    FSDP.set_state_dict_type(
        model,
        fsdp.StateDictType.FULL_STATE_DICT,
        fsdp.FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        fsdp.FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
    )
    state, optim = (
        model.state_dict(),
        FSDP.optim_state_dict(model, optimizer, group=dist.group.WORLD),
    )
    write({"model": trained_only(model, state), "optimizer": optim}, path)


def load(model, optimizer, path):
    state = read(path)
    FSDP.set_state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig())
    assert not model.load_state_dict(state["model"], strict=False).unexpected_keys
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))


def main(argv=None):
    args = parse(
        argv, steps=3, first=0, learning_rate=0.01, max_norm=1e9, strategy="FULL_SHARD", precision="fp32", flat=False,
        save_at=0, out="", resume="",
    )  # fmt: skip
    torch.manual_seed(7)
    model = Flamingo()
    half = torch.bfloat16
    model.wrap_fsdp({
        "process_group": None,
        "cpu_offload": fsdp.CPUOffload(offload_params=False),
        "device_id": torch.device("cpu"),
        "sync_module_states": True,
        "sharding_strategy": fsdp.ShardingStrategy[args.strategy],
        "use_orig_params": not args.flat,
        "mixed_precision": fsdp.MixedPrecision(half, half, half) if args.precision == "amp_bf16" else None,
        "forward_prefetch": True,
        "backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_POST,
        "limit_all_gathers": True,
    })  # fmt: skip
    optimizer = optimizer_of(model, args)
    if args.resume:
        load(model, optimizer, args.resume)
    losses = []
    for step in range(args.first, args.steps):
        generator = generator_of(step)
        for weight in (1.0, 0.2):  # one batch from each of two data sets
            images = torch.randn(2, 3, 4, generator=generator)
            tokens = torch.randint(0, 30, (2, 6), generator=generator)
            logits = model(images, tokens[:, :-1]).float()
            loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
            (weight * loss).backward()
            losses.append(loss.item())
        model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if args.out and step + 1 == args.save_at:
            save(model, optimizer, args.out)
    return losses
