"""Compute a function of tokens in tiles, so that what it computes in between is alive for one tile
at a time.

Each tile is checkpointed: backward computes it again. All tiles are in one call of a module, so
FSDP2 unshards it once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit._fsdp import not_compiled
from shardkit._torch import FakeTensor
from shardkit._torch.dispatch import no_dispatch_modes, version_of
from shardkit.errors import ShardkitError

_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def tiled(module: nn.Module, fqn: str, tiles: int) -> Callable[..., Tensor]:
    """Return the forward of a module that works on each token alone, computed in at most ``tiles``
    tiles of tokens.

    The first tensor that it gets has the shape (..., tokens, features), and is cut along its
    tokens; so are other tensors with the same leading dims, such as a residual or a weight for each
    token, if they have these at the first call. All else is given whole to each tile. A single
    token, or none, is not cut. Random numbers are drawn for each tile, and the same again in
    backward.

    The first call, in each mode of training and with each set of tensors, computes half of the
    first tile alone too, and raises if that differs: a module that mixes tokens, as attention does,
    would be silently wrong, as would one that changes its buffers. So does each call with fewer
    tokens than two a tile until then, on two tokens.
    """
    forward: Callable[..., Tensor] = module.forward
    is_cut: dict[Any, bool] = {}  # by argument, as at the first call
    checked: set[tuple[Any, ...]] = set()

    @functools.wraps(forward)
    def in_tiles(*args: Any, **kwargs: Any) -> Tensor:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        first = next(iter(tensors.values()), None)
        if first is None or first.ndim < 2:
            raise ShardkitError(
                f"{fqn} was called without a tensor of shape (..., tokens, features) first, which "
                "a module with tiles= needs. Leave the module out of tiles=."
            )
        tokens, dim = first.shape[-2], first.ndim - 2
        if tokens < 2:
            return forward(*args, **kwargs)
        cut = []
        for key, tensor in tensors.items():
            has_tokens = tensor.ndim <= first.ndim and tensor.shape[: dim + 1] == first.shape[:-1]
            if is_cut.setdefault(key, has_tokens) and has_tokens:
                cut.append(key)

        def run(start: int, length: int) -> Tensor:
            values = dict(arguments)
            for key in cut:
                # Contiguous here, in the checkpoint, which then keeps no copy of a tile.
                values[key] = arguments[key].narrow(dim, start, length).contiguous()
            positional = [values.pop(index) for index in range(len(args))]
            return forward(*positional, **values)

        size = -(-tokens // tiles)
        call = (module.training, tuple(tensors), tuple(cut))
        if call not in checked:
            half = max(1, size // 2)
            if _is_right(module, fqn, run, first, half) and size > 1:
                checked.add(call)
        outputs = []
        for start in range(0, tokens, size):
            length = min(size, tokens - start)
            outputs.append(checkpoint(run, start, length, use_reentrant=False))
        return torch.cat(outputs, -2)

    return in_tiles


@not_compiled
@torch.no_grad()
def _is_right(
    module: nn.Module, fqn: str, run: Callable[[int, int], Any], first: Tensor, half: int
) -> bool:
    """Return whether ``half`` tokens are computed alike alone and after as many others; False if
    the values cannot tell. ShardkitError if they are not.
    """
    if isinstance(first, FakeTensor) or first.is_meta or not first.numel():
        return False
    buffers = {buffer: version_of(buffer) for buffer in module.buffers()}
    dropouts = []
    for submodule in module.modules():
        if isinstance(submodule, _DROPOUT) and submodule.training:
            dropouts.append(submodule)
    for dropout in dropouts:  # works on each token alone, and random numbers cannot be compared
        dropout.training = False
    try:
        # A selective checkpoint around would take these operations for the forward's.
        with no_dispatch_modes():
            whole, alone = run(0, 2 * half), run(half, half)
    finally:
        for dropout in dropouts:
            dropout.training = True
    shape = (*first.shape[:-2], 2 * half)
    rule = (
        "A module with tiles= must compute each token alone, since each call gets one tile of "
        "tokens. Leave the module out of tiles=."
    )
    if not isinstance(whole, Tensor) or whole.shape[:-1] != shape:
        returned = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ShardkitError(f"{fqn} returns {returned} for {shape} tokens. {rule}")
    if {buffer: version_of(buffer) for buffer in module.buffers()} != buffers:
        raise ShardkitError(f"{fqn} changes its buffers, which would follow the tiles. {rule}")
    # Kernels round differently for another number of tokens.
    dtypes = [whole.dtype]
    dtypes += [param.dtype for param in module.parameters() if param.is_floating_point()]
    if torch.is_autocast_enabled(whole.device.type):
        dtypes.append(torch.get_autocast_dtype(whole.device.type))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize > 1)
    largest = float(whole.abs().max())
    expected = whole.narrow(-2, half, half)
    difference = float((expected - alone).abs().max())
    if difference > eps**0.5 * largest:
        raise ShardkitError(
            f"{fqn} computes a token differently, by {difference / largest:.1e}, when other tokens "
            f"are left out. {rule}"
        )
    return 0 < largest < float("inf")
