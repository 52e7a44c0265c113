"""The edges of the drop-in, where it does as FSDP1 did: words of errors, warnings, internals, which gradients are."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from shardkit.fsdp1._runtime_utils import _lazy_init, _reshard
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor

from shardkit import ShardkitError
from shardkit._fsdp.fsdp1 import TrainingState
from shardkit.errors import TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.translate.notes import REDUCES_UNUSED
from shardkit.testing import distributed

LINEARS = ModuleWrapPolicy({nn.Linear})
HALF = torch.float16


def chain(width=6):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class Pair(nn.Module):
    """Two layers, of which the second is computed and left out of the loss, and a parameter that none computes with."""

    def __init__(self):
        super().__init__()
        self.used, self.computed = nn.Linear(4, 4), nn.Linear(4, 4)
        self.used.register_parameter("idle", nn.Parameter(torch.ones(4)))

    def forward(self, x):
        return self.used(x), self.computed(x)


class Looker(nn.Module):
    """Notes what ``look`` says during its forward."""

    def __init__(self, look):
        super().__init__()
        self.inner, self.look, self.seen = nn.Linear(4, 4), look, []

    def forward(self, x):
        self.seen.append(self.look())
        return self.inner(x)


@distributed(world_size=2, backend="gloo")
def test_refusals_are_in_the_words_that_programs_look_for():
    model = chain()
    wrong = [
        ({"ignored_modules": [model[0]], "ignored_states": [model[2]]}, "Cannot pass both ignored_modules and ignored"),
        ({"ignored_states": [model[0], model[2].weight]}, r"list elements but got types \[<class 'torch.nn.modules"),
        ({"ignored_modules": [model[2].weight]}, "ignored_modules expects nn.Module list elements"),
        ({"param_init_fn": 3}, "to be callable"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "requires explicit specification of process group or d"),
        (
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": dist.group.WORLD},
            "Expected process_group to be passed in as either None or Tuple",
        ),
    ]
    for arguments, words in wrong:
        with pytest.raises(ValueError, match=words):
            FSDP(model, **arguments)
    with pytest.raises(TranslationError, match="Wrap each of its modules"):
        FSDP(nn.ModuleList(model), auto_wrap_policy=LINEARS)
    model[2] = nn.Sequential(nn.Identity(), FSDP(model[2]))
    with pytest.raises(ValueError, match=r"to not already have FSDP applied but found 2\.1 in"):
        FSDP(model, auto_wrap_policy=LINEARS)
    with pytest.raises(ValueError, match="should not include FSDP modules"):
        FSDP(model, ignored_modules=[model[2][1]])
    whole = FSDP(model)
    with pytest.raises(ValueError, match=r"to not already have FSDP applied but found \(root\) in"):
        FSDP(whole, auto_wrap_policy=LINEARS)
    assert whole(torch.ones(2, 6)).shape == (2, 6)  # all that was refused left it as it was


@distributed(world_size=2, backend="gloo")
def test_modules_with_nothing_to_shard_and_one_that_is_sharded():
    plain = chain()
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module"):
        ignored = FSDP(plain, ignored_modules=[plain])
    assert [id(p) for p in ignored.parameters()] == [id(p) for p in plain.parameters()]
    assert torch.equal(copy.deepcopy(ignored)(torch.ones(2, 6)), plain(torch.ones(2, 6)))
    empty = FSDP(nn.Tanh())
    assert torch.equal(empty(torch.zeros(3)), torch.zeros(3))
    assert empty.state_dict() == {}
    assert empty.world_size == 2
    every = FSDP(chain(), auto_wrap_policy=always_wrap_policy)
    assert torch.equal(every(torch.ones(2, 6)), ignored(torch.ones(2, 6)))
    trained = FSDP(again := chain(), auto_wrap_policy=LINEARS)
    trained(torch.ones(2, 6)).sum().backward()
    second = FSDP(again)  # as to evaluate
    assert torch.equal(second(torch.ones(2, 6)), trained(torch.ones(2, 6)))
    second.load_state_dict({name: value + 1 for name, value in trained.state_dict().items()})
    assert torch.equal(second.state_dict()["0.bias"], plain.state_dict()["0.bias"] + 1)
    with pytest.raises(TranslationError, match="sharded already"):
        FSDP(again, sharding_strategy=ShardingStrategy.NO_SHARD)
    once = FSDP(model := chain(), ignored_states=(p for p in model[0].parameters()))  # an iterator
    assert once._ignored_params == set(model[0].parameters())


@distributed(world_size=1, backend="gloo")
def test_a_rank_alone_is_told_that_it_does_not_shard_and_what_stays_in_full_precision():
    for strategy in (None, ShardingStrategy.SHARD_GRAD_OP):
        told = f"instead of {strategy or ShardingStrategy.FULL_SHARD} since the world size is 1"
        with pytest.warns(UserWarning, match=told):
            FSDP(chain(), sharding_strategy=strategy)
    alone = {"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": MixedPrecision(HALF)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(chain(), auto_wrap_policy=LINEARS, **alone)
    with pytest.warns(UserWarning, match="These modules will be wrapped as separate FSDP"):
        normed = FSDP(nn.Sequential(nn.BatchNorm1d(3)), auto_wrap_policy=LINEARS, **alone)
    assert normed[0].mixed_precision == MixedPrecision()


@distributed(world_size=2, backend="gloo")
def test_internals_are_answered_or_say_what_to_use():
    inner = Looker(lambda: model.training_state)
    model = FSDP(inner, auto_wrap_policy=LINEARS, use_orig_params=True)
    assert model.training_state is TrainingState.IDLE
    assert model._is_root is None
    model(torch.ones(2, 4)).sum().backward()
    assert inner.seen == [TrainingState.FORWARD_BACKWARD]
    assert (model._is_root, model.inner._is_root, model._has_params) == (True, False, False)
    with FSDP.summon_full_params(model):
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
        with pytest.raises(ValueError, match="expected to be in states"):
            model.apply(print)
    model._assert_state([TrainingState.IDLE])
    with pytest.raises(ShardkitError, match="current state is"):
        model._assert_state(TrainingState.FORWARD_BACKWARD)
    for name in ("_handles", "_comm_hook", "_sync_gradients"):
        assert not hasattr(model, name)
        with pytest.raises(TranslationError, match=f"^{name}: is an internal of FSDP1.*[Uu]se |unshard"):
            getattr(model, name)
    model.module.params = 5  # a model's own
    assert model.params == 5


@distributed(world_size=2, backend="gloo")
@pytest.mark.skipif(not REDUCES_UNUSED, reason="before torch 2.13 FSDP2 leaves unused parameters out")
def test_what_no_gradient_reached_has_none_and_what_is_beside_it_zeros():
    model = FSDP(Pair(), auto_wrap_policy=LINEARS)
    for _ in range(2):
        model(torch.ones(2, 4))[0].sum().backward()
        assert model.computed.weight.grad is None
        assert model.used.weight.grad is not None
        assert torch.equal(model.used.idle.grad.full_tensor(), torch.zeros(4))


@distributed(world_size=2, backend="gloo")
def test_optimizers_that_step_in_backward():
    plain = chain()
    apart, inside = (FSDP(copy.deepcopy(plain), auto_wrap_policy=LINEARS, use_orig_params=True) for _ in range(2))
    _apply_optimizer_in_backward(torch.optim.SGD, inside.parameters(), {"lr": 0.1}, register_hook=False)
    optimizer = torch.optim.SGD(apart.parameters(), lr=0.1)
    for step in range(2):
        for model in (apart, inside):
            model(torch.full((2, 6), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, other in zip(inside.parameters(), apart.parameters(), strict=True):
        assert ours.grad is None
        assert torch.equal(ours.to_local(), other.to_local())


@distributed(world_size=2, backend="gloo")
def test_gradients_that_are_kept_in_low_precision_and_the_norm_of_none():
    kept = FSDP(chain(), mixed_precision=MixedPrecision(HALF, HALF, keep_low_precision_grads=True))
    whole = FSDP(chain(), mixed_precision=MixedPrecision(HALF, HALF))
    for model in (kept, whole):
        with pytest.warns(UserWarning, match="with no gradients -- returning the total norm in the default dtype"):
            assert model.clip_grad_norm_(1.0) == 0
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
    for low, full in zip(kept.parameters(), whole.parameters(), strict=True):
        assert (low.grad.dtype, full.grad.dtype) == (HALF, torch.float32)
    norms = [model.clip_grad_norm_(1e9) for model in (kept, whole)]
    assert [norm.dtype for norm in norms] == [HALF, torch.float32]
    torch.testing.assert_close(norms[0].float(), norms[1], rtol=2e-3, atol=0)  # float16 has 11 bits, added up twice


@distributed(world_size=2, backend="gloo")
def test_handles_reshard_a_root_and_move_shards():
    model = FSDP(chain(), auto_wrap_policy=LINEARS, use_orig_params=True)
    assert _lazy_init(model, model) is model
    assert (model._is_root, model._handle) == (True, None)  # units inside it hold all parameters
    assert not hasattr(model, "_unshard_stream")
    single = FSDP(nn.Linear(6, 6))
    assert single(torch.ones(2, 6)).requires_grad  # the root stays gathered for its backward
    for free, is_sharded in ((False, False), (True, True)):
        _reshard(single, single._handle, free)
        assert isinstance(single.module.weight, DTensor) is is_sharded
    before = model(torch.ones(2, 6)).sum()
    assert model._unshard_stream is model[0]._unshard_stream is not None
    for handle in model._all_handles:
        flat = handle.flat_param
        assert flat.data_ptr() == flat._local_shard.data_ptr()
        handle.flat_param_to(torch.float64)
        handle.flat_param_to(torch.float32)  # other memory, which is now the model's
        flat.data.mul_(2)
    assert not torch.equal(model(torch.ones(2, 6)).sum(), before)
    with pytest.raises(TranslationError, match=r"^_handle.flat_param: has no counterpart in FSDP2.*wrapper.params"):
        model[0]._handle.flat_param  # noqa: B018
    with pytest.raises(TranslationError, match=r"^_handle.pre_unshard: has no counterpart in FSDP2.*unshard"):
        model._all_handles[0].pre_unshard()
    assert FSDP(nn.Linear(6, 6, bias=False))._handle.flat_param.numel() == 18  # its only parameter


@distributed(world_size=2, backend="gloo")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_module_that_is_wrapped_twice_trains_like_one_that_is_wrapped_once(dtype):
    """As programs did because a root's parameters stayed gathered: those of the inner wrapper do not."""
    once, twice = (FSDP(chain(), mixed_precision=MixedPrecision(dtype, torch.float32)) for _ in range(2))
    twice = FSDP(twice, mixed_precision=MixedPrecision(dtype, torch.float32))
    copied = copy.deepcopy(twice)
    for model in (once, twice, copied):
        model(torch.ones(2, 6)).float().square().sum().backward()
        with model.no_sync():
            model(torch.ones(2, 6)).float().sum().backward()
        model(torch.ones(2, 6)).float().sum().backward()
        assert model.clip_grad_norm_(0.1) > 0.1
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = once.state_dict()
    for model in (twice, copied):
        assert isinstance(model.module, FSDP)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert {name: value.tolist() for name, value in model.state_dict().items()} == {
            name: value.tolist() for name, value in expected.items()
        }
        with FSDP.summon_full_params(model):
            assert {name for name, _ in model.named_parameters()} == expected.keys()
            assert torch.equal(model.module[0].weight, expected["0.weight"])
        model.load_state_dict({name: torch.zeros_like(value) for name, value in expected.items()})
        assert model(torch.ones(2, 6)).abs().sum() == 0
