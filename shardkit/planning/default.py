"""The default rule: blocks, the input embedding, ``[norm, head]``, other large modules, the root.

``docs/the-plan.md`` describes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set

import torch.nn as nn

from shardkit.planning.selection import Selection, large_modules
from shardkit.planning.tree import (
    ModelTree,
    ModuleNode,
    has_forward,
    in_order,
    is_called,
    outermost,
)

LARGE_NUMEL, LARGE_SHARE = 1_000_000, 0.05  # a module outside of blocks is a unit if it has both
SMALL_NUMEL, SMALL_SHARE = 2_000_000, 0.01  # a head with less than either is left to the root
ROOT_SHARE = 0.1  # the root keeps no more of the model than that in small layers beside blocks
STAGE_SHARE = 0.7  # a block with so much of itself in inner blocks is a stage, and they are units
# A stage of more blocks, of less elements on average, is one unit, as of DenseNet.
MANY_BLOCKS, FEW_NUMEL = 8, 250_000
_NUMBER = re.compile(r"\d")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def default_units(tree: ModelTree) -> list[Selection]:
    """Return the units of the default rule, the root last."""
    blocks = find_blocks(tree)
    in_blocks: set[ModuleNode] = set()
    for block in blocks:
        in_blocks.update(tree.subtree(block))
    in_lists = set(in_blocks)  # other items of lists need not be called
    for node in tree.nodes:
        if node not in in_lists and isinstance(node.module, nn.ModuleList):
            in_lists.update(tree.subtree(node)[1:])
    outside = [node for node in tree.nodes if node not in in_lists and is_called(node)]

    head = _declared(tree, "get_output_embeddings", outside)
    is_declared = head is not None
    if head is None:
        head = _last_linear(tree, outside)
    embedding = _declared(tree, "get_input_embeddings", outside)
    if embedding is None or not isinstance(embedding.module, nn.Embedding):
        embedding = _embedding_before(blocks, head, outside)
    tail: list[ModuleNode] = []
    if head is not None and (is_declared or not _is_small(tree, head.numel)):
        norm = _norm_before(tree, head, blocks, outside, is_declared)
        tied = any(tree.specs[fqn].aliases for fqn in head.params)
        if norm is not None:
            tail = in_order([norm, head])
        elif tied or head.numel >= _large(tree):
            tail = [head]

    taken = {*in_blocks, *tail}
    if embedding is not None:
        taken.update(tree.subtree(embedding))
    beside = _layers_beside(tree, blocks, taken)
    taken.update(beside)
    large = large_modules(tree, _large(tree), taken)
    large = [node for node in large if taken.isdisjoint(tree.subtree(node))]  # around no unit
    selections = [Selection((node,)) for node in [*blocks, *beside, *large]]
    if embedding is not None:
        selections.append(Selection((embedding,)))
    if tail:
        selections.append(Selection(tuple(tail), reshard=False))
    return [*selections, Selection((tree.root,), reshard=False)]


# --- Blocks ---------------------------------------------------------------------------------------


def find_blocks(tree: ModelTree) -> list[ModuleNode]:
    """Return the modules that repeat in lists, in order; of nested ones the
    innermost whole ones.

    Of a decoder its layers; of a ConvNeXt, whose stages repeat too, the blocks of each stage; of an
    Inception each module with branches, which is not a stage.
    """
    items = _list_items(tree)
    listed = Counter(type(node.module) for node in items)
    blocks = set()
    for node in tree.nodes[1:]:
        number = listed.get(type(node.module))
        if number is None:
            continue
        if node in items:
            container = node.parents[0]
            alone = isinstance(container.module, nn.ModuleList) and len(container.module) == 1
            repeats = number > 1 or alone
            is_block = repeats and any(child.numel for child in tree.children(node))
            if repeats and not is_block and 2 * container.numel > tree.root.numel:
                # An MLP in a Sequential: its layers are blocks, as they are most of the model.
                is_block = _has_matrices(tree, node, 1)
        else:  # an attribute, such as mid_block, of a class that is in a list too
            is_container = isinstance(node.module, _CONTAINERS)
            is_block = not is_container and _has_matrices(tree, node, 2)
        if is_block and is_called(node):
            blocks.add(node)
    outer = outermost(blocks)
    if len(outer) == len(blocks):  # none is inside another
        return outer
    innermost = []
    for block in outer:
        innermost += _parts(tree, block, blocks)
    return innermost


def _parts(tree: ModelTree, block: ModuleNode, blocks: Set[ModuleNode]) -> list[ModuleNode]:
    """Return the block itself, or if it is a stage, or a stage of stages, the blocks inside."""
    inside = [node for node in tree.subtree(block)[1:] if node in blocks]
    inner = [node for node in outermost(inside) if _has_matrices(tree, node, 2)]
    alike = Counter((_caller(node), type(node.module)) for node in inner)
    if len(inner) > 1 and max(alike.values()) == 1:
        return [block]  # branches, as of Inception, or the halves of a block
    parts = []
    for node in inner:
        parts += _parts(tree, node, blocks)
    inside_numel = sum(part.numel for part in parts)
    too_small = len(parts) > MANY_BLOCKS and inside_numel < FEW_NUMEL * len(parts)
    if len(parts) > 1 and inside_numel >= STAGE_SHARE * block.numel and not too_small:
        return parts
    return [block]


def _caller(node: ModuleNode) -> ModuleNode:
    """Return the innermost module around this one that can call it, which a ModuleList cannot."""
    caller = node.parents[0]
    while caller.parents and not has_forward(caller.module):
        caller = caller.parents[0]
    return caller


def _list_items(tree: ModelTree) -> set[ModuleNode]:
    """Return the items of containers, and attributes that a number tells apart, as ``encoder1``.

    Not experts: a rank may have no token for one, and not call it. Nor layers beside a ReLU in
    place: a Linear returns a view, and autograd drops FSDP2's hook on a view that is changed.
    """
    experts: set[ModuleNode] = set()
    items: set[ModuleNode] = set()
    for node in tree.nodes:
        children = tree.children(node)
        if not children:
            continue
        if not isinstance(node.module, _CONTAINERS):
            if not _NUMBER.search(" ".join(node.module._modules)):
                continue  # most modules
            for child in children:
                is_numbered = _NUMBER.search(child.fqn.rpartition(".")[2])
                if is_numbered and not isinstance(child.module, _CONTAINERS):
                    if _has_matrices(tree, child, 2):
                        items.add(child)
        elif "expert" in node.fqn.rpartition(".")[2].lower():
            experts.update(tree.subtree(node))
        elif any(getattr(child.module, "inplace", False) for child in children):
            items.update(child for child in children if tree.children(child))
        else:
            items.update(children)
    return items - experts


def _has_matrices(tree: ModelTree, node: ModuleNode, number: int) -> bool:
    """Whether that many parameters at or below a module have more than one long dim."""
    matrices = 0
    for below in tree.subtree(node):
        for fqn in below.params:
            spec = tree.specs[fqn]
            matrices += spec.numel > max(spec.shape, default=1)
            if matrices == number:
                return True
    return False


def _is_small(tree: ModelTree, numel: int) -> bool:
    return numel < min(SMALL_NUMEL, SMALL_SHARE * tree.root.numel)


def _large(tree: ModelTree) -> int:
    return int(max(LARGE_NUMEL, LARGE_SHARE * tree.root.numel))


# --- What is outside of blocks --------------------------------------------------------------------


def _layers_beside(
    tree: ModelTree, blocks: list[ModuleNode], taken: Set[ModuleNode]
) -> list[ModuleNode]:
    """Return the plain layers in the lists of blocks that are worth an all-gather, and as many of
    the small ones as the root would have too much of.

    They are units of their own: checkpointing and compiling apply to units of one module.
    """
    plain = []
    for container in dict.fromkeys(block.parents[0] for block in blocks):
        if not isinstance(container.module, _CONTAINERS):
            continue
        for item in tree.children(container):
            if item not in taken and not tree.children(item) and is_called(item):
                plain.append(item)
    beside = []
    left = sum(layer.numel for layer in plain)  # to the root
    for layer in sorted(plain, key=lambda layer: -layer.numel):
        if _is_small(tree, layer.numel) and left <= ROOT_SHARE * tree.root.numel:
            break
        beside.append(layer)
        left -= layer.numel
    return in_order(beside)


def _declared(tree: ModelTree, getter: str, outside: list[ModuleNode]) -> ModuleNode | None:
    """Return what transformers' ``get_input_embeddings`` or ``get_output_embeddings`` returns."""
    method = getattr(tree.root.module, getter, None)
    try:
        module = method() if callable(method) else None
    except (NotImplementedError, AttributeError, TypeError):
        return None  # the model inherits the method and has no such layer
    for node in outside:
        if node.module is module:
            return node
    return None


