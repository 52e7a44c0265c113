"""Meta init, on one rank of a fake world: values, random states, memory, ties, initialisers, errors.

Values are right there, because materialize computes them locally. The ranks' own tests are in test_meta_ranks.py.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from meta_check import build_sharded, check_same_as_ordinary, differences, same_bits, shard
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardkit
from shardkit.errors import ShardkitError
from shardkit.meta import init_on_meta, materialize
from shardkit.meta.context import recording
from shardkit.testing import fake_world


@pytest.fixture(autouse=True)
def world(request):
    size, rank = getattr(request, "param", (3, 1))
    with fake_world(size, rank=rank):
        yield


# ---- constructions: each is something that people write, and that a simpler way of recording gets wrong --------


def own(value: Tensor) -> nn.ParameterList:
    """A module with one parameter of that value."""
    return nn.ParameterList([nn.Parameter(value)])


class Holder(nn.Module):
    """A module with what ``fill`` puts in it, and a linear layer after, so that the random state matters."""

    def __init__(self, fill) -> None:
        super().__init__()
        fill(self)
        self.after = nn.Linear(5, 3)


def in_place_parts(m):
    m.w = nn.Parameter(torch.empty(7, 4))
    for rows in m.w.data.split((3, 3, 1)):
        nn.init.xavier_uniform_(rows)
    with torch.no_grad():
        m.w[0] = 7.0
        m.w[1].mul_(2)
        m.w[:, 2] += torch.randn(7)
        m.w[m.w > 1.5] = 1.5


def samplers(m):
    for i, init in enumerate((nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.kaiming_normal_, nn.init.eye_)):
        setattr(m, f"w{i}", nn.Parameter(init(torch.empty(6, 5))))
    m.tail = nn.Parameter(nn.init.trunc_normal_(torch.empty(4, 3), a=1.9, b=2.0))
    m.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 4), 0.3))
    m.dirac = nn.Parameter(nn.init.dirac_(torch.empty(3, 3, 3)))


def rejection(m):
    value = torch.randn(40)
    while (outside := value.abs() > 1).any():
        value = torch.where(outside, torch.randn(40), value)
    m.w = nn.Parameter(value)


def values_in_control_flow(m):
    m.rates = [x.item() for x in torch.linspace(0, 0.3, 4)] + torch.linspace(0, 1, 3).tolist()
    m.width = int(torch.randint(3, 9, ()))
    m.w = nn.Parameter(torch.randn(m.width, 2))
    m.kept = nn.Parameter(m.w.data[m.w.data[:, 0] > 0])


def constants(m):
    m.a = nn.Parameter(torch.tensor([[1.5, 2.0], [3.0, -0.0]]))
    m.b = nn.Parameter(torch.tensor(0.5) * torch.ones(4))
    m.c = nn.Parameter(torch.from_numpy(torch.linspace(0, 1, 5).numpy() * 2))
    m.d = nn.Parameter(torch.arange(5) * 0.3)
    m.load_state_dict({"a": torch.ones(2, 2), "d": torch.full((5,), 3.0)}, strict=False)


def reused_numpy_memory(m):
    shared = torch.zeros(3).numpy()
    m.rows = nn.Parameter(torch.empty(4, 3))
    for i in range(4):
        shared[:] = i
        m.rows.data[i].copy_(torch.from_numpy(shared))


def buffers(m):
    m.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
    m.register_buffer("original", m.inv_freq, persistent=False)
    m.register_buffer("position", torch.arange(6).expand(1, -1))
    m.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    m.register_buffer("nothing", None)
    m.register_buffer("noise", torch.rand(3))


def dtypes(m):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        m.a = nn.Linear(5, 7)
        m.b = nn.Parameter(torch.arange(5) * 0.3)
        nn.init.trunc_normal_(m.a.weight)
    finally:
        torch.set_default_dtype(before)
    m.c = nn.Linear(3, 3).to(torch.bfloat16)
    m.d = nn.Linear(3, 3, dtype=torch.float64)
    m.e = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))
    m.f = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64).conj())
    m.g = nn.Parameter(torch.view_as_real(m.e.data)[..., 1].neg().clone())


def reseeding(m):
    m.a = nn.Parameter(torch.randn(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        m.forked = nn.Parameter(torch.randn(3))
    m.b = nn.Parameter(torch.randn(3))
    state = torch.get_rng_state()
    m.c = nn.Parameter(torch.randn(3))
    torch.set_rng_state(state)
    m.c_again = nn.Parameter(torch.randn(3))
    generator = torch.Generator().manual_seed(9)
    m.d = nn.Parameter(torch.randn(3, generator=generator))
    m.e = nn.Parameter(torch.empty(3).normal_(generator=generator))


def seeded_inside(m):
    m.a = nn.Parameter(torch.randn(3))
    torch.manual_seed(11)  # the seed that the test begins with
    m.b = nn.Parameter(torch.randn(3))


def copies(m):
    block = nn.TransformerEncoderLayer(8, 2, 12)
    m.encoder = nn.ModuleList(copy.deepcopy(block) for _ in range(3))
    m.table = nn.Parameter(torch.randn(4, 2))
    m.mirror = nn.Parameter(m.table.data)  # the same memory, another parameter
    m._parameters["direct"] = nn.Parameter(torch.randn(4))


def ties(m):
    m.embed = nn.Embedding(9, 4, padding_idx=0)
    m.head = nn.Linear(4, 9, bias=False)
    m.head.weight = m.embed.weight
    m.frozen = nn.Linear(4, 4).requires_grad_(False)


def norms(m):
    m.a = nn.utils.parametrizations.weight_norm(nn.Linear(5, 7))
    m.b = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7))
    m.c = nn.utils.parametrizations.orthogonal(nn.Linear(5, 7))
    m.d = nn.BatchNorm2d(4)


def looks_at_devices(m):
    weight = torch.empty(4, 3)
    assert weight.device.type == "cpu"
    assert not weight.is_meta
    m.same = weight.to("cpu") is weight and weight.cpu() is weight
    if weight.device.type != "meta" and torch.tensor([]).device == torch.get_default_device():
        weight.to(weight.device).normal_()
    m.w = nn.Parameter(weight.to("cpu", torch.float32))
    m.lower = nn.Parameter(weight.to("cpu", torch.float16))


def draws_that_depend_on_values(m):
    torch.poisson(torch.rand(50) * 20)  # the result is dropped, but how many numbers it took follows from the rates
    torch.bernoulli(torch.rand(5))
    m.w = nn.Parameter(torch.randn(3))


def decompositions(m):
    _, s, vh = torch.linalg.svd(torch.randn(4, 6))  # whose meta kernel lays vh out in another way
    m.vh = nn.Parameter(vh[:3].clone(memory_format=torch.contiguous_format))
    m.values = nn.Parameter(s)
    m.spectrum = nn.Parameter(
        torch.view_as_real(torch.fft.rfft2(torch.randn(4, 6)))[..., 0].clone(memory_format=torch.contiguous_format)
    )


def reads_before_changes(m):
    m.a = nn.Parameter(torch.ones(4, 3))
    m.before = nn.Parameter(m.a.data.clone())
    m.a.data.mul_(2)
    m.noisy = nn.Parameter(m.a.data + torch.rand(4, 3))
    m.a.data.add_(torch.rand(4, 3))
    m.late = nn.Parameter(m.before.data - m.a.data)
    m.a.data.zero_()
    m.x = nn.Parameter(torch.ones(4, 3))
    m.copy_of_x = nn.Parameter(m.x.data.clone())
    m.x.data.mul_(2)


FILLS = [
    in_place_parts, samplers, rejection, values_in_control_flow, constants, reused_numpy_memory, buffers, dtypes,
    reseeding, seeded_inside, copies, ties, norms, looks_at_devices, decompositions,
    reads_before_changes, draws_that_depend_on_values,
]  # fmt: skip


@pytest.mark.parametrize("world", [(1, 0), (3, 1)], ids=["whole", "rank1of3"], indirect=True)
@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
def test_same_as_ordinary_construction(fill):
    check_same_as_ordinary(lambda: Holder(fill))


def test_real_tensors_from_outside():
    """They stay real, are computed at once, and draw what they would draw."""

    def build(outside, table):
        first = nn.Linear(3, 3)
        outside.add_(1)
        outside.normal_(outside.mean().item())  # draws, so all draws before must be made
        second = own(torch.rand(3) + outside)
        table.copy_(first.weight.data)
        outside.mul_(2)  # after it was read by the tape
        return nn.Sequential(first, second, own(table.clone() * outside), own(torch.rand(3, 3) * table))

    plain_parts, parts = ([torch.zeros(3), torch.zeros(3, 3)] for _ in range(2))
    torch.manual_seed(7)
    plain = build(*plain_parts)
    torch.manual_seed(7)
    with init_on_meta():
        model = build(*parts)
    assert differences(plain, materialize(fully_shard(model))) == []
    assert all(same_bits(a, b) for a, b in zip(plain_parts, parts, strict=True))


def test_init_on_meta_makes_meta_tensors_only():
    with init_on_meta():
        model = Holder(buffers)
    tensors = [*model.parameters(), *model.buffers()]
    assert len(tensors) == 6
    assert all(tensor.is_meta for tensor in tensors)


def test_weight_norm_of_the_old_kind():
    with pytest.warns(FutureWarning, match="weight_norm"):
        check_same_as_ordinary(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)))


def test_tensors_in_plain_attributes():
    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)
            self.table = torch.outer(torch.arange(4.0), torch.rand(3))
            self.pair = {"cos": [self.table.cos()], "view": self.table[1:]}

    plain, model = both(Rope)
    assert same_bits(plain.table, model.table)
    assert same_bits(plain.pair["cos"][0], model.pair["cos"][0])
    model.table[1:] = 5.0  # aliases are aliases
    assert model.pair["view"].eq(5).all()


def both(build, seed=3):
    torch.manual_seed(seed)
    plain = build()
    torch.manual_seed(seed)
    return plain, materialize(build_sharded(build))


# ---- random states ---------------------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


def test_seed_given_at_materialize():
    torch.manual_seed(7)
    plain = net()
    after = torch.get_rng_state()
    torch.manual_seed(1234)
    model = build_sharded(net)
    torch.rand(3)
    materialize(model, seed=7)
    assert differences(plain, model) == []
    assert torch.equal(torch.get_rng_state(), after)


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


def test_the_same_seed_again_gives_the_same_values_again():
    torch.manual_seed(7)
    plain = net()
    torch.manual_seed(7)
    first = build_sharded(net)
    torch.manual_seed(7)
    second = build_sharded(net)
    assert differences(plain, materialize(second)) == []
    assert differences(plain, materialize(first)) == []


def test_two_models_of_one_recording_and_one_of_two():
    def parts():
        return net(), net()

    torch.manual_seed(7)
    plain = parts()
    torch.manual_seed(7)
    with init_on_meta():
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
    model = build_sharded(net)
    torch.manual_seed(99)
    expected = torch.get_rng_state()
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


def test_pythons_random_numbers_are_drawn_during_construction():
    def build():
        return nn.Sequential(nn.Linear(4, random.randint(2, 50)))

    random.seed(5)
    plain = build()
    random.seed(5)
    model = build_sharded(build)
    assert model[0].weight.shape == plain[0].weight.shape


def test_contexts_inside_each_other_are_one_recording():
    torch.manual_seed(7)
    plain = net()
    torch.manual_seed(7)
    with init_on_meta():
        first = nn.Linear(4, 5)
        with init_on_meta():
            model = nn.Sequential(first, nn.Linear(5, 2))
    assert differences(plain, materialize(shard(model))) == []


# ---- memory ----------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages that aten calls make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key not in self._seen and num_bytes:
            self._seen.add(key)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._end, key, num_bytes)

    def _end(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


class Twice(nn.Module):
    """Initialises everything twice, the second time at the end, as transformers does; then scales in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.embed = nn.Embedding(600, 256)
        self.head = nn.Linear(256, 600, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.02)
        for i, layer in enumerate(self.layers):
            layer.weight.data.div_((2.0 * (i + 1)) ** 0.5)


