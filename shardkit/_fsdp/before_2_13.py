"""What ``FSDPModule`` of torch 2.11 and 2.12 lacks: recovery from errors."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from shardkit._torch import units_of


def reset_iter_state(root: FSDPModule) -> None:
    """Abandon the forward or backward under way, as ``FSDPModule.reset_iter_state`` does. Local."""
    state: Any = root._get_fsdp_state()
    # fully_shard([a, b]) is listed for each module
    states = list(dict.fromkeys(state._state_ctx.all_states))
    units = [unit for inner in states for unit in units_of(inner)]
    for unit in units:
        result = unit._all_gather_result
        if result is not None and result.all_gather_work is not None:
            result.all_gather_work.wait()
    # Once all streams are done, no event of theirs is left to wait for.
    state._device_handle.synchronize()
    shared = state._comm_ctx
    shared.all_gather_state = shared.reduce_scatter_state = None
    if hasattr(shared, "reduce_scatter_states"):  # torch 2.12 has a list
        shared.reduce_scatter_states.clear()
    shared.post_forward_order.clear()
    for inner in states:
        inner._modules_to_run_forward.clear()
        inner._training_state = type(inner._training_state).IDLE
    for unit in units:
        unit._all_gather_result = unit._post_reduce_event = unit._all_reduce_state = None
        unit._reshard_after_forward_event = unit._partial_reduce_output = None
        unit._post_forward_indices.clear()
        unit._training_state = type(unit._training_state).IDLE
        unit._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
