"""A module in tiles of tokens, once its own values show that it works on each token alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._fsdp import not_compiled
from shardkit._fsdp.params import forward_hooks
from shardkit._torch import FakeTensor, version_of
from shardkit.errors import ShardkitError, message
from shardkit.tiles import Tokens, in_tiles

_CONTIGUOUS = torch.contiguous_format
SAMPLED = 8  # tokens of each sequence
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RULE = "A module with tiles= must compute each token alone, since each call gets one tile of tokens"
_FIX = "Leave the module out of the rule with tiles="


def tiled(module: nn.Module, fqn: str, tiles: int) -> Callable[..., Tensor]:
    """Return the module's forward, computed in tiles as by :func:`shardkit.tiles.in_tiles`.

    Its first call with several tokens, in each mode of training, tests that it works on each alone: in one tile half of
    the tokens do not notice that the others change, and a few are computed alike alone and together.

    Raises:
        ShardkitError: in forward, before anything is computed in tiles: the module mixes tokens, draws random numbers
            other than those of dropout modules, changes buffers, attributes or its input, does not return one tensor
            with a row for each token, or has hooks inside.
    """
    forward, checked = module.forward, set[bool]()
    run = in_tiles(forward, tiles, fqn)

    @functools.wraps(forward)
    def checked_once(*args: Any, **kwargs: Any) -> Tensor:
        _refuse_hooks(module, fqn)
        if module.training not in checked and _is_alike(module, fqn, forward, Tokens(fqn, args, kwargs), tiles):
            checked.add(module.training)
        return run(*args, **kwargs)

    return checked_once


def _refuse_hooks(module: nn.Module, fqn: str) -> None:
    """Raise where a forward hook would see tiles: hooks that collect router logits expect all tokens, once."""
    for name, inner in module.named_modules():
        found = (getattr(hook, "func", hook) for hook in forward_hooks(inner) if name)
        if any(not str(getattr(hook, "__module__", "")).startswith("shardkit.") for hook in found):
            rule = "It would be called for each tile, and again in backward"
            fix = f"Remove the hook, such as transformers' for output_router_logits, or l{_FIX[1:]}"
            problem = "has a forward hook, inside a module with tiles="
            raise ShardkitError(message(f"{fqn}.{name}", problem, rule, fix))


@not_compiled
@torch.no_grad()
def _is_alike(module: nn.Module, fqn: str, forward: Callable[..., Any], tokens: Tokens, tiles: int) -> bool:
    """Return whether a few tokens are computed alike alone and among others; False if their values cannot tell.

    Raises:
        ShardkitError: they are not, or the forward changes what it will be called with again.
    """
    if isinstance(tokens.first, FakeTensor) or tokens.first.is_meta or len(tokens) < 2 or not tokens.first.numel():
        return False
    before, cause = _state(module), None
    dropouts = [each for each in module.modules() if isinstance(each, _DROPOUT) and each.training]
    for each in dropouts:  # they work on each token alone, and nothing could be compared with random numbers
        each.training = False
    try:
        problem, can_tell = _difference(module, forward, tokens, tiles)
    except Exception as error:  # as of attention, which gets keys and positions of all tokens
        cause, problem = error, f"fails when called with some of the tokens, {type(error).__name__}: {error}"
    finally:
        for each in dropouts:
            each.training = True
    for name, (value, version) in _state(module).items():
        if name not in before or before[name][0] is not value or before[name][1] != version:
            problem = problem or f"its forward changes {name}"
    if problem:
        raise ShardkitError(message(fqn, problem, _RULE, _FIX)) from cause
    return can_tell


def _difference(module: nn.Module, forward: Callable[..., Any], tokens: Tokens, tiles: int) -> tuple[str, bool]:
    """Return what differs, empty if nothing does, and whether the values can tell: not all are zero, none is NaN."""
    dim, device = tokens.dim, tokens.first.device
    tile = Tokens("", *tokens.calls(lambda each: [each.chunk(tiles, dim)[0].clone(memory_format=_CONTIGUOUS)])[0])
    kept = (torch.arange(len(tile), device=device) * 0.618034) % 1 < 0.5  # half of them, at no regular distance

    def others_changed(each: Tensor) -> list[Tensor]:
        others = each.flip(dim) * 0.5 if each.is_floating_point() else each.flip(dim)
        return [torch.where(kept.view(-1, *[1] * (each.ndim - dim - 1)), each, others)]

    ((args, kwargs),) = tile.calls(lambda each: [each])
    before = [(each, version_of(each)) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    whole = forward(*args, **kwargs)
    if any(version_of(each) != version for each, version in before):
        return "changes a tensor that it is called with", True
    if not isinstance(whole, Tensor) or whole.shape[:-1] != tile.first.shape[:-1]:
        given = f"shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
        return f"returns {given} for {tuple(tile.first.shape)}, not one tensor with a row for each token", True
    ((args, kwargs),) = tile.calls(others_changed)
    among = _norm((forward(*args, **kwargs) - whole)[..., kept, :])
    few = min(SAMPLED, len(tokens))
    places = torch.arange(few, device=device) * (len(tokens) - 1) // (few - 1)
    sample = Tokens("", *tokens.calls(lambda each: [each.index_select(dim, places)])[0])
    ((args, kwargs),) = sample.calls(lambda each: [each])
    sampled = forward(*args, **kwargs)
    each_alone = [forward(*a, **k) for a, k in sample.calls(lambda each: torch.split(each, 1, dim))]
    alone = _norm(torch.cat(each_alone, dim) - sampled)
    dtype = _coarsest(module, whole)
    eps, largest = torch.finfo(dtype).eps, max(_norm(whole), _norm(sampled))
    if among > (2 if dtype.itemsize < 4 else 64) * eps * largest:  # the same shapes: at most sums in another order
        return f"a token's output changes by {among / largest:.1e} with the other tokens, or is random", True
    if dtype == torch.float32:  # other shapes may be computed by other kernels, with TF32 or without
        eps = {"highest": eps, "high": 2**-10}.get(torch.get_float32_matmul_precision(), 2**-7)
    if alone > eps**0.5 * largest:
        return f"a token's output differs by {alone / largest:.1e} when it is alone", True
    return "", among + alone <= largest and largest > 0


def _coarsest(module: nn.Module, output: Tensor) -> torch.dtype:
    """Return the dtype with the fewest digits in which it may compute: a sum in bf16 may become an output in fp32."""
    dtypes = [each.dtype for each in module.parameters() if each.is_floating_point() and each.itemsize > 1]
    if torch.is_autocast_enabled(output.device.type):
        dtypes.append(torch.get_autocast_dtype(output.device.type))
    return max([output.dtype, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)


def _norm(rows: Tensor) -> float:
    """Return the largest L2 norm of a row."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return float(torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).max())


def _state(module: nn.Module) -> dict[str, tuple[Any, int]]:
    """Return what forward may change: attributes, with what is in lists and dicts, and buffers; with their versions."""
    found: dict[str, tuple[Any, int]] = {}
    for name, inner in module.named_modules(prefix="its"):
        for key, value in (*inner._buffers.items(), *vars(inner).items()):
            inside = value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
            for place, each in enumerate([value, *inside]):
                path = f"{name}.{key}" + f"[{place - 1}]" * bool(place)
                found[path] = each, version_of(each) if isinstance(each, Tensor) else 0
    return found
