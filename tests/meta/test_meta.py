"""Meta init, on one rank of a fake world: values, random states, memory.

Values are right there, because materialize computes them locally. The ranks' own tests are in
test_meta_ranks.py.
"""

import gc
import weakref

import forks
import pytest
import torch
from memory_count import LiveStorages
from meta_check import (
    both,
    build_sharded,
    check_same_as_ordinary,
    differences,
    net,
    same_bits,
    shard,
)
from meta_constructions import FILLS, Holder, own
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm

from shardkit.errors import ShardkitError
from shardkit.meta import init_on_meta, materialize
from shardkit.meta import tape as tapes
from shardkit.testing import fake_world


@pytest.fixture(autouse=True)
def world(request):
    size, rank = getattr(request, "param", (3, 1))
    with fake_world(size, rank=rank):
        yield


@pytest.mark.parametrize("world", [(1, 0), (3, 1)], ids=["whole", "rank1of3"], indirect=True)
@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
def test_same_as_ordinary_construction(fill):
    check_same_as_ordinary(lambda: Holder(fill))


def test_an_lstm_with_weight_norm():
    check_same_as_ordinary(lambda: weight_norm(nn.LSTM(4, 4), "weight_hh_l0"))


def test_real_tensors_from_outside():
    """They are read as they are at that time, and cannot be written."""

    def build(outside, table):
        first = nn.Linear(3, 3)
        outside.add_(1)  # no meta tensor takes part
        second = own(torch.rand(3) + outside)
        outside.mul_(2)  # after it was read by the tape
        return nn.Sequential(
            first, second, own(table.clone() * outside), own(torch.rand(3, 3) * table)
        )

    torch.manual_seed(7)
    plain = build(torch.zeros(3), torch.ones(3, 3))
    torch.manual_seed(7)
    outside, table = torch.zeros(3), torch.ones(3, 3)
    with init_on_meta():
        model = build(outside, table)
    assert differences(plain, materialize(fully_shard(model))) == []
    for write in (torch.Tensor.normal_, lambda tensor: tensor.copy_(torch.zeros(3))):
        with (
            pytest.raises(ShardkitError, match="a tensor from outside init_on_meta is written"),
            init_on_meta(),
        ):
            write(outside)


def test_tensors_in_plain_attributes():
    class Rope(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)
            self.table = torch.outer(torch.arange(4.0), torch.rand(3))
            self.pair = {"cos": self.table.cos(), "view": self.table[1:]}

    plain, model = both(Rope)
    assert same_bits(plain.table, model.table)
    assert same_bits(plain.pair["cos"], model.pair["cos"])
    model.table[1:] = 5.0  # aliases are aliases
    assert model.pair["view"].eq(5).all()


# ---- random states -------------------------------------------------------------------------------


def test_a_second_construction_goes_on_where_the_first_ends():
    torch.manual_seed(7)
    plain = [net(), net()]
    after = torch.get_rng_state()
    for order in (0, 1), (1, 0):
        torch.manual_seed(7)
        models = [build_sharded(net), build_sharded(net)]
        for i in order:
            materialize(models[i])
            assert differences(plain[i], models[i]) == []
        assert torch.equal(torch.get_rng_state(), after)


def test_two_models_of_one_recording_and_one_of_two():
    def parts():
        return net(), net()

    torch.manual_seed(7)
    plain = parts()
    torch.manual_seed(7)
    with init_on_meta(), init_on_meta():  # contexts inside each other are one
        models = parts()
    for expected, model in zip(plain, models, strict=True):
        assert differences(expected, materialize(shard(model))) == []
    torch.manual_seed(7)
    with init_on_meta():
        first = net()
    with init_on_meta():
        second = net()
        first[0].bias.data.copy_(second[0].bias)
    plain[0][0].bias.data.copy_(plain[1][0].bias)
    model = materialize(shard(nn.Sequential(first, second)))
    assert differences(nn.Sequential(*plain), model) == []


def test_a_generator_that_was_seeded_since_is_left_alone():
    torch.manual_seed(7)
    plain = net()
    torch.manual_seed(7)
    first = build_sharded(net)
    torch.manual_seed(7)
    second = build_sharded(net)
    torch.manual_seed(99)
    expected = torch.get_rng_state()
    for model in (second, first):
        materialize(model)
        assert torch.equal(torch.get_rng_state(), expected)
        assert differences(plain, model) == []


def test_an_own_generator_ends_where_ordinary_construction_leaves_it():
    def build(generator):
        return own(torch.randn(9, generator=generator))

    plain_generator, generator = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    plain = build(plain_generator)
    model = nn.Sequential(nn.Identity())
    with init_on_meta():
        model[0].w = build(generator)[0]
    materialize(fully_shard(model))
    assert same_bits(plain[0].data.chunk(3)[1], model[0].w.to_local().data)
    assert torch.equal(plain_generator.get_state(), generator.get_state())


def test_a_failed_construction_leaves_the_random_state():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), init_on_meta():
        nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1 // 0))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.empty(1).is_meta


# ---- memory --------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Initializes everything twice, the second time at the end, as transformers does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.embed = nn.Embedding(600, 256)
        self.head = nn.Linear(256, 600, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.02)


def test_memory_is_one_largest_tensor_beyond_the_shards():
    """In a process of its own: what tests before have recorded and left would be counted too."""
    run = forks.python("-c", "import test_meta; test_meta.count_bytes()")
    assert run.returncode == 0, run.stderr


def count_bytes():
    with LiveStorages() as ordinary:
        plain = Twice()
    total = sum(p.numel() * 4 for p in plain.parameters())
    assert ordinary.peak >= total  # the counter counts
    with LiveStorages() as recording_bytes, init_on_meta():
        model = Twice()
    assert recording_bytes.peak < 20_000  # states of the generator
    with fake_world(4):
        shard(model)
        with LiveStorages() as live:
            materialize(model)
        shards = sum(p.to_local().numel() * 4 for p in model.parameters())
    largest = 600 * 256 * 4
    assert largest <= live.peak - shards <= largest + 20_000 < total / 2


def test_the_tape_is_freed_with_its_model(monkeypatch):
    # one of its own, not that of models which other tests left recorded
    monkeypatch.setattr(tapes, "_latest", None)
    with init_on_meta():
        model = net()
    tape = weakref.ref(tapes.open_tape())
    shard(model)
    assert tape() is not None
    materialize(model)
    gc.collect()
    assert tape() is None
