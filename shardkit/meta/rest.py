"""The rest: what a file does not give a meta model, such as non-persistent buffers, as its construction made it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from shardkit.meta.context import records
from shardkit.meta.materialize import digest_of, find_targets, is_on_meta, player_of, resolve
from shardkit.meta.rng import undone_on_error
from shardkit.meta.shards import Target


class Rest:
    """All meta tensors of a model but some. Making it checks that all can be had, and changes nothing. Local.

    Args:
        model: sharded or not.
        given: ``id`` of each tensor that is taken care of.

    Raises:
        ShardkitError: nothing recorded, and no initialiser of the model's own, writes some of the rest; all are named.
    """

    def __init__(self, model: nn.Module, given: Collection[int]) -> None:
        self._model = model
        self.targets: list[Target] = [t for t in find_targets(model, is_on_meta) if id(t.tensor) not in given]
        self.digest = 0
        self._player = None
        if self.targets:
            with undone_on_error():
                tapes = resolve(model, self.targets, None, chained=True)
                # As few random numbers are drawn as these values need: none for a table of frequencies.
                self._player = player_of(model, self.targets, tapes, None, None, draw_all=False)
                self.digest = digest_of(tapes, self.targets, None)

    def compute(self) -> None:
        """Set each target's ``value``. Local; torch's generators end where they began."""
        if self._player is not None:
            self._player.run()

    def forget(self) -> None:
        """Drop what was recorded of the model, once all its values are in place."""
        for module in self._model.modules():
            records.pop(module, None)
