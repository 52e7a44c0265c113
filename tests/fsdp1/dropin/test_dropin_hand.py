"""What programs do to parameters and gradients by hand, as FSDP1 let them: right, or refused by name."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from fsdp1_models import fsdp1, quiet
from small_models import Block
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from shardkit import TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.dropin.tensors import Gradient, Sharded
from shardkit.testing import distributed

BF16 = torch.bfloat16


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))  # one rank of two has nothing of the last


def inputs(seed):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def begun_on_meta(module):
    module.to_empty(device=torch.device("cpu"), recurse=False).to(BF16)


def mixed_by_hand(wrapper, steps=40, lr=1e-4, to=BF16):
    """bfloat16 weights, stepped as mistral-finetune does: float32 copies are put in their place for the step.

    On the drop-in rank 0 has the weights, and others begin on meta, in float32.
    """
    torch.manual_seed(1)
    on_meta = wrapper is FSDP and dist.get_rank() > 0
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))
    model = model if on_meta else model.to(to)
    options = {"sync_module_states": True, "param_init_fn": begun_on_meta if on_meta else None}
    policy = ModuleWrapPolicy({nn.Sequential})
    model = wrapper(model, auto_wrap_policy=policy, use_orig_params=False, **options if wrapper is FSDP else {})
    params = list(model.parameters())
    with torch.no_grad():
        for param in params:
            param._mp_param = torch.empty_like(param, dtype=torch.float32)
            param._mp_param.copy_(param.to(torch.float32))
            param.data = param.data.to(BF16)  # they are
    optimizer, losses = torch.optim.AdamW(params, lr=lr), []
    for step in range(steps):
        loss = (model(inputs(2 * step + dist.get_rank()).to(BF16)) - 3).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in params:
                param._temp = param.data
                param.data = param._mp_param
                param.grad = param.grad.to(torch.float32)
        optimizer.step()
        with torch.no_grad():
            for param in params:
                param._temp.copy_(param.data)
                param.data = param._temp
                param.grad = param.grad.to(BF16)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(world_size=2, backend="gloo")
def test_weights_are_exchanged_for_float32_copies_and_back():
    with quiet():
        ours, theirs = mixed_by_hand(FSDP), mixed_by_hand(fsdp1)
    assert ours == theirs
    assert ours[-1] != mixed_by_hand(FSDP, lr=0)[-1]
    with pytest.raises(TranslationError, match=r"rank 1 differs from rank 0 in dtype of 1\.0\.weight"):
        mixed_by_hand(FSDP, to=torch.float64)


@distributed(world_size=2, backend="gloo")
def test_other_exchanges_of_data_are_refused():
    model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    for value in (model[2].weight.data.clone(), torch.zeros(1, 4)):
        with pytest.raises(TranslationError, match=r"^param.data cannot be assigned .* Use param.data.copy_"):
            model[2].weight.data = value
    model[0].weight.data = model[0].weight.data.double()
    with pytest.raises(TranslationError, match=r"^data of 0.weight is in another dtype"):
        model(inputs(0))
    model[0].weight.data = model[0].weight.data.float() * 0  # other memory: copied into its own
    assert torch.equal(model(inputs(0)), model(inputs(1)))
    model(inputs(0)).sum().backward()
    with pytest.raises(TranslationError, match=r"^grad.data cannot be assigned"):
        model[0].weight.grad.data = model[0].weight.grad * 2


def trained(strategy=ShardingStrategy.FULL_SHARD):
    """A wrapped block after a backward whose gradients differ between ranks before they are reduced."""
    torch.manual_seed(0)
    model = FSDP(Block(8), sharding_strategy=strategy)
    model(torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))).pow(2).sum().backward()
    return [param.grad for param in model.parameters()], model.clip_grad_norm_(1e9).item()


def added_in_place(grads):
    total = torch.tensor(0.0)
    for grad in grads:
        total += grad.norm(dtype=torch.float32) ** 2


REFUSED = {
    "added in place": added_in_place,
    "stacked": lambda grads: torch.stack([torch.linalg.vector_norm(grad, 2.0) for grad in grads]).norm(),
    "of detached ones": lambda grads: sum(torch.norm(grad.detach(), p=2) ** 2 for grad in grads),
    "of sums": lambda grads: grads[0].float().pow(2).sum().sqrt(),
    "of one vector": lambda grads: torch.cat([grad.flatten() for grad in grads]).norm().item(),
    "foreach": lambda grads: torch.stack(torch._foreach_norm(grads)),
}


@pytest.mark.parametrize("way", REFUSED)
@distributed(world_size=2, backend="gloo")
def test_norms_that_torch_would_reduce_too_early_are_refused(way):
    grads, _ = trained()
    with pytest.raises(TranslationError, match=r"Use model\.clip_grad_norm_\(\.\.\.\), or call \.item\(\) first"):
        REFUSED[way](grads)


@distributed(world_size=2, backend="gloo")
def test_numbers_of_shards_add_up_to_the_norm():
    grads, norm = trained()
    squares = torch.tensor([grad.norm().item() ** 2 for grad in grads]).sum()
    dist.all_reduce(squares)
    assert squares.sqrt().item() == pytest.approx(norm, rel=1e-6)
    assert f"{grads[0].norm()}"
    assert torch.isfinite(grads[0]).all()
    assert isinstance(grads[0].sum(dim=0), DTensor)
    assert isinstance(grads[0].mul_(2).full_tensor(), torch.Tensor)
    grads, norm = trained(ShardingStrategy.NO_SHARD)  # every rank has all
    assert sum(grad.norm() ** 2 for grad in grads).to_local().sqrt().item() == pytest.approx(norm, rel=1e-6)


@distributed(world_size=2, backend="gloo")
def test_torchs_clipping_returns_a_plain_norm_of_full_gradients():
    plain, model, part = net(), FSDP(net()), net()
    ignoring = FSDP(part, ignored_modules=[part[2]], use_orig_params=True)
    norms = []
    for each in (plain, model, ignoring):
        each(inputs(0)).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5))
        assert type(norms[-1]) is torch.Tensor
        assert f"{torch.nn.utils.get_total_norm([param.grad for param in each.parameters()]):.4f}" == "0.5000"
    assert norms[0] > 1
    torch.testing.assert_close(norms[1:], norms[:1] * 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@distributed(world_size=2, backend="gloo")
def test_steps_see_plain_dtensors_also_from_a_closure(kind):
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    model, seen = FSDP(copy.deepcopy(plain)), []
    for module in (plain, model):
        optimizer = kind(module.parameters(), lr=0.1)

        def closure(module=module, optimizer=optimizer):
            optimizer.zero_grad()
            loss = module(inputs(0)).square().mean()
            loss.backward()
            seen.append(type(next(module.parameters()).grad))
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert set(seen) == {torch.Tensor, DTensor}
    assert all(type(param.grad) is Gradient for param in model.parameters())
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-5, atol=1e-5)


@distributed(world_size=2, backend="gloo")
def test_parameters_and_gradients_are_copied_and_saved_as_dtensors():
    model = FSDP(nn.Linear(4, 4))
    model(inputs(0)).sum().backward()
    weight, grad = model.module.weight, model.module.weight.grad
    model.reshard()
    weight = model.module.weight
    assert (type(weight), type(grad)) == (Sharded, Gradient)
    for tensor in (weight, grad):
        twin = copy.deepcopy(tensor)
        assert isinstance(twin, nn.Parameter) is isinstance(tensor, nn.Parameter)
        assert torch.equal(twin.to_local(), tensor.to_local())
        assert twin.to_local().data_ptr() != tensor.to_local().data_ptr()
        torch.save([tensor], buffer := io.BytesIO())
        buffer.seek(0)
        (loaded,) = torch.load(buffer, weights_only=False)
        assert type(loaded) is DTensor
        assert torch.equal(loaded.to_local(), tensor.to_local())
    model.half().float()  # by torch.utils.swap_tensors
    assert model(inputs(0)).shape == (3, 4)
