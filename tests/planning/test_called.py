"""The default rule makes units only of what forward calls: a gathered weight is where
it is read.
"""

import torch
import torch.nn.functional as F
from cpu_ranks import on_ranks
from hook_models import differences
from meshes import mesh_of
from small_models import Block
from torch import nn

from shardkit import MeshSpec, plan_model, shard_model

TWO = MeshSpec.sharded(2)


class ReadTable(nn.Module):
    """An embedding of the head's shape whose weight is read, in a helper and a lambda."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11)

    def _scores(self, x):
        return next(F.linear(x, self.table.weight) for _ in range(1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self._scores(x)


class LateTable(ReadTable):
    """An embedding behind the blocks, as SAM's; read where no bytecode tells."""

    def __init__(self):
        super().__init__()
        self.table = None
        self.tokens = nn.Embedding(11, 8)

    def _scores(self, x):
        return F.linear(x, getattr(self, "tokens").weight)  # noqa: B009


class AsksForDtype(ReadTable):
    """A table whose dtype is asked for, as of Mamba's head; that is right on shards too."""

    def _scores(self, x):
        return self.head(x.to(self.table.weight.dtype)) + self.table(
            torch.zeros(x.shape[:-1], dtype=torch.long)
        )


class Layers(nn.Module):
    """Layers of one dtype that run one after another."""

    def __init__(self, layers, dtype=torch.float32):
        super().__init__()
        self.layers, self.dtype = nn.ModuleList(layers), dtype

    def forward(self, x):
        x = x.to(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x.clone()


def attentions():
    model = Layers(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
    model.layers[2].self_attn.out_proj = model.layers[0].self_attn.out_proj
    return model


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        weights = F.linear(x.float(), self.router.weight).softmax(-1)
        return x + self.up(self.norm(x)) * weights.amax(-1, keepdim=True).to(x.dtype)


def routers():
    """bfloat16 layers with float32 routers, of which the weight is read."""
    model = Layers((Routed().bfloat16() for _ in range(2)), torch.bfloat16)
    for layer in model.layers:
        layer.router.float()
    return model


class Scan(nn.Module):
    """A mixer of bfloat16 with a bias of its own and a float32 ``A_log``, as Mamba's."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(8))
        self.A_log = nn.Parameter(torch.randn(8, 2))

    def forward(self, x):
        return x + self.up(x + self.bias) * self.A_log.exp().sum(-1).to(x.dtype)


def scans():
    model = Layers(
        (nn.Sequential(nn.LayerNorm(8), Scan()).bfloat16() for _ in range(2)), torch.bfloat16
    )
    for layer in model.layers:
        layer[1].A_log.data = layer[1].A_log.data.float()
    return model


class Twice(nn.Module):
    """One module, of two dtypes, twice in a list."""

    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
        self.layers = nn.ModuleList([inner, inner])

    def forward(self, x):
        for layer in self.layers:
            x = layer[1](layer[0](x).double()).float()
        return x


class Beside(nn.Module):
    """Stages of a block and a layer, of which one is not called."""

    def __init__(self):
        super().__init__()
        stages = [nn.ModuleList([Block(), nn.Linear(8, 8)]) for _ in range(2)]
        self.stages = nn.ModuleList(stages)

    def forward(self, x):
        for block, layer in self.stages:
            x = block(x)
            skip = x if layer is self.stages[1][1] else layer(x)
        return x + skip


class Body(nn.Module):
    """What Gemma 4 calls its language model: embedding, blocks and norm."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class ReadsAbove(nn.Module):
    """Reads the embedding of a module below itself, before that module is called."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.vision = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(self.vision(x) + self.body.table.weight[0])


class TiedAbove(nn.Module):
    """A head tied to that embedding, as Gemma 4's."""

    def __init__(self):
        super().__init__()
        self.model = ReadsAbove()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.model.body.table.weight

    def forward(self, x):
        return self.head(self.model(x))


class Rotary(nn.Module):
    """A frozen table that all blocks share, and rotate by a method of."""

    def __init__(self):
        super().__init__()
        self.freqs = nn.Parameter(torch.arange(8.0), requires_grad=False)

    def rotate(self, x):
        return (x * self.freqs).cos()

    forward = rotate


class RotaryBlock(Block):
    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x):
        return super().forward(self.rotary.rotate(x))


def rotaries():
    rotary = Rotary()
    return Layers(RotaryBlock(rotary) for _ in range(3))


MODELS = {
    each.__name__: each
    for each in (
        ReadTable,
        LateTable,
        attentions,
        routers,
        scans,
        Beside,
        TiedAbove,
        Twice,
        rotaries,
    )
}


def units(model):
    return [unit.name for unit in plan_model(model, mesh=TWO).units]


def test_units_are_called():
    assert "table" not in units(ReadTable())
    model = AsksForDtype()
    assert "table" in units(model)
    model.forward = lambda x: F.linear(x, model.table.weight)  # as kernel patchers do
    assert "table" not in units(model)
    assert "tokens" not in units(LateTable())
    assert units(attentions()) == ["[layers.0, layers.2]", "layers.1", "(root)"]
    assert units(TiedAbove()) == [
        "model.body.layers.0",
        "model.body.layers.1",
        "[model, head]",
        "(root)",
    ]
    plan = plan_model(routers(), mesh=TWO)
    assert plan.replicated == ("layers.0.router.weight", "layers.1.router.weight")
    assert (
        "router.weight: train in another dtype than the rest of their unit and cannot be a unit"
        in str(plan)
    )
    mixed = plan_model(scans(), mesh=TWO)
    assert mixed.replicated == ("layers.0.1.A_log", "layers.1.1.A_log")
    assert [unit.name for unit in mixed.units] == ["layers.0", "layers.1", "(root)"]
    shared = plan_model(rotaries(), mesh=TWO)
    assert [unit.name for unit in shared.units] == ["layers.0", "layers.1", "layers.2", "(root)"]
    assert shared.replicated == ("layers.0.rotary.freqs",)


@on_ranks(2)
def test_they_train_as_the_plain_models_do():
    for name, cls in MODELS.items():
        torch.manual_seed(0)
        plain = cls()
        torch.manual_seed(0)
        model = shard_model(cls(), mesh=mesh_of((2,)))
        x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
        for each in (plain, model):
            each(x).float().square().mean().backward()
        # both ranks have one batch: the mean is exact
        assert not (wrong := differences(plain, model)), (name, wrong)


def test_a_tied_parameter_stays_where_one_of_its_modules_has_to_stay():
    """The head could be a unit of its own dtype; the embedding that shares its weight is read, and
    could not.
    """

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.up = nn.Linear(6, 60).double()
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.up(F.embedding(ids, self.embed.weight).double()).float()[..., :6])

    plan = plan_model(Reads(), mesh=MeshSpec.sharded(2))
    assert plan.replicated == ("embed.weight",)
    assert "embed.weight: train in another dtype" in plan.notes[-1]
