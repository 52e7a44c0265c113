"""The default rule, on models as people write them: which units, and what is repaired and said."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small_models import Block, Decoder

from shardkit import MeshSpec, PlanError, plan_model

EIGHT = MeshSpec.sharded(8)


class Model(nn.Module):
    """Any model made of the given parts; planning never calls it."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self):
        """Never called."""


def names(model):
    return [unit.name for unit in plan_model(model, mesh=EIGHT).units]


def blocks(number=2, dim=8):
    return nn.ModuleList(Block(dim) for _ in range(number))


class Expert(Block):
    """A block that only some tokens reach."""


def routed():
    return Model(experts=nn.ModuleList(Expert() for _ in range(4)), gate=nn.Linear(8, 4))


def shared(layer):
    """A block with a layer that other blocks may share."""
    return Model(own=nn.Linear(3, 3), layer=layer)


def paired():
    """A tower that calls the halves of its layers itself."""
    layers = nn.ModuleList(nn.ModuleList([Expert(), Block()]) for _ in range(2))
    return Model(layers=layers, norm=nn.LayerNorm(8))


def stage(number, dim=8):
    return Model(blocks=blocks(number, dim), reduce=nn.Linear(dim, 2 * dim))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Decoder, ["embed", "layers.0", "layers.1", "layers.2", "[norm, head]", "(root)"]),
        (
            lambda: Decoder(tied=True),
            ["[embed, norm, head]", "layers.0", "layers.1", "layers.2", "(root)"],
        ),
        (lambda: Decoder(layers=1), ["embed", "layers.0", "[norm, head]", "(root)"]),
        # An MLP in a Sequential: its layers; a convolutional stem: nothing finer than the root.
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2", "(root)"]),
        (
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2)
            ),
            ["(root)"],
        ),
        (lambda: nn.Linear(4, 4), ["(root)"]),
        # Autograd drops FSDP2's hook on the view that a Linear returns and the ReLU changes.
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(True), nn.Linear(4, 4)), ["(root)"]),
        # Attributes that a number tells apart; a stage of many small blocks.
        (lambda: Model(down1=Block(), down2=Block()), ["down1", "down2", "(root)"]),
        (
            lambda: nn.Sequential(nn.Sequential(*blocks(9)), nn.Sequential(*blocks(2))),
            ["0", "1.0", "1.1", "(root)"],
        ),
        # Containers: dicts of blocks, Sequential stages, lists of lists, encoder and decoder.
        (
            lambda: Model(layers=nn.ModuleDict({"0": Block(), "1": Block()})),
            ["layers.0", "layers.1", "(root)"],
        ),
        (
            lambda: Model(stem=nn.Conv2d(3, 8, 3), a=nn.Sequential(Block(), Block())),
            ["a.0", "a.1", "(root)"],
        ),
        (
            lambda: Model(
                downs=nn.ModuleList(nn.ModuleList([Block(), nn.Conv2d(3, 3, 3)]) for _ in range(2))
            ),
            ["downs.0.0", "downs.0.1", "downs.1.0", "downs.1.1", "(root)"],
        ),
        # A plain layer beside blocks in a list, unless it is worth no all-gather.
        (
            lambda: Model(
                a=nn.ModuleList([nn.Linear(3, 8), Block(), Block(), nn.LayerNorm(2)]),
                b=nn.Linear(8, 8),
            ),
            ["a.0", "a.1", "a.2", "(root)"],
        ),
        (
            lambda: Model(towers=nn.ModuleList([Model(layers=blocks()), Decoder(layers=2)])),
            [
                "towers.0.layers.0",
                "towers.0.layers.1",
                "towers.1.layers.0",
                "towers.1.layers.1",
                "(root)",
            ],
        ),
        (
            lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
            [
                *(
                    f"{part}.layers.{number}"
                    for part in ("encoder", "decoder")
                    for number in range(2)
                ),
                "(root)",
            ],
        ),
        # Two levels: the inner one.
        (
            lambda: Model(stages=nn.ModuleList([stage(2), stage(3)])),
            [*(f"stages.{s}.blocks.{b}" for s, n in ((0, 2), (1, 3)) for b in range(n)), "(root)"],
        ),
        # Towers whose layers are lists of an attention and an MLP, which the tower calls.
        (
            lambda: Model(towers=nn.ModuleList([paired(), paired()])),
            [
                *(
                    f"towers.{tower}.layers.{n}.{half}"
                    for tower in (0, 1)
                    for n in (0, 1)
                    for half in (0, 1)
                ),
                "(root)",
            ],
        ),
        (
            lambda: Model(layers=nn.ModuleList([routed(), routed()])),
            ["layers.0", "layers.1", "(root)"],
        ),
        (routed, ["(root)"]),
        (
            lambda: Model(experts=nn.ModuleList(Model(layers=blocks()) for _ in range(2))),
            ["(root)"],
        ),
        # A head that is worth no all-gather.
        (
            lambda: Model(layers=blocks(4), norm=nn.LayerNorm(8), head=nn.Linear(8, 1)),
            [*(f"layers.{number}" for number in range(4)), "(root)"],
        ),
        # The root may use an embedding without calling it where no head has its shape.
        (
            lambda: Model(embed=nn.Embedding(11, 8), layers=blocks()),
            ["layers.0", "layers.1", "(root)"],
        ),
        (lambda: Model(embed=nn.Embedding(11, 8), head=nn.Linear(8, 11)), ["embed", "(root)"]),
        (
            lambda: Model(head=nn.Linear(8, 11), layers=blocks(), norm=nn.LayerNorm(8)),
            ["layers.0", "layers.1", "(root)"],
        ),
    ],
)
def test_units(make, expected):
    assert names(make()) == expected


