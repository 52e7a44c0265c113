"""The default rule: blocks, the input embedding, ``[norm, head]`` and the root; ``docs/design.md`` says why."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn as nn

from shardkit.planning.called import is_called
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Selection
from shardkit.planning.tree import ModelTree

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def default_units(tree: ModelTree, ignored: frozenset[str]) -> tuple[list[Selection], list[str]]:
    """The selections of the default rule, the root included, and a note for each repair."""
    blocks = _find_blocks(tree)
    outside = _outside(tree, blocks)
    head = _find_head(tree, blocks, outside)
    selections = [Selection((entry,)) for entry in blocks]
    selections += [Selection((entry,)) for entry in _find_input_embedding(tree, blocks, outside, head)]
    selections += [Selection(tail, reshard=False) for tail in _find_tail(tree, blocks, outside, head)]
    selections.append(Selection((0,), reshard=False))
    selections, notes = join_ties(tree, selections, ignored)
    selections, more_notes = split_dtypes(tree, selections, ignored)
    return selections, notes + more_notes


def _find_blocks(tree: ModelTree) -> list[int]:
    """The entries of the model's repeated blocks, outermost only, in the model's order."""
    declared = set(getattr(tree.modules[0], "_no_split_modules", None) or ())
    # Each module once, also where the list repeats one, as in ModuleList([block] * 3).
    paths = sorted((item for entry in _containers(tree) for item in tree.children(entry)), reverse=True)
    items = sorted({id(tree.modules[item]): item for item in paths}.values())
    classes = Counter(type(tree.modules[item]) for item in items)
    found: list[int] = []
    for item in items:
        if not (found and tree.contains(found[-1], item)) and _is_block(tree, item, declared, classes):
            found.append(item)
    return found


def _is_block(tree: ModelTree, item: int, declared: set[str], classes: Counter[type[nn.Module]]) -> bool:
    module, container = tree.modules[item], tree.parents[item]
    if not is_called(tree, item):
        return False
    if type(module).__name__ in declared:
        return True
    alone = isinstance(tree.modules[container], nn.ModuleList) and len(list(tree.children(container))) == 1
    if classes[type(module)] < 2 and not alone:
        return False
    if any(tree.has_params(child) for child in tree.children(item)):
        return True
    # A stack of plain layers, as an MLP in a Sequential: units only where the stack is most of the model.
    has_matrix = any(param.dim() > 1 for param in tree.owned[item])
    return has_matrix and 2 * tree.numel(container) > tree.numel(0)


def _containers(tree: ModelTree) -> list[int]:
    """Lists of modules; not of experts, which are called with the tokens routed to them, on some ranks with none."""
    found: list[int] = []
    end_of_experts = 0
    for entry, module in enumerate(tree.modules):
        if isinstance(module, _CONTAINERS) and entry >= end_of_experts:
            if "expert" in tree.fqns[entry].rpartition(".")[2].lower():
                end_of_experts = tree.ends[entry]
            else:
                found.append(entry)
    return found


def _outside(tree: ModelTree, blocks: list[int]) -> list[int]:
    """The entries that are in no block, and in no other item of a list, of which some may not be called."""
    lists = [entry for entry, module in enumerate(tree.modules) if isinstance(module, nn.ModuleList)]
    tops = {item for entry in lists for item in tree.children(entry)}.union(blocks)
    found: list[int] = []
    end = 0
    for entry in range(len(tree.modules)):
        end = max(end, tree.ends[entry]) if entry in tops else end
        found += [entry] * (entry >= end)
    return found


def _find_head(tree: ModelTree, blocks: list[int], outside: list[int]) -> int | None:
    """The output layer: the one that the model names, else the last Linear behind the blocks."""
    declared = _declared(tree, "get_output_embeddings", outside)
    if declared is not None:
        return declared
    linears = [entry for entry in outside if isinstance(tree.modules[entry], nn.Linear)]
    last = next((entry for entry in reversed(linears) if not blocks or entry > blocks[-1]), None)
    return last if last is None or is_called(tree, last) else None


def _find_tail(tree: ModelTree, blocks: list[int], outside: list[int], head: int | None) -> list[tuple[int, ...]]:
    """``[norm, head]``, the first norm behind the blocks; the head alone only where it is tied."""
    if head is None:
        return []
    behind = (entry for entry in outside if (blocks[-1] if blocks else 0) < entry < head)
    norms = [entry for entry in behind if _is_norm(tree, entry) and is_called(tree, entry)]
    norms = [norm for norm in norms if len(_trained_dtypes(tree, norm) | _trained_dtypes(tree, head)) < 2]
    tied = any(tree.names[id(param)] in tree.ties for param in tree.owned[head])
    return [(norms[0], head)] if norms else [(head,)] if tied else []


def _is_norm(tree: ModelTree, entry: int) -> bool:
    name = type(tree.modules[entry]).__name__.lower()
    leaf = tree.ends[entry] == entry + 1 and bool(tree.owned[entry])
    return leaf and "norm" in name and "batchnorm" not in name


def _trained_dtypes(tree: ModelTree, entry: int) -> set[torch.dtype]:
    return {param.dtype for below in tree.subtree(entry) for param in tree.owned[below] if param.requires_grad}


def _find_input_embedding(tree: ModelTree, blocks: list[int], outside: list[int], head: int | None) -> list[int]:
    """The embedding that the model names, else the one before all blocks whose shape is the head's.

    Others may be tables whose weight is read, as SAM's mask tokens, rather than modules that are called; and without a
    head of its shape an embedding's weight may be the head. What is not called the root must own.
    """
    declared = _declared(tree, "get_input_embeddings", outside)
    if declared is not None and isinstance(tree.modules[declared], nn.Embedding):
        return [declared]
    shape = getattr(tree.modules[head], "weight").shape if head is not None else None  # noqa: B009
    embeddings = [entry for entry in outside if isinstance(tree.modules[entry], nn.Embedding)]
    before = [entry for entry in embeddings if not blocks or entry < blocks[0]]
    return [entry for entry in before if tree.modules[entry].weight.shape == shape and is_called(tree, entry)][:1]


def _declared(tree: ModelTree, getter: str, outside: list[int]) -> int | None:
    """The entry of what transformers' ``get_input_embeddings`` or ``get_output_embeddings`` returns."""
    method = getattr(tree.modules[0], getter, None)
    try:
        module = method() if callable(method) else None
    except (NotImplementedError, AttributeError, TypeError):
        return None  # the model inherits the method and has no such layer
    if not isinstance(module, nn.Module):
        return None
    return next((entry for entry in outside if tree.modules[entry] is module and is_called(tree, entry)), None)
