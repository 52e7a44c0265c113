"""Tiny plain-torch models of sequences and images, as people write them."""

import torch
import torch.nn.functional as F
from small_models import Block
from torch import nn
from zoo_entry import Entry, floats, integers

VOCAB, WIDTH = 19, 8


def blocks(count=3, width=WIDTH):
    return nn.ModuleList(Block(width) for _ in range(count))


def run(modules, x):
    for module in modules:
        x = module(x)
    return x


def tokens(seed):
    return {"ids": integers(seed, VOCAB, 2, 5)}


def vectors(seed):
    return {"x": floats(seed, 2, 5, WIDTH)}


def stacked(seed):
    """``vectors`` for an nn.Sequential."""
    return {"input": floats(seed, 2, 5, WIDTH)}


def pixels(seed):
    return {"x": floats(seed, 2, 3, 8, 8)}


def next_token(model, batch):
    logits = model(**batch).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


# Sequences.


def nn_transformer():
    return nn.Transformer(WIDTH, 2, 2, 2, dim_feedforward=12, dropout=0.0, batch_first=True)


def two_sequences(seed):
    return {"src": floats(seed, 2, 5, WIDTH), "tgt": floats(seed + 1000, 2, 4, WIDTH)}


class LstmLm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


class NanoGpt(nn.Module):
    """As nanoGPT: ``transformer`` is a ModuleDict, the head's weight is the embedding's."""

    def __init__(self, tied=True):
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

    def forward(self, ids):
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1]))
        return self.lm_head(self.transformer.ln_f(run(self.transformer.h, x)))


class HeadByWeight(nn.Module):
    """A head that is a module, but whose weight the root's forward uses without calling it."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = blocks()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.norm(run(self.layers, self.emb(ids)))
        return x @ self.head.weight.t()


# Images.


class BasicBlock(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride), nn.BatchNorm2d(outer)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 6, 2), BasicBlock(6, 6, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class AutoEncoder(nn.Module):
    """Transposed convolutions in channels_last: four-dimensional parameters are not contiguous."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 6, 2, 2), nn.ReLU(), nn.ConvTranspose2d(6, 3, 2, 2)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x.contiguous(memory_format=torch.channels_last))) - x


class SpectralLayer(nn.Module):
    """Complex parameters, as in Fourier neural operators."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x):
        spectrum = torch.einsum("bfi,fio->bfo", torch.fft.rfft(x, dim=1), self.weight)
        return x + torch.fft.irfft(spectrum, n=x.shape[1], dim=1)


USUAL = {
    "nn_transformer": Entry(nn_transformer, two_sequences),
    "lstm_lm": Entry(LstmLm, tokens, next_token),
    "nanogpt_tied": Entry(NanoGpt, tokens, next_token),
    "head_by_weight": Entry(HeadByWeight, tokens, next_token),
    "resnet": Entry(ResNet, pixels),
    "channels_last": Entry(lambda: AutoEncoder().to(memory_format=torch.channels_last), pixels),
    "complex": Entry(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), SpectralLayer(), SpectralLayer()), stacked
    ),
}