def test_the_blocks_of_stages_are_units():
    """Stages as attributes, not in a list."""
    with torch.device("meta"):
        stages = {"stage1": stage(2, 256), "stage2": stage(6, 1024)}
        model = Model(stem=nn.Linear(3, 256), **stages, head=nn.Linear(2048, 2000))
    plan = plan_model(model, mesh=EIGHT, checkpoint_activations=True)
    inside = [f"stage{s}.blocks.{b}" for s, n in ((1, 2), (2, 6)) for b in range(n)]
    assert [unit.name for unit in plan.units] == [*inside, "stage2.reduce", "head", "(root)"]
    assert [unit.name for unit in plan.units if unit.checkpoint_activations] == inside


def branches():
    """An Inception's: they take the same input, so one after the other saves less than
    all at once.
    """
    return Model(
        branch1=nn.Linear(8, 8),
        **{f"branch{n}": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for n in (2, 3)},
    )


def test_branches_are_checkpointed_together():
    model = Model(layers=nn.ModuleList([branches(), branches()]))
    plan = plan_model(model, mesh=EIGHT, checkpoint_activations=True)
    assert [unit.blocks for unit in plan.units] == [("layers.0",), ("layers.1",), ()]


def test_checkpointing_that_reaches_no_block_is_an_error():
    for setting, value in (("checkpoint_activations", "selective"), ("compile", True)):
        with pytest.raises(PlanError, match=f"{setting}={value!r} reaches no module"):
            plan_model(nn.Linear(4, 4), mesh=EIGHT, **{setting: value})


def test_what_blocks_share_is_a_unit():
    layer = nn.Linear(3, 3)
    one = Model(layers=nn.ModuleList([shared(layer), shared(layer)]))
    assert names(one) == ["layers.0.layer", "layers.0", "layers.1", "(root)"]
    layers = nn.ModuleList([shared(nn.Linear(3, 3)) for _ in range(3)])
    layers[2].layer.weight = layers[0].layer.weight
    joined = "[layers.0.layer, layers.2.layer]"
    assert names(Model(layers=layers)) == [joined, "layers.1", "layers.0", "layers.2", "(root)"]


