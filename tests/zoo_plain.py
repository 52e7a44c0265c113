"""Tiny plain-torch models, one for each thing that people build and that a sharding rule may trip over."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from zoo_entry import Batch, Entry, floats, integers

VOCAB, WIDTH = 19, 8


class Block(nn.Module):
    """Pre-norm feed-forward with a residual: the block of most models below."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(count: int = 3, width: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(Block(width) for _ in range(count))


def run(modules: nn.ModuleList, x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def tokens(seed: int) -> Batch:
    return {"ids": integers(seed, VOCAB, 2, 5)}


def vectors(seed: int) -> Batch:
    return {"x": floats(seed, 2, 5, WIDTH)}


def pixels(seed: int) -> Batch:
    return {"x": floats(seed, 2, 3, 8, 8)}


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


# Sequences.


def nn_transformer() -> nn.Module:
    return nn.Transformer(WIDTH, 2, 2, 2, dim_feedforward=12, dropout=0.0, batch_first=True)


def two_sequences(seed: int) -> Batch:
    return {"src": floats(seed, 2, 5, WIDTH), "tgt": floats(seed + 1000, 2, 4, WIDTH)}


class EncoderClassifier(nn.Module):
    """nn.TransformerEncoder, whose layers are clones, behind a learned position table that is a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.positions = nn.Parameter(torch.randn(5, WIDTH))
        self.classifier = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x + self.positions).mean(1))


class LstmLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class CellLoop(nn.Module):
    """A cell called once for each step of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        state, states = ids.new_zeros(len(ids), WIDTH, dtype=torch.float32), []
        for step in self.embed(ids).unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class NanoGpt(nn.Module):
    """As nanoGPT: ``transformer`` is a ModuleDict, the head's weight is the embedding's."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(5, WIDTH),
                "h": blocks(),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1]))
        return self.lm_head(self.transformer.ln_f(run(self.transformer.h, x)))


class FunctionalTie(nn.Module):
    """No head module: the root's forward multiplies by the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = blocks()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(run(self.layers, self.emb(ids))), self.emb.weight)


class HeadByWeight(nn.Module):
    """A head that is a module, but whose weight the root's forward uses without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = blocks()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(run(self.layers, self.emb(ids)))
        return x @ self.head.weight.t()


# Images.


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 6, 2), BasicBlock(6, 6, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, 4, 3, padding=1)
        self.down_blocks = nn.ModuleList([self.conv(4, 6), self.conv(6, 8)])
        self.mid_block = self.conv(8, 8)
        self.up_blocks = nn.ModuleList([self.conv(16, 6), self.conv(12, 4)])
        self.out = nn.Conv2d(4, 3, 1)

    @staticmethod
    def conv(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(2, outer), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.inp(x), []
        for down in self.down_blocks:
            x = F.avg_pool2d(down(x), 2)
            skips.append(x)
        x = self.mid_block(x)
        for up in self.up_blocks:
            x = F.interpolate(up(torch.cat([x, skips.pop()], 1)), scale_factor=2.0)
        return self.out(x)


class Stage(nn.Module):
    def __init__(self, width: int, last: bool) -> None:
        super().__init__()
        self.blocks = blocks(2, width)
        self.downsample = None if last else nn.Linear(2 * width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = run(self.blocks, x)
        return x if self.downsample is None else self.downsample(x.unflatten(1, (-1, 2)).flatten(2))


class Stages(nn.Module):
    """Two levels as in Swin: stages of blocks, of which each stage is twice as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 2, 2)
        self.stages = nn.ModuleList([Stage(4, False), Stage(8, False), Stage(16, True)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(run(self.stages, x)).mean(1))


class AutoEncoder(nn.Module):
    """Transposed convolutions in channels_last: four-dimensional parameters are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 6, 2, 2), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x.contiguous(memory_format=torch.channels_last))) - x


class VisionNorm(nn.Module):
    """Weight norm: the weight is computed from two parameters of a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)) for _ in range(3))
        self.out = weight_norm(nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for conv in self.convs:
            x = F.elu(conv(x)) + x
        return self.out(x.transpose(1, 2))


class Spectral(nn.Module):
    """Complex parameters, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(SpectralLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return run(self.layers, self.lift(x))


class SpectralLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.einsum("bfi,fio->bfo", torch.fft.rfft(x, dim=1), self.weight)
        return x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1)


# Parameters that are not like the others.


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 3),
    )


class RootParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.temperature = nn.Parameter(torch.ones(1))
        self.layers = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return run(self.layers, torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)) * self.temperature


class Scalar(nn.Module):
    """A parameter without dimensions, such as CLIP's logit_scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return run(self.layers, x) * self.logit_scale.exp()


class Frozen(nn.Module):
    """Frozen embedding and first blocks, one frozen norm in a block that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.layers = blocks(4)
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].norm.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(run(self.layers, self.embed(ids)))


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False).to(torch.bfloat16)
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).float() + self.lora_b(self.lora_a(x))


def lora() -> nn.Module:
    """A frozen bf16 base with fp32 adapters that train."""
    model = NanoGpt(tied=False).requires_grad_(False)
    for block in model.transformer.h:
        block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)
    return model


class MixedBlock(nn.Module):
    """bf16 linear layers and an fp32 norm, all of which train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x.float()).bfloat16())


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixedBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(run(self.layers, x).float())


