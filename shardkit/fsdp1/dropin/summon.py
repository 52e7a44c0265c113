"""summon_full_params and apply: a wrapped model with full parameters for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardkit import _fsdp
from shardkit.errors import message
from shardkit.fsdp1.dropin.errors import DropinAssertionError, DropinNotImplementedError
from shardkit.fsdp1.dropin.record import Record, inner_of, record_of, sharded_of, wrappers_or_refuse
from shardkit.state.full_params import full_params


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Make the parameters at and below ``module`` full in this context, in their own dtype. Collective.

    ``shardkit.full_params`` by FSDP1's rules: modules and methods such as ``generate`` run on them, on each rank by
    itself, and afterwards the same sharded parameters are in place.

    Args:
        module: a wrapper, or a module around some.
        recurse: False is for ``module`` alone, and does nothing where that is not a wrapper.
        writeback: keep what was written; under NO_SHARD it is kept in any case, since the parameters themselves are
            shown.
        rank0_only: full on the lowest rank only.
        offload_to_cpu: on the CPU.
        with_grads: with gradients.

    Raises:
        NotImplementedError: a combination that FSDP1 refuses too.
        AssertionError: inside a forward, a backward or another such context.
        TranslationError: the model is sharded, but not wrapped.
    """
    found = wrappers_or_refuse(module, "summon_full_params")
    wrappers = [each for each in found if recurse or each is module]
    records = [record_of(each) for each in wrappers]
    if any(record.summoned for record in records):
        raise _in_use("when already unsharding parameters", "Leave out the inner context")
    if any(map(_fsdp.is_under_way, wrappers)):
        raise _in_use("during forward/backward", "Call it before or after")
    _check_combination(records, writeback, rank0_only, offload_to_cpu, with_grads)
    if not wrappers:
        yield
        return
    shown = all(record.strategy is ShardingStrategy.NO_SHARD for record in records) and not rank0_only
    if not recurse and (sharded := sharded_of(wrappers[0])) is not None:
        _fsdp.initialize(sharded)  # as a root: units inside it then gather themselves as parts of it
    for record in records:
        record.summoned = True
    try:
        with full_params(
            module if recurse else inner_of(wrappers[0]),
            writeback=writeback or shown,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
            recurse=recurse,
        ):
            yield
    finally:
        for record in records:
            record.summoned = False


def apply(wrapper: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """Call ``fn`` with each module, children first, on full parameters, and keep what it writes. Collective."""

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        fn(module)

    with summon_full_params(wrapper):
        visit(wrapper)


def _check_combination(
    records: list[Record], writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> None:
    flat = any(not record.given.use_orig_params for record in records)
    replicated = any(record.strategy is ShardingStrategy.NO_SHARD for record in records)
    refused = {
        "writeback=True and rank0_only=True": writeback and rank0_only,
        "with_grads=True and offload_to_cpu=True": with_grads and offload_to_cpu,
        "with_grads=True and use_orig_params=False": with_grads and flat,
        "offload_to_cpu=True and NO_SHARD": offload_to_cpu and replicated,
    }
    for arguments in (arguments for arguments, given in refused.items() if given):
        problem = f"with {arguments} is not supported by FSDP1 either"
        text = message("summon_full_params", problem, "", "Use shardkit.full_params, which supports it")
        raise DropinNotImplementedError(text)


def _in_use(when: str, fix: str) -> DropinAssertionError:
    rule = "Parameters cannot be exchanged while they are in use"
    return DropinAssertionError(message("summon_full_params", f"was called {when}", rule, fix))