def test_memory_is_one_largest_tensor_beyond_the_shards():
    with LiveBytes() as ordinary:
        plain = Twice()
    total = sum(p.numel() * 4 for p in plain.parameters())
    assert ordinary.peak >= total  # the counter counts
    with LiveBytes() as recording_bytes, init_on_meta():
        model = Twice()
    assert recording_bytes.peak < 1000
    shard(model)
    with LiveBytes() as live:
        materialize(model)
    shards = sum(p.to_local().numel() * 4 for p in model.parameters())
    largest = 600 * 256 * 4
    assert largest <= live.peak - shards <= largest + 20_000 < total / 2


def test_the_tape_is_freed_with_its_model():
    with init_on_meta(), recording() as recorder:
        model = net()
    tape = weakref.ref(recorder.tape)
    del recorder
    shard(model)
    assert tape() is not None
    materialize(model)
    gc.collect()
    assert tape() is None


# ---- identity, mixtures ----------------------------------------------------------------------------------------


def test_objects_attributes_and_optimizers_stay():
    with init_on_meta():
        model = net()
        model[0].bias.note = "kept"
    shard(model)
    model[0].weight.decay = 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held = list(model.parameters())
    materialize(model)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert model[0].weight.decay == 0.5
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.to_local().clone() for parameter in held]
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), old - 1, rtol=0, atol=0)


