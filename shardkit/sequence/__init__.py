"""Long sequences: each rank computes a part of every sequence (Ulysses). The core never imports this package."""

from shardkit.sequence.exchange import ulysses as ulysses
from shardkit.sequence.split import split_sequence as split_sequence
