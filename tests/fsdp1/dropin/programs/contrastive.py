"""Images and texts: two towers of blocks in one model, trained with gathered features and a clamped temperature.

Features are made by methods other than forward, the optimizer's groups come from names on the wrapped model, and
every epoch ends with the state of everything in one file.
"""

import math

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from harness import parse, read, run, write
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class ResidualAttentionBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.resblocks = nn.ModuleList([ResidualAttentionBlock(width) for _ in range(layers)])

    def forward(self, x):
        for block in self.resblocks:
            x = block(x)
        return x


class CLIP(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, width, 2, stride=2, bias=False), nn.Flatten(2))
        self.vision = Transformer(width, 2)
        self.text = Transformer(width, 2)
        self.token_embedding = nn.Embedding(30, width)
        self.positional_embedding = nn.Parameter(torch.randn(6, width) * 0.02)
        self.text_projection = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.logit_scale = nn.Parameter(torch.ones(1) * math.log(1 / 0.07))
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))

    def encode_image(self, image):
        x = self.visual(image - self.mean).transpose(1, 2)
        return F.normalize(self.vision(x).mean(1), dim=-1)

    def encode_text(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        return F.normalize(self.text(x)[:, -1] @ self.text_projection, dim=-1)

    def forward(self, image=None, text=None):
        image_features = self.encode_image(image) if image is not None else None
        text_features = self.encode_text(text) if text is not None else None
        return {"image": image_features, "text": text_features, "logit_scale": self.logit_scale.exp()}


def unwrap_model(model):
    return model.module if hasattr(model, "module") else model


def gathered(features):
    return torch.cat(torch.distributed.nn.all_gather(features), dim=0)


def clip_loss(image, text, logit_scale):
    logits = logit_scale * gathered(image) @ gathered(text).T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def param_groups(model, lr, wd):
    def exclude(name):
        return "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name

    named = list(model.named_parameters())
    gain_or_bias = [p for n, p in named if exclude(n) and p.requires_grad]
    rest = [p for n, p in named if not exclude(n) and p.requires_grad]
    return [{"params": gain_or_bias, "weight_decay": 0.0}, {"params": rest, "weight_decay": wd}]


def wrap(model, args):
    precision = None
    if args.precision == "amp_bf16":
        precision = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return FSDP(
        model,
        None,
        None,
        None,
        ModuleWrapPolicy({ResidualAttentionBlock}) if args.blocks else ModuleWrapPolicy({Transformer, nn.Conv2d}),
        BackwardPrefetch.BACKWARD_POST,
        precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def lock_image_tower(model):
    for param in model.visual.parameters():
        param.requires_grad = False


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    image = torch.rand(3, 3, 4, 4, generator=generator)
    return image, torch.randint(0, 30, (3, 6), generator=generator)


def zero_shot(model, rank):
    """Accuracy-like number by the methods of the inner model, which gathers nothing by itself."""
    model.eval()
    with torch.no_grad():
        image, text = batch(77, rank)
        out = model(image=image)
        texts = model(text=text)["text"]
        similarity = out["image"] @ texts.T
        with FSDP.summon_full_params(model, writeback=False):
            again = unwrap_model(model).encode_image(image)
    model.train()
    return [similarity.float().mean().item(), again.float().sum().item()]


def save_everything(model, optimizer, epoch, path):
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
    ):
        checkpoint = {
            "epoch": epoch,
            "state_dict": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
        }
    write(checkpoint, path)


def load_everything(model, optimizer, path):
    checkpoint = read(path)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        message = model.load_state_dict(checkpoint["state_dict"])
        assert message.missing_keys == message.unexpected_keys == []
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optimizer"]))
    return checkpoint["epoch"]


def main(argv=None):
    args = parse(
        argv, steps=4, lr=0.005, precision="fp32", grad_clip_norm=None, lock_image=False, blocks=False, zeroshot=False,
        save_at=0, out="", resume="",
    )  # fmt: skip
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = CLIP()
    if args.lock_image:
        lock_image_tower(model)
    model = wrap(model, args)
    assert isinstance(model, FSDP)
    assert unwrap_model(model).token_embedding.num_embeddings == 30
    groups = param_groups(model, args.lr, 0.2)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    first = load_everything(model, optimizer, args.resume) if args.resume else 0
    losses = zero_shot(model, rank) if args.zeroshot else []
    for step in range(first, args.steps):
        image, text = batch(step, rank)
        optimizer.zero_grad()
        out = model(image, text)
        loss = clip_loss(out["image"], out["text"], out["logit_scale"])
        loss.backward()
        if args.grad_clip_norm is not None:
            model.clip_grad_norm_(args.grad_clip_norm, norm_type=2.0)
        optimizer.step()
        with torch.no_grad():
            unwrap_model(model).logit_scale.clamp_(0, math.log(13.5))
        losses += [loss.item(), out["logit_scale"].item()]
        if args.out and step + 1 == args.save_at:
            save_everything(model, optimizer, step + 1, args.out)
    return losses + (zero_shot(model, rank) if args.zeroshot else [])


if __name__ == "__main__":
    run(main)
