"""Long sequences: each rank computes a part of every sequence (Ulysses). The core never imports this package."""

from shardkit.sequence.split import SplitSequence, split_sequence
from shardkit.sequence.ulysses import ulysses

__all__ = ["SplitSequence", "split_sequence", "ulysses"]
