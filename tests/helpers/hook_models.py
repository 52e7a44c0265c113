"""Models and ways of calling them for the tests of ``shardkit.runtime.hooks``, and a plain copy to
compare with.
"""

import torch
from meshes import mesh_of, part_of
from small_models import Decoder, sharded
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import named_sharded_parameters
from shardkit.optim import step_on_local_shards

# On two ranks. The meshes replicate on two ranks, and shard on two beside a replicate axis of one.
OPTIONS = {
    "default": {},
    "root only": {"units": []},
    "never resharded": {"reshard_after_forward": False},
    "always resharded": {"reshard_after_forward": True},
    "replicated": {"mesh": (2, 1)},
    "hybrid": {"mesh": (1, 2)},
    "meta": {"meta": True},
}


class Critic(nn.Module):
    """Judges vectors; its root owns a parameter that it uses before, between and
    after its blocks.
    """

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))
        self.scale = nn.Parameter(torch.tensor(1.5))  # replicated
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = x * self.w
        for layer in self.layers:
            x = layer(x)
        return (self.head(self.norm(x) * self.w) * self.scale).clone()


class Coder(Decoder):
    """A Decoder that is also called by other methods."""

    def body(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * 1.0

    def encode(self, tokens):
        return self.head(self.body(tokens)).clone()

    def forward(self, tokens):
        return self.encode(tokens)

    @torch.no_grad()
    def generate(self, tokens):
        for _ in range(2):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def pair(build=Decoder, **options):
    """A plain model and its sharded copy."""
    options = dict(options)
    if isinstance(options.get("mesh"), tuple):
        options["mesh"] = mesh_of(options["mesh"])
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    return plain, sharded(build, **options)


def tokens(seed=0):
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed))


def vectors(*seeds):
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def gathered(model):
    """Parameters that are not the sharded ones now."""
    held = dict(named_sharded_parameters(model))
    return [name for name, param in model.named_parameters() if param is not held[name]]


def differences(plain, sharded, grads=True):
    """Parameters, or gradients, of which this rank's part is not that of the plain model, bit for
    bit.
    """
    wrong = []
    for (name, param), (_, shard) in zip(
        plain.named_parameters(), named_sharded_parameters(sharded), strict=True
    ):
        expected, actual = (param.grad, shard.grad) if grads else (param.detach(), shard.detach())
        if isinstance(actual, DTensor) and expected is not None:
            assert actual.shape == expected.shape, name
            expected, actual = part_of(expected, actual), actual.to_local()
        if (expected is None) != (actual is None) or (
            expected is not None and not torch.equal(expected, actual)
        ):
            wrong.append(name)
    return wrong


def assert_trains_alike(plain, sharded, loss, steps=2):
    """Both copies give the same losses, gradients and parameters, bit for bit, all ranks having one
    batch.
    """
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)
    ]
    step_on_local_shards(optimizers[1])
    for step in range(steps):
        expected, actual = loss(plain, step), loss(sharded, step)
        assert torch.equal(expected, actual), (step, expected, actual)
        expected.backward()
        actual.backward()
        assert not (wrong := differences(plain, sharded)), (step, wrong)
        assert any(param.grad is not None and param.grad.any() for param in plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert not (wrong := differences(plain, sharded, grads=False)), (step, wrong)


def usual_loss(model, step):
    return model(tokens(step)).square().mean()
