"""Names in a model of wrappers: FSDP1's attribute for the wrapped module, and FQNs without it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

WRAPPED = "_fsdp_wrapped_module"  # FSDP1's own name for it, which programs know


def without_wrappers(fqn: str) -> str:
    """The FQN in the plain model, as it was before any wrapping; ``checkpoint_wrapper`` and compile stay."""
    return ".".join(part for part in fqn.split(".") if part != WRAPPED)


def outermost(model: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """FQN and module of each ``kind`` below ``model`` that is inside of no other one, each once; not ``model``."""
    seen: set[nn.Module] = {model}
    pending = [(name, child) for name, child in model.named_children()]
    while pending:
        fqn, module = pending.pop(0)
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, kind):
            yield fqn, module
        else:
            pending += [(f"{fqn}.{name}", child) for name, child in module.named_children()]
