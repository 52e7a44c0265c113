"""The begin and end of forwards and backwards of an FSDP root, and what FSDP2 holds between them.

Private names of torch 2.11 to 2.15, like the rest of ``_fsdp``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPStateContext

from shardkit._fsdp import FSDPUnit, fsdp_states, not_compiled
from shardkit._torch import tree_leaves, units_of

_compiler = torch._C._dynamo.eval_frame  # exists without the import of torch._dynamo, which takes seconds


class Listener(Protocol):
    """Called at each begin and end of a forward or backward of a root."""

    def forward_begins(self) -> None: ...
    def forward_ended(self) -> None: ...
    def backward_begins(self) -> None: ...
    def backward_ended(self) -> None: ...


_EVENTS = {  # by attribute of the context: called when it becomes false, and when it becomes true
    "iter_forward_root": ("forward_ended", "forward_begins"),
    "post_backward_final_callback_queued": ("backward_ended", "backward_begins"),
}


class _ObservedContext(FSDPStateContext[Any]):
    """torch's state of one iteration, one object for all FSDP modules of a root.

    Every forward sets it, of the root, a child or a registered method, and so does every backward. Hooks on modules
    would miss methods, and would not know which of them is the outermost.
    """

    listener: Listener

    def __setattr__(self, name: str, value: Any) -> None:
        before, vars(self)[name] = vars(self).get(name), value
        if name in _EVENTS and bool(before) != bool(value):
            getattr(self.listener, _EVENTS[name][bool(value)])()


def listen(root: FSDPModule, listener: Listener) -> None:
    """Call ``listener`` when forwards and backwards below ``root`` begin and end, once it is the FSDP root. Local."""
    context: Any = root._get_fsdp_state()._state_ctx
    context.__class__ = _ObservedContext
    context.listener = listener


def units_of_root(root: FSDPModule) -> list[FSDPUnit]:
    """Return all units of an initialized root; none before its first forward, or inside another root. Local, pure."""
    state = root._get_fsdp_state()
    return [unit for each in state._state_ctx.all_states for unit in units_of(each)] if state._is_root else []


def is_forward_under_way(root: FSDPModule) -> bool:
    """Whether a forward of any module below the root has begun and not ended. Local, pure."""
    return root._get_fsdp_state()._state_ctx.iter_forward_root is not None


def is_in_use(module: FSDPModule) -> bool:
    """Whether FSDP2's hooks have gathered this module for a forward that has not ended, or in backward. Local, pure."""
    return module._get_fsdp_state()._training_state.name != "IDLE"


def initialize_at_first_forward(root: FSDPModule, check: Callable[[], None]) -> None:
    """Make ``root`` the FSDP root whichever module below it runs first; torch would take the one that runs. Local.

    Not before that forward: until then users may cast the model, add modules, or shard a module around it.

    Args:
        root: what becomes the root.
        check: called right before; may raise, and then nothing has changed.
    """
    whole, states = root._get_fsdp_state(), fsdp_states(root)  # type: ignore[arg-type]

    def lazy_init(state: Any) -> None:
        if state._is_root is None:
            try:
                check()
            except BaseException:
                state._training_state = type(state._training_state).IDLE
                raise
            with torch.inference_mode(False):  # padded shards that it makes are trained later
                type(whole)._lazy_init(whole)
        for each in states:
            vars(each).pop("_lazy_init", None)
            if each is not state:  # torch 2.11 would take the first forward for the rest of one that failed
                each._modules_to_run_forward.clear()

    for state in states:
        vars(state)["_lazy_init"] = partial(lazy_init, state)


def end_partial_forwards(root: FSDPModule) -> None:
    """End a forward of one module of ``fully_shard([a, b])`` that is called outside the root's forward. Local.

    torch waits for the other modules, which a caller of ``model.head(x)`` may never run (torch 2.11 to 2.15). Without
    grad the unit would stay gathered; with grad its gradients would not be reduced if no input requires grad.
    """
    for state in fsdp_states(root):  # type: ignore[arg-type]
        for module in state._modules if len(state._modules) > 1 else ():
            module.register_forward_hook(partial(_end_partial_forward, state), with_kwargs=True)


@not_compiled
def _end_partial_forward(state: Any, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if state._state_ctx.iter_forward_root is not state or not state._modules_to_run_forward:
        return
    if not torch.is_grad_enabled():
        state._modules_to_run_forward.clear()
        state._post_forward(module, args, None)
        return
    state._state_ctx.iter_forward_root = None
    reduces = any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves((args, kwargs)))

    def begin_backward(_: Tensor) -> None:
        if not reduces or torch.is_grad_enabled():
            state._register_root_post_backward_final_callback()

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]


def reshard(unit: Any) -> None:
    """Reshard a unit, also one whose forward did not end or that is not resharded after forward. Local."""
    unit._to_sharded()


def forwards_noted(root: FSDPModule) -> int:
    """Return how many forwards of units torch has recorded since the last backward, for prefetching. Local, pure."""
    return len(root._get_fsdp_state()._comm_ctx.post_forward_order)


def forget_forwards(root: FSDPModule, since: int) -> None:
    """Forget the recorded forwards after the first ``since``, for which no backward will come. Local.

    torch would prefetch a unit of such a forward in the next backward. Before torch 2.13 a unit of several modules also
    waits for those that did not run, such as one that only holds a tied weight, and the next forward gathers nothing.
    """
    root_state = root._get_fsdp_state()
    order = root_state._comm_ctx.post_forward_order
    for unit in order[since:]:
        unit._post_forward_indices = [index for index in unit._post_forward_indices if index < since]
    del order[since:]
    for state in root_state._state_ctx.all_states:
        if state._modules_to_run_forward and all(unit.is_sharded for unit in units_of(state)):
            state._modules_to_run_forward.clear()


