"""The default rule: blocks, the input embedding, ``[norm, head]`` and the root; ``docs/design.md`` says why."""

from __future__ import annotations

import re
from collections import Counter

import torch.nn as nn

from shardkit.plan import ancestors
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Selection
from shardkit.planning.tree import ModelTree, is_called

_MLP = re.compile(r"(MLP|Mlp|FeedForward)$")  # of a class
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def default_units(tree: ModelTree, ignored: frozenset[str]) -> tuple[list[Selection], list[str]]:
    """Return the selections of the default rule, the root included, and a note for each repair."""
    blocks = _find_blocks(tree)
    # What is in no block, and in no other item of a list, since some of those may not be called.
    lists = [entry for entry, module in enumerate(tree.modules) if isinstance(module, nn.ModuleList)]
    inside = {below for entry in lists for below in tree.subtree(entry) if below != entry}
    inside.update(below for block in blocks for below in tree.subtree(block))
    outside = [entry for entry in range(len(tree.modules)) if entry not in inside]

    head = _find_head(tree, blocks, outside)
    embedding = _find_input_embedding(tree, blocks, outside, head)
    selections = [Selection((entry,)) for entry in blocks]
    selections += [Selection((embedding,))] if embedding is not None else []
    selections += [Selection(tail, reshard=False) for tail in _find_tail(tree, blocks, outside, head)]
    selections.append(Selection((0,), reshard=False))
    selections, notes = join_ties(tree, selections, ignored)
    selections, more_notes = split_dtypes(tree, selections, ignored)
    return selections, notes + more_notes


def find_mlps(tree: ModelTree) -> list[str]:
    """Return the FQNs of the modules that are MLPs by the name of their class, and so may compute in tiles.

    Not those with convolutions or experts, nor experts themselves, which get few of the tokens.
    """
    found: dict[str, None] = {}
    for entry in tree.first_entries:
        fqn, names = tree.fqns[entry], [tree.fqns[below].lower() for below in tree.subtree(entry)]
        is_mlp = _MLP.search(type(tree.modules[entry]).__name__) and found.keys().isdisjoint(ancestors(fqn))
        dims = [tree.params[param].dim() for below in tree.subtree(entry) for param in tree.owned[below]]
        if is_mlp and dims and max(dims) < 3 and not any("expert" in name for name in names):
            found[fqn] = None
    return list(found)


def _find_blocks(tree: ModelTree) -> list[int]:
    """Return the model's repeated blocks, outermost only, in the model's order."""
    declared = set(getattr(tree.modules[0], "_no_split_modules", None) or ())
    containers = [entry for entry, module in enumerate(tree.modules) if isinstance(module, _CONTAINERS)]
    # A rank may have no token for an expert, and not call it.
    experts = (entry for entry in containers if "expert" in tree.fqns[entry].rpartition(".")[2].lower())
    inside = {below for entry in experts for below in tree.subtree(entry)}
    paths = [item for entry in containers if entry not in inside for item in tree.children(entry)]
    # Each module once, also where the list repeats one, as in ModuleList([block] * 3).
    items = sorted({id(tree.modules[item]): item for item in sorted(paths, reverse=True)}.values())
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
    if any(tree.params_below(child) for child in tree.children(item)):
        return True
    # A stack of plain layers, such as an MLP in a Sequential: units only where the stack is most of the model.
    has_matrix = any(tree.params[fqn].dim() > 1 for fqn in tree.owned[item])
    return has_matrix and 2 * tree.numel(container) > tree.numel(0)


def _find_head(tree: ModelTree, blocks: list[int], outside: list[int]) -> int | None:
    """Return the output layer: the one that the model names, else the last Linear behind the blocks."""
    declared = _declared(tree, "get_output_embeddings", outside)
    if declared is not None:
        return declared
    behind = (entry for entry in reversed(outside) if not blocks or entry > blocks[-1])
    last = next((entry for entry in behind if isinstance(tree.modules[entry], nn.Linear)), None)
    return last if last is None or is_called(tree, last) else None


def _find_tail(tree: ModelTree, blocks: list[int], outside: list[int], head: int | None) -> list[tuple[int, ...]]:
    """Return ``[norm, head]``, with the first norm behind the blocks; the head alone only where it is tied."""
    if head is None:
        return []
    for entry in (entry for entry in outside if (blocks[-1] if blocks else 0) < entry < head):
        name = type(tree.modules[entry]).__name__.lower()
        is_norm = "norm" in name and "batchnorm" not in name and tree.owned[entry] and tree.ends[entry] == entry + 1
        if is_norm and is_called(tree, entry) and len(tree.trained_dtypes(entry, *tree.subtree(head))) < 2:
            return [(entry, head)]
    return [(head,)] if any(fqn in tree.ties for fqn in tree.owned[head]) else []


def _find_input_embedding(tree: ModelTree, blocks: list[int], outside: list[int], head: int | None) -> int | None:
    """Return the embedding that the model names, else the one before all blocks whose shape is the head's.

    Other embeddings may be tables whose weight is read without calling them, such as SAM's mask tokens. Without a head
    of its shape, an embedding's weight may serve as the head. The root must own both.
    """
    declared = _declared(tree, "get_input_embeddings", outside)
    if declared is not None and isinstance(tree.modules[declared], nn.Embedding):
        return declared
    shape = getattr(tree.modules[head], "weight").shape if head is not None else None  # noqa: B009
    for entry in outside:
        module = tree.modules[entry]
        is_before = isinstance(module, nn.Embedding) and (not blocks or entry < blocks[0])
        if is_before and module.weight.shape == shape and is_called(tree, entry):
            return entry
    return None


def _declared(tree: ModelTree, getter: str, outside: list[int]) -> int | None:
    """Return the entry of what transformers' ``get_input_embeddings`` or ``get_output_embeddings`` returns."""
    method = getattr(tree.modules[0], getter, None)
    try:
        module = method() if callable(method) else None
    except (NotImplementedError, AttributeError, TypeError):
        return None  # the model inherits the method and has no such layer
    return next((entry for entry in outside if tree.modules[entry] is module and is_called(tree, entry)), None)
