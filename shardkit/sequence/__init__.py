"""Long sequences: each rank computes a part (Ulysses), and losses in tiles. The core never imports
this package.
"""

from shardkit.sequence.heads import ulysses as ulysses
from shardkit.sequence.loss import tiled_loss as tiled_loss
from shardkit.sequence.mesh import training_mesh as training_mesh
from shardkit.sequence.split import split_sequence as split_sequence
