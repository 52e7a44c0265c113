"""torch's own FSDP1 functions on models of the drop-in, and its grad scaler."""

import inspect

import pytest
import torch
from cpu_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard

from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.dropin import guards
from shardkit.fsdp1.sharded_grad_scaler import ShardedGradScaler
from shardkit.testing import fake_world

GUARDED = (*guards.STATICS, *guards.METHODS)

# --- torch's functions ----------------------------------------------------------------------------


@pytest.fixture
def guarded():
    """Guards that were put there by a model, whichever test made the first one."""
    guards.uninstall()
    with fake_world(2):
        yield FSDP(nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)))
    guards.uninstall()


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_torchs_function_acts_on_a_model_of_ours(name, monkeypatch, request):
    torchs = inspect.signature(getattr(TorchFSDP, name))
    if name != "rekey_optim_state_dict":
        assert list(inspect.signature(getattr(FSDP, name)).parameters) == list(torchs.parameters)
    calls = []
    monkeypatch.setattr(
        FSDP, name, staticmethod(lambda *args, **kwargs: calls.append((*args, *kwargs.values())))
    )
    guarded = request.getfixturevalue("guarded")  # which installs what is there then
    for model in (
        (guarded, guarded[0]) if "self" in torchs.parameters else (nn.Sequential(guarded),)
    ):
        given = {
            argument: model if argument in ("self", "model", "module") else None
            for argument in torchs.parameters
        }
        getattr(TorchFSDP, name)(*given.values())
        assert any(argument is model for argument in calls.pop())


def test_for_other_models_and_callers_it_is_torchs(guarded):
    plain = nn.Linear(2, 2)
    assert TorchFSDP.fsdp_modules(plain) == []
    assert TorchFSDP.get_state_dict_type(plain) is None
    with pytest.raises(
        TypeError, match="missing 2 required positional arguments: 'module' and 'state_dict_type'"
    ):
        TorchFSDP.state_dict_type()
    # torch.distributed.checkpoint asks FSDP1 first, and knows FSDP2.
    assert get_model_state_dict(fully_shard(nn.Linear(2, 2))).keys() == {"weight", "bias"}


def test_guards_come_once_with_the_first_model_and_go():
    guards.uninstall()
    before = {name: inspect.getattr_static(TorchFSDP, name) for name in GUARDED}
    signatures = {name: inspect.signature(getattr(TorchFSDP, name)) for name in GUARDED}
    with fake_world(2):
        FSDP(nn.Linear(2, 2))
        first = {name: inspect.getattr_static(TorchFSDP, name) for name in GUARDED}
        FSDP(nn.Linear(2, 2))
    assert all(first[name] is not before[name] for name in before)
    assert all(inspect.getattr_static(TorchFSDP, name) is first[name] for name in first)
    assert {name: inspect.signature(getattr(TorchFSDP, name)) for name in first} == signatures
    guards.uninstall()
    assert all(inspect.getattr_static(TorchFSDP, name) is before[name] for name in before)


# --- The scaler -----------------------------------------------------------------------------------


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_is_scaled_clipped_and_stepped():
    """Also plain parameters beside sharded ones."""
    data, losses = torch.linspace(-1, 1, 12).view(4, 3), []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model = model if is_plain else FSDP(model, ignored_modules=[model[2]], use_orig_params=True)
        scaler = (torch.amp.GradScaler if is_plain else ShardedGradScaler)("cpu", init_scale=4.0)
        values = []
        for _ in range(3):
            loss = model(data).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = (
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if is_plain
                else model.clip_grad_norm_(0.1)
            )
            values += [loss.item(), norm.item()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(values)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0])) == 6
