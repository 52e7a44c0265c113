"""What all sides share: the model with its values, what blocks recompute and compile, the
optimizer, and the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.models import SHAPES, Llama, fusible_chunk_loss
from benchmarks.train.case import Case, Training

SEED = 0
MAX_NORM = 1.0
LEARNING_RATE = 3e-4
CHUNK = 2048  # tokens whose logits exist at a time: 1 GiB in float32 for 128,256 words

Clip = Callable[[], object]


# The model.


def build(case: Case, device: torch.device) -> nn.Module:
    """The case's model on ``device`` with values that are the same on every side, or on meta
    without any. Local.

    They are drawn on the device, in float32: 32 GB for 8B on the GPU for a moment, and nothing on
    the CPU.
    """
    torch.manual_seed(SEED)
    with torch.device(device):
        if case.model.startswith("hf-"):
            from benchmarks.train.hf import hf_llama

            model: nn.Module = hf_llama(SHAPES[case.model.removeprefix("hf-")], case.sequence)
        else:
            model = Llama(SHAPES[case.model], CHUNK)
    return model if case.masters else model.to(torch.bfloat16)


def birthplace(case: Case, device: torch.device) -> torch.device:
    """Where a side that shards builds its model: a pretended rank never holds more
    than its shards.
    """
    return torch.device("meta") if case.fake_ranks else device


@torch.no_grad()
def fill(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model that is still on meta finite values, which mean nothing. Local, in
    place.
    """
    if not any(param.is_meta for param in model.parameters()):
        return
    model.to_empty(device=device)
    for param in model.parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        draw(local, param.dim())
    refresh_buffers(model, device)


def refresh_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers again that a model from meta has lost, where it has any. In place."""
    refresh: Any = getattr(model, "refresh_buffers", None)
    if refresh is not None:
        refresh(device)


def draw(values: Tensor, dims: int) -> None:
    """Ones for a norm, and small numbers for a matrix, in place."""
    if dims == 1:
        values.fill_(1.0)
    else:
        values.normal_(std=0.01)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer's blocks, in order."""
    return list(body(model).layers)  # type: ignore[arg-type]


def body(model: nn.Module) -> nn.Module:
    """What holds the blocks and the last norm."""
    inner = getattr(model, "model", model)
    assert isinstance(inner, nn.Module)
    return inner


def ends(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The input embedding, the last norm, and the head."""
    if isinstance(model, Llama):
        return model.embed, model.norm, model.head
    inner: Any = body(model)
    return inner.embed_tokens, inner.norm, model.lm_head  # type: ignore[return-value]


# What blocks recompute and compile.


def prepare(model: nn.Module, case: Case) -> None:
    """Have blocks recompute and compile as the case says, in place, before they are sharded.

    The module's own ``forward`` is replaced on every side, as shardkit does it: hooks of whoever
    shards stay outside.
    """
    recompute(model, case)
    for block in blocks(model) if case.compile else ():
        block.forward = torch.compile(block.forward)


def recompute(model: nn.Module, case: Case) -> None:
    """The checkpointing alone."""
    options: dict[str, Any] = {"use_reentrant": False}
    if case.checkpointing == "selective":
        options["context_fn"] = selective
    for block in blocks(model) if case.checkpointing != "none" else ():
        block.forward = functools.wraps(block.forward)(
            functools.partial(checkpoint, block.forward, **options)
        )


def compile_loss(model: nn.Module, case: Case) -> None:
    """Compile the loss of a chunk, which is the same for all sides, where blocks are compiled. In
    place.
    """
    if case.compile and isinstance(model, Llama):
        model.head.chunk_loss = torch.compile(fusible_chunk_loss)


_aten = torch.ops.aten
ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a block that saves attention and every other matrix product, and recomputes the
    rest.

    That is torchtitan's policy for ``op``. Products are counted in forward and again in the
    recomputation.
    """
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operator in ATTENTION
        if operator is _aten.mm.default:
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]


# The optimizer.


def adamw(params: Any, case: Case) -> torch.optim.AdamW:
    """AdamW as every side has it."""
    flags = {"foreach": True} if case.stepping == "foreach" else {"fused": True}
    return torch.optim.AdamW(params, lr=LEARNING_RATE, **flags)  # type: ignore[arg-type]


class InBackward:
    """An optimizer for each parameter, stepped by hand as soon as its gradient is there, which is
    then freed.

    This is how it is written by hand (the pattern of torch's tutorial on optimizers in backward).
    """

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.optimizers = {param: adamw([param], case) for param in model.parameters()}
        for param in self.optimizers:
            param.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

    def _step(self, param: Tensor) -> None:
        self.optimizers[param].step()  # type: ignore[index]
        self.optimizers[param].zero_grad()  # type: ignore[index]

    def step(self) -> None:
        """Nothing is left to do."""

    def zero_grad(self) -> None:
        """Nothing is left to free."""


def optimizer_by_hand(model: nn.Module, case: Case) -> Any:
    """AdamW over the whole model, or one for each parameter in backward."""
    return (
        InBackward(model, case)
        if case.stepping == "in_backward"
        else adamw(model.parameters(), case)
    )


# The step.


@contextmanager
def fast_attention(case: Case, device: torch.device) -> Iterator[None]:
    """Attention by cuDNN, or else by another fused kernel, on every side; on a GPU in bfloat16 an
    error if none can.

    Around backward too, which recomputes forwards where it is told to.
    """
    kernels = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ]
    with (
        sdpa_kernel(kernels, set_priority=True)
        if device.type == "cuda" and case.bf16
        else nullcontext()
    ):
        yield


def train(
    model: nn.Module,
    case: Case,
    device: torch.device,
    optimizer: Any,
    clip: Clip,
    *,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Training:
    """A whole step: forward, backward, clipping unless the optimizer steps in backward, optimizer.

    Args:
        model: sharded, takes token ids and returns the mean loss.
        case: the row.
        device: of the step.
        optimizer: has ``step`` and ``zero_grad``.
        clip: scales the gradients down to a norm of ``MAX_NORM``.
        precision: a context for forward, such as autocast.
        backward: what is called with the loss.
    """

    def step(ids: Tensor) -> Tensor:
        with fast_attention(case, device):
            with precision():
                loss = model(ids)
            backward(loss)
        if case.stepping != "in_backward":
            clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return Training(model=model, step=step)


def torch_clip(model: nn.Module) -> Clip:
    """torch's own clipping, as everybody calls it."""
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