def test_a_weight_that_the_root_shares_is_the_roots():
    model = Model(layers=blocks(3))
    model.bare = model.layers[1].up.weight
    plan = plan_model(model, mesh=EIGHT)
    assert [unit.name for unit in plan.units] == ["layers.0", "layers.2", "(root)"]
    assert "layers.1: shares a parameter with the root, so the root owns it" in plan.notes


def test_modules_of_another_dtype_are_units_of_their_own():
    model = Decoder(layers=2).to(torch.bfloat16)
    for layer in model.layers:
        layer.norm.float()
    model.norm.float()
    plan = plan_model(model, mesh=EIGHT)
    assert [unit.name for unit in plan.units] == [
        *("embed", "layers.0.norm", "layers.1.norm", "norm", "layers.0", "layers.1", "(root)")
    ]
    assert any(
        each.startswith("layers.0.norm, layers.1.norm, norm: train in another dtype")
        for each in plan.notes
    )
    assert {spec.dtype for unit in plan.units[1:4] for spec in plan.specs_of(unit)} == {
        torch.float32
    }
    model = Decoder(layers=2)
    for layer in model.layers:
        layer.down.to(torch.bfloat16).requires_grad_(False)  # frozen ones stay
    assert names(model) == ["embed", "layers.0", "layers.1", "[norm, head]", "(root)"]


def test_functional_use_of_a_tied_weight():
    class Functional(Decoder):
        def forward(self, tokens):
            return F.linear(super().forward(tokens), self.embed.weight)

    model = Functional()
    del model.head
    assert names(model) == ["layers.0", "layers.1", "layers.2", "(root)"]


def test_a_container_without_forward_is_noted():
    plan = plan_model(nn.ModuleDict({"g": Decoder(), "d": nn.Linear(8, 1)}), mesh=EIGHT)
    assert any("no forward" in note for note in plan.notes)


class MidLast(nn.Module):
    """Registers its middle block last, as UNets do."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.mid = blocks(1), blocks(1), Block()

    def forward(self, x):
        return self.up[0](self.mid(self.down[0](x)))


def test_an_example_batch_gives_the_order_of_units():
    def order(**batch):
        plan = plan_model(MidLast(), mesh=EIGHT, **batch)
        return [unit.name for unit in plan.execution_order()]

    assert order() == ["(root)", "down.0", "up.0", "mid"]
    assert order(example_batch=torch.ones(2, 8)) == ["(root)", "down.0", "mid", "up.0"]
    seen, unseen = (
        plan_model(MidLast(), mesh=EIGHT, example_batch=batch) for batch in (torch.ones(2, 8), None)
    )
    assert "+ order: ('(root)', 'down.0', 'mid', 'up.0')" in unseen.diff(seen).replace(
        "[", "("
    ).replace("]", ")")


class HeadFirst(nn.Module):
    """Registers its head before what comes first."""

    def __init__(self):
        super().__init__()
        self.head, self.embed = nn.Linear(8, 50, bias=False), nn.Embedding(50, 8)
        self.layers, self.norm = blocks(), nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_an_example_batch_shows_a_head_that_is_registered_first():
    plan = plan_model(HeadFirst(), mesh=EIGHT, example_batch=torch.zeros(2, 4, dtype=torch.long))
    units = {unit.name: unit.reshard_after_forward for unit in plan.units}
    assert units == {
        "[head, norm]": False,
        "embed": True,
        "layers.0": True,
        "layers.1": True,
        "(root)": False,
    }
    assert names(HeadFirst()) == ["layers.0", "layers.1", "(root)"]


@pytest.mark.parametrize("number", [40, 400])
def test_the_root_keeps_a_tenth_of_many_layers(number):
    """Plain layers that are small by themselves, beside blocks of their size."""
    pairs = [layer for _ in range(number) for layer in (Block(), nn.Linear(8, 8), nn.LayerNorm(8))]
    plan = plan_model(Model(layers=nn.ModuleList(pairs)), mesh=EIGHT)
    in_root = sum(plan.specs[fqn].numel for fqn in plan.units[-1].params)
    assert 0 < in_root <= 0.1 * sum(spec.numel for spec in plan.params)
