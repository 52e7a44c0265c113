"""An average of a sharded model's weights over training (EMA or SWA), made of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from shardkit._torch.steps import by_device_and_dtype
from shardkit.errors import ShardkitError, listing
from shardkit.shards import local_value
from shardkit.state.asleep import wake
from shardkit.state.model import model_state, refuse_meta

Decay = float | Callable[[int], float] | None


def sharded_average(
    model: nn.Module, decay: Decay = 0.999, *, use_buffers: bool = False
) -> ShardedAverage:
    """Return a running average of the model's weights, sharded like the model. Local: no
    collective, now or later.

    It is ``torch.optim.swa_utils.AveragedModel``, which cannot copy FSDP2 models, for shards, with
    the same names (``n_averaged``, ``module.<FQN>``), so each can load the other's full state.
    ``update_parameters(model)`` after ``optimizer.step()`` adds the present weights; the first call
    copies them. ``with average.swapped(model):`` evaluates or exports the average.
    ``save_checkpoint(path, average)`` saves it, for ``load_checkpoint`` in any world.

    Args:
        model: sharded or plain, not on meta. Its names, shapes and placements must stay.
            Parameters that are frozen now are not averaged, and may not train later: to unfreeze
            some, make the average before you freeze them.
        decay: the share of the average that an update keeps, from 0 to 1; or a function that
            returns it for the number of updates so far (1 or more), such as a warm-up; or None for
            the equal average of all updates (SWA).
        use_buffers: average floating-point buffers too; else they are copied in each update.
            Non-persistent ones stay the model's, as frozen parameters do.
    """
    return ShardedAverage(model, decay, use_buffers)


class ShardedAverage(nn.Module):
    """The result of :func:`sharded_average`."""

    n_averaged: Tensor

    def __init__(self, model: nn.Module, decay: Decay, use_buffers: bool) -> None:
        super().__init__()
        tensors = model_state(model).tensors
        refuse_meta(tensors.items())
        if isinstance(decay, float):
            # raises unless it is between 0 and 1
            get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.decay, self.use_buffers, self.is_swapped = decay, use_buffers, False
        self.module = nn.Module()
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.long, device="cpu"))
        copies: dict[Tensor, Tensor] = {}  # of tied ones, one
        self.borrowed: set[Tensor] = set()  # the model's own, which sleep leaves
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                self.borrowed.add(tensor)
                copies[tensor] = tensor
            elif tensor not in copies:
                kind = nn.Parameter if isinstance(tensor, nn.Parameter) else nn.Buffer
                copies[tensor] = kind(tensor.detach().clone())
            *path, attribute = name.split(".")
            module: nn.Module = self.module
            for part in path:
                if part not in module._modules:
                    setattr(module, part, nn.Module())
                module = module.get_submodule(part)
            setattr(module, attribute, copies[tensor])

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the model's present weights to the average. In place, local.

        Raises:
            ShardkitError: inside of ``swapped``, or the model's tensors differ from those that were
                averaged.
        """
        pairs, count = self._pairs(model, "update_parameters"), int(self.n_averaged)
        decay = self.decay(max(count, 1)) if callable(self.decay) else self.decay
        average: Any = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        averages, values = [], []
        for mine, theirs in pairs:
            is_float_buffer = self.use_buffers and mine.is_floating_point()
            if count and (isinstance(mine, nn.Parameter) or is_float_buffer):
                averages.append(mine)
                values.append(theirs)
            else:
                local_value(mine).copy_(local_value(theirs))
        alike = zip(by_device_and_dtype(averages), by_device_and_dtype(values), strict=True)
        for mine_alike, theirs_alike in alike:
            # n_averaged is on the CPU, so that nothing waits
            average(mine_alike, theirs_alike, self.n_averaged)
        self.n_averaged += 1

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[nn.Module]:
        """In this context the model has the averaged values, and the average the model's. In place,
        local.

        Units are resharded when it begins and ends. Takes memory for a copy of the largest shard.
        """
        _exchange(self._pairs(model, "swapped"))
        self.is_swapped = True
        try:
            yield model
        finally:
            for module in (self, *model.modules()):  # an error may have left some asleep
                wake(module)
            self.is_swapped = False
            _exchange(self._pairs(model, "swapped"))

    def _pairs(self, model: nn.Module, call: str) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor with the model's, once, parameters first, without those that are the
        model's own.
        """
        if self.is_swapped:
            raise ShardkitError(
                f"{call} was called inside of swapped(), where the model has the averaged values "
                "and the average has the model's. Call it after the context."
            )
        own, model_tensors = model_state(self.module).tensors, model_state(model).tensors
        differing, thawed = [], []
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for name in {**own, **model_tensors}:
            mine, theirs = own.get(name), model_tensors.get(name)
            if mine is None or theirs is None or _kind(mine) != _kind(theirs):
                differing.append(name)
            elif mine is not theirs:
                pairs[id(mine)] = mine, theirs
            elif theirs.requires_grad:
                thawed.append(name)
        if differing:
            raise ShardkitError(
                f"{listing(sorted(differing))} differs from the average. Names, shapes, dtypes, "
                "devices and placements must be those of the model that it was made from. Make it "
                "from this model, after sharding and moving it."
            )
        if thawed:
            raise ShardkitError(
                f"{listing(thawed)} trains now, and was frozen when the average was made, which "
                "has no copy of it. Make the average before freezing, or a new one after "
                "requires_grad_(True)."
            )
        return sorted(pairs.values(), key=lambda pair: not isinstance(pair[0], nn.Parameter))


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.placements if isinstance(tensor, DTensor) else None,
    )


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for mine, theirs in pairs:
        held = local_value(theirs).clone()
        local_value(theirs).copy_(local_value(mine))
        local_value(mine).copy_(held)