def _last_linear(tree: ModelTree, outside: list[ModuleNode]) -> ModuleNode | None:
    """Return the Linear that is the last module, or that a dry run calls last: the head, where
    none is declared.
    """
    registered_last = [node for node in tree.nodes if node.params][-1]
    for node in (registered_last, tree.called_last):
        if node in outside and isinstance(node.module, nn.Linear):
            return node
    return None


def _embedding_before(
    blocks: list[ModuleNode], head: ModuleNode | None, outside: list[ModuleNode]
) -> ModuleNode | None:
    """Return the embedding before all blocks that has the shape of the head's weight.

    Others may be tables whose weight is read without a call, such as SAM's mask tokens, or serve as
    the head: the root must own both.
    """
    if head is None or not isinstance(head.module, nn.Linear):
        return None
    for node in outside:
        if blocks and node.place > blocks[0].place:
            return None
        if isinstance(node.module, nn.Embedding):
            if node.module.weight.shape == head.module.weight.shape:
                return node
    return None


def _norm_before(
    tree: ModelTree,
    head: ModuleNode,
    blocks: list[ModuleNode],
    outside: list[ModuleNode],
    is_declared: bool,
) -> ModuleNode | None:
    """Return the first norm between the blocks and the head, of the head's dtype.

    Where the model does not declare its head, a norm with layers behind it is that of another part.
    """
    last = blocks[-1].place if blocks else 0
    dtypes = {tree.specs[fqn].dtype for fqn in head.params if tree.specs[fqn].trainable}
    end = head.place if head.place > last else len(tree.nodes)  # a head may be registered first
    between = [node for node in outside if last < node.place < end and node.params]
    for index, node in enumerate(between):
        name = type(node.module).__name__.lower()
        if "norm" not in name or "batchnorm" in name or tree.children(node):
            continue
        own = {tree.specs[fqn].dtype for fqn in node.params if tree.specs[fqn].trainable}
        if len(own | dtypes) < 2:
            return node if is_declared or between[index + 1 :] == [] else None
    return None