def gather_outside_inference_mode(units: Iterable[FSDPUnit], enabled: bool) -> None:
    """Set whether these units leave inference_mode to allocate the tensors that they gather into. Local.

    FSDP2 allocates them at the first all-gather and keeps them. Under inference_mode they would be inference tensors,
    which cannot be written to later or trained with; on a single rank the allocation itself fails.
    """
    for unit in units:
        vars(unit).pop("wait_for_unshard", None)
        if enabled:
            vars(unit)["wait_for_unshard"] = partial(_outside_inference_mode, unit.wait_for_unshard)


def _outside_inference_mode(gather: Callable[[], None]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        gather()


def observe_collectives(unit: FSDPUnit, note: Callable[[str], None]) -> Callable[[], None]:
    """Call ``note`` right before each all-gather, reduce-scatter or all-reduce of a unit; return what ends it. Local.

    An all-reduce that follows a reduce-scatter is not noted. The objects that run collectives, torch's or those of
    ``set_custom_all_gather``, become copies of a derived class, which passes torch's isinstance checks. On a shard axis
    of one rank FSDP2 all-reduces without them, and only allocates the input and the output (torch 2.11 to 2.15).
    """
    own: Any = unit
    before = own._all_gather_comm, own._reduce_scatter_comm
    group = getattr(own.mesh_info, "shard_process_group", None)
    alone = group is None or group.size() == 1
    own._all_gather_comm = _noting(before[0], partial(note, "all-gather"))
    own._reduce_scatter_comm = _noting(before[1], partial(note, "all-reduce" if alone else "reduce-scatter"), alone)

    def end() -> None:
        own._all_gather_comm, own._reduce_scatter_comm = before

    return end


def _noting(comm: Any, note: Callable[[], None], when_it_allocates: bool = False) -> Any:
    allocations = 0

    class Noting(type(comm)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            note()
            return super().__call__(*args, **kwargs)

        def allocate(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal allocations
            allocations += 1
            if when_it_allocates and allocations % 2:  # the input, not the output
                note()
            return super().allocate(*args, **kwargs)

    noting = copy.copy(comm)
    noting.__class__ = Noting
    return noting


def not_inlined_when_compiled(function: FunctionType) -> None:
    """Make torch.compile run a function eagerly and compile what it calls, as ``torch._dynamo.skip``. In place.

    Inlining would need the function's module in ``sys.modules``, and would gather nothing.
    """
    skip = _compiler._FrameExecStrategy(_compiler._FrameAction.SKIP, _compiler._FrameAction.DEFAULT)
    _compiler.set_code_exec_strategy(function.__code__, skip)


def backward_keeps_graph() -> bool:
    """Return whether the backward under way was called with ``retain_graph`` or ``create_graph``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class Hold:
    """Keep every unit gathered from a backward with ``create_graph=True`` until :meth:`release`. Local.

    The graph of that backward saved the unsharded parameters, which FSDP2 would free; and it neither gathers nor
    reduces for what the next backward runs.
    """

    def __init__(self, root: FSDPModule, refuse: Callable[[], None]) -> None:
        """Begin to hold; ``refuse`` is called when a parameter gets a gradient with a graph, and raises."""
        self._state: Any = root._get_fsdp_state()
        self._refuse = refuse
        units: list[Any] = units_of_root(root)
        for unit in units:
            if unit.is_sharded_post_forward:  # gathered from a mesh that is unset below
                unit.unshard()
                unit.wait_for_unshard()
        self._before = [(unit, unit.reshard_after_backward, unit.post_forward_mesh_info) for unit in units]
        for unit in units:
            unit.reshard_after_backward, unit.post_forward_mesh_info = False, None
        params = [(unit, param) for unit in units for param in unit.fsdp_params if hasattr(param, "_unsharded_param")]
        self._shards = [param.sharded_param for _, param in params]
        self._versions = self._present_versions()
        self._handles = [
            param._unsharded_param.register_post_accumulate_grad_hook(partial(self._reduce, unit))
            for unit, param in params
            if param._unsharded_param.requires_grad
        ]

    @property
    def is_stale(self) -> bool:
        """Whether shards were written to since, as by an optimizer, so that gathered values are outdated."""
        return self._versions != self._present_versions()

    def _present_versions(self) -> list[int]:
        # Writing to a DTensor does not change the version of its local tensor, nor the reverse (torch 2.13).
        return [each._version for shard in self._shards for each in (shard, shard._local_tensor)]

    def _reduce(self, unit: Any, _: Tensor) -> None:
        """Make the end of this backward reduce the unit, even if none of its inputs or outputs has a gradient."""
        if torch.is_grad_enabled():
            self._refuse()
        unit._training_state = type(unit._training_state).PRE_BACKWARD
        self._state._register_root_post_backward_final_callback()

    def release(self) -> None:
        """Restore the settings, and reshard."""
        for handle in self._handles:
            handle.remove()
        for unit, after_backward, mesh_info in self._before:
            unit.reshard_after_backward, unit.post_forward_mesh_info = after_backward, mesh_info
            if after_backward:
                reshard(unit)