@pytest.mark.parametrize("world", [(1, 0)], indirect=True)
def test_parameters_that_shared_memory_are_sharded_apart():
    """As by fully_shard on a real model."""

    class Mirror(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 2))
            self.b = nn.Parameter(self.a.data)

    _, model = both(Mirror)
    model.a.to_local().detach().zero_()
    assert model.b.to_local().all()


def test_real_parameters_are_left_alone():
    torch.manual_seed(7)
    plain = net()
    torch.manual_seed(7)
    with init_on_meta():
        model = net()
    adapter = nn.Linear(2, 2)
    expected = nn.Sequential(plain, copy.deepcopy(adapter))
    model = shard(nn.Sequential(model, adapter))
    materialize(model, init=lambda module: [p.data.add_(0) for p in module.parameters(recurse=False)])
    assert differences(expected, model) == []


def test_casts_after_the_context_are_followed():
    torch.manual_seed(7)
    plain = net().to(torch.bfloat16)
    torch.manual_seed(7)
    with init_on_meta():
        model = net()
    assert differences(plain, materialize(shard(model.to(torch.bfloat16)))) == []


# ---- initialisers ----------------------------------------------------------------------------------------------


def scaled(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.mul_(0.5)
        nn.init.normal_(module.bias)


def test_init_is_model_apply_after_construction():
    torch.manual_seed(7)
    plain = net().apply(scaled)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    model = build_sharded(net)
    materialize(model, init=scaled)
    assert differences(plain, model) == []
    assert torch.equal(after, torch.get_rng_state())


def test_plain_meta_models_use_their_reset_parameters():
    def build():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.MultiheadAttention(4, 2), nn.LSTM(4, 3))

    with torch.device("meta"):
        model = shard(build())
    torch.manual_seed(7)
    materialize(model)
    plain = build()

    def reset(module):
        getattr(module, "reset_parameters", getattr(module, "_reset_parameters", lambda: None))()

    torch.manual_seed(7)
    plain.apply(reset)
    assert differences(plain, model) == []


class WithInitWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("freqs", torch.arange(4) * 0.1, persistent=False)
        self.inner = nn.Linear(3, 3)

    def init_weights(self, std: float = 0.1) -> None:
        nn.init.normal_(self.w, std=std)
        self.freqs = torch.arange(4) * 0.1  # assigned, not copied to


class WithInitEach(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def test_plain_meta_models_use_their_init_weights():
    with torch.device("meta"):
        model = shard(WithInitWeights())
        each = shard(WithInitEach())
    torch.manual_seed(7)
    materialize(model)
    plain = WithInitWeights()
    torch.manual_seed(7)
    plain.inner.reset_parameters()
    plain.init_weights()
    assert differences(plain, model) == []
    materialize(each)
    assert each.inner.weight.to_local().eq(1).all()
    assert each.inner.bias.to_local().eq(0).all()


def test_plain_meta_models_take_init():
    with torch.device("meta"):
        model = shard(net())
    materialize(model, init=lambda m: [nn.init.constant_(p, 2.0) for p in m.parameters(recurse=False)])
    assert all(parameter.to_local().eq(2).all() for parameter in model.parameters())


# ---- errors ----------------------------------------------------------------------------------------------------


def meta_state(model):
    return [(id(t), t.device.type, type(t)) for t in (*model.parameters(), *model.buffers())]


def refused(model, match, **kwargs):
    before = meta_state(model)
    state = torch.get_rng_state()
    with pytest.raises(ShardkitError, match=match):
        materialize(model, **kwargs)
    assert meta_state(model) == before
    assert torch.equal(state, torch.get_rng_state())


def test_materialize_before_sharding():
    with init_on_meta():
        model = net()
    refused(model, r"^model: no module of it is sharded\. .* Call shard_model\(model\) or fully_shard first\.$")


def test_materialize_twice():
    model = build_sharded(net)
    materialize(model)
    refused(model, r"^model: none of its parameters and buffers is on the meta device\. materialize is called once")


def test_a_model_that_was_never_on_meta():
    refused(fully_shard(net()), r"none of its parameters and buffers is on the meta device")


def test_not_a_module():
    with pytest.raises(ShardkitError, match=r"^model: a dict is no nn.Module"):
        materialize({})


class Garbage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.empty(4, 2))
        self.partly = nn.Parameter(torch.empty(4, 2))
        self.partly.data[:2] = 1
        self.derived = nn.Parameter(self.never.data * 2)
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.masked = nn.Parameter(torch.empty(4))
        self.masked.data[torch.ones(4, dtype=torch.bool)] = 0.0


