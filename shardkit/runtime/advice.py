"""What to do about errors that torch raises in the forward of a sharded model."""

from __future__ import annotations

# by a part of torch's text
_ADVICE = {
    "got mixed torch.Tensor and DTensor": "A parameter is used outside of its unit's forward: pass "
    "example_batch= to shard_model, which leaves such units out, or units=[], one unit.",
    "RegisterPostBackwardFunction is a view": "A unit changes its input in place: use "
    "inplace=False, or pass example_batch= to shard_model, which leaves such units out.",
    "out of bounds for storage of size 0": "If forward calls torch.autograd.grad, run the step "
    "inside `with shardkit.double_backward(model):`, or pass units=[] to shard_model.",
}


def add_advice(error: BaseException) -> None:
    """Add what to do to the text of an error of torch in a forward."""
    for text, advice in _ADVICE.items():
        # an error of the program's own, which quotes torch's, may have other arguments
        if error.args == (str(error),) and text in str(error) and advice not in str(error):
            error.args = (f"{str(error).rstrip('!. ')}. {advice}",)