class Narrow(nn.Module):
    """First dimensions of 1, 2 and 3: fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.inp, self.out, self.gain = nn.Linear(WIDTH, 3), nn.Linear(3, 1), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(run(self.layers, self.inp(x)).tanh()) * self.gain


# Modules that are not called once each, in order.


class Reused(nn.Module):
    """One block called twice, between blocks called once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.layers
        return last(middle(first(middle(x))))


class SharedWeight(nn.Module):
    """Two blocks share a weight, each by its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(4)
        self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        return run(self.layers, x)


class Unordered(nn.Module):
    """Blocks called from last to first, one of them never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        return run([self.layers[i] for i in (3, 1, 0)], x)


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Block() for name in ("first", "second", "third")})
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 2), "b": nn.Linear(WIDTH, 3)})

    def forward(self, x: Tensor) -> Tensor:
        x = run(self.layers.values(), x)
        return torch.cat([head(x) for head in self.heads.values()], -1)


class Branches(nn.Module):
    """Branches of different sizes in parallel, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branched() for _ in range(2))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(run(self.layers, x))


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH))
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH), wide, nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(branch(x) for branch in self.branches)


class MoeBlock(nn.Module):
    """Top-1 routing. Every expert is called, with no tokens if it has none, unless ``skip``."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows) or not self.skip:
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.view_as(x)


class Moe(nn.Module):
    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoeBlock(skip) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(run(self.layers, x))


class TwoTowers(nn.Module):
    """The second tower is not used: its parameters train, and get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"image": nn.Sequential(*blocks(2)), "text": nn.Sequential(*blocks(2))})
        self.unused_head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.towers["image"](x)


class OtherMethods(nn.Module):
    """The forward uses methods of a child that are not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.layers = blocks(2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder.encode(ids)
        return self.encoder.decode(run(self.layers, x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def encode(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def decode(self, x: Tensor) -> Tensor:
        return self.head(x)


class OwnCheckpointing(nn.Module):
    """The model recomputes its own blocks, and takes and returns tuples and dicts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TupleBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x, "step": 0}
        for layer in self.layers:
            state = checkpoint(layer, state, scale=0.5, use_reentrant=False)
        return state["x"]


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: dict, *, scale: float) -> dict:
        return {"x": self.block(state["x"]) * scale, "step": state["step"] + 1}


PLAIN = {
    "nn_transformer": Entry(nn_transformer, two_sequences),
    "encoder_classifier": Entry(EncoderClassifier, vectors),
    "lstm_lm": Entry(LstmLm, tokens, next_token),
    "cell_loop": Entry(CellLoop, tokens, next_token),
    "nanogpt_tied": Entry(NanoGpt, tokens, next_token),
    "functional_tie": Entry(FunctionalTie, tokens, next_token),
    "head_by_weight": Entry(HeadByWeight, tokens, next_token),
    "resnet": Entry(ResNet, pixels),
    "unet": Entry(UNet, pixels),
    "stages": Entry(Stages, pixels),
    "channels_last": Entry(lambda: AutoEncoder().to(memory_format=torch.channels_last), pixels),
    "weight_norm": Entry(VisionNorm, vectors),
    "complex": Entry(Spectral, vectors),
    "mlp": Entry(mlp, lambda seed: {"input": floats(seed, 4, WIDTH)}),
    "root_parameter": Entry(RootParameter, vectors),
    "scalar": Entry(Scalar, vectors, ignored=("logit_scale",)),
    "frozen": Entry(Frozen, tokens, next_token),
    "lora": Entry(lora, tokens, next_token),
    "mixed_dtypes": Entry(MixedDtypes, vectors),
    "narrow": Entry(Narrow, lambda seed: {"x": floats(seed, 2, WIDTH)}),
    "reused": Entry(Reused, vectors),
    "shared_weight": Entry(SharedWeight, vectors),
    "unordered": Entry(Unordered, vectors),
    "module_dict": Entry(InDict, vectors),
    "branches": Entry(Branches, vectors),
    "moe": Entry(lambda: Moe(skip=False), vectors),
    "moe_skipping": Entry(lambda: Moe(skip=True), vectors, uneven=True),
    "two_towers": Entry(TwoTowers, vectors),
    "other_methods": Entry(OtherMethods, tokens, next_token),
    "own_checkpointing": Entry(OwnCheckpointing, vectors),
}
