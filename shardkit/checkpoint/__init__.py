"""Save and load model and optimizer state on disk: standard files that all ranks write and read in
parallel.
"""

from shardkit.checkpoint.background import SaveHandle as SaveHandle
from shardkit.checkpoint.convert import convert_checkpoint as convert_checkpoint
from shardkit.checkpoint.directory import latest_checkpoint as latest_checkpoint
from shardkit.checkpoint.load import load_checkpoint as load_checkpoint
from shardkit.checkpoint.load import load_extras as load_extras
from shardkit.checkpoint.pretrained import load_pretrained as load_pretrained
from shardkit.checkpoint.pretrained import named_full_tensors as named_full_tensors
from shardkit.checkpoint.pretrained import save_pretrained as save_pretrained
from shardkit.checkpoint.save import save_checkpoint as save_checkpoint
from shardkit.checkpoint.stop import stop_requested as stop_requested
