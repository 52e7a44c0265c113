"""An error of one rank is an error of all, and bytes of any length reach everyone."""

import logging
import threading

import pytest
import torch.distributed as dist

from shardkit import ranks
from shardkit.errors import ShardkitError
from shardkit.ranks import Groups, together
from shardkit.testing import distributed


def fail_on(failing: int, error: Exception, groups: Groups) -> None:
    with together(groups):
        if not groups or dist.get_rank() == failing:
            raise error


@distributed(world_size=4)
def test_groups_that_overlap_carry_a_reason_to_every_rank():
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with pytest.raises(ShardkitError, match="rank 1: ValueError: odd"):
        fail_on(1, ValueError("odd"), [rows[rank // 2], columns[rank % 2]])


class Heard(logging.Handler):
    """Of a logger: that it said something, and what."""

    def __init__(self) -> None:
        super().__init__()
        self.event, self.texts = threading.Event(), []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.event.set()


@distributed(world_size=4)
def test_a_rank_that_waits_for_others_says_so():
    heard = Heard()
    ranks.logger.addHandler(heard)
    patience, ranks.PATIENCE = ranks.PATIENCE, 0.0
    try:
        with together([None], call="save_checkpoint"):
            if dist.get_rank() == 0:
                assert heard.event.wait(20)
        ranks.PATIENCE = 1e6
        with together([None], call="load_checkpoint"):
            pass
    finally:
        ranks.PATIENCE = patience
        ranks.logger.removeHandler(heard)
    if dist.get_rank() == 0:
        assert heard.texts[0].startswith("save_checkpoint has waited 0 s on rank 0 for other ranks. The call is")
    assert not any(text.startswith("load_checkpoint") for text in heard.texts)