@pytest.mark.parametrize("context", [init_on_meta, lambda: torch.device("meta")], ids=["recorded", "plain"])
def test_whatever_would_stay_uninitialised_is_listed(context):
    with context():
        model = Garbage()
    names = r"^never, partly, derived, masked, table: would stay uninitialised"
    refused(shard(model), names + r".* pass materialize\(model, init=...\)")


def test_whatever_init_leaves_out_is_listed():
    with torch.device("meta"):
        model = shard(net())

    def init(module):
        if getattr(module, "out_features", None) == 5:
            nn.init.zeros_(module.weight)

    refused(model, r"^0\.bias, 1\.weight, 1\.bias: would stay uninitialised", init=init)


def test_ties_made_afterwards():
    with init_on_meta():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    refused(fully_shard(model), r"^0\.weight: it was tied to 1\.weight after init_on_meta")


def test_shapes_changed_afterwards():
    with init_on_meta():
        model = net()
    with torch.device("meta"):
        model[0].bias = nn.Parameter(torch.zeros(7))
    refused(shard(model), r"^0\.bias: the shape is not the one that was recorded")


def test_constants_changed_afterwards():
    constant = torch.ones(4)
    with init_on_meta():
        model = Holder(lambda m: setattr(m, "w", nn.Parameter(torch.rand(4) + constant)))
    constant.zero_()
    refused(shard(model), r"^model: 1 real tensors that init_on_meta recorded as constants were changed since")


def test_weak_references():
    model = build_sharded(net)
    reference = weakref.ref(model[0].bias)
    refused(model, r"^0\.bias: something holds a weak reference to it")
    assert reference() is model[0].bias


def test_sharding_inside_the_context():
    with pytest.raises(ShardkitError, match=r"^init_on_meta: a DTensor is used inside"), init_on_meta():
        shard(net())


def test_an_initialiser_that_raises_leaves_the_model():
    model = build_sharded(net)
    before = meta_state(model)
    with pytest.raises(ZeroDivisionError):
        materialize(model, init=lambda module: 1 / 0)
    assert meta_state(model) == before
    materialize(model)


def test_public_names():
    assert shardkit.init_on_meta is init_on_meta
    assert shardkit.materialize is materialize
