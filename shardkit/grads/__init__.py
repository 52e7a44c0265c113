"""Accumulate, clip, scale and reduce gradients between backward and the optimizer's step."""

from shardkit.grads.accumulate import accumulate as accumulate
from shardkit.grads.accumulate import reset_after_error as reset_after_error
from shardkit.grads.accumulate import zero_grad as zero_grad
from shardkit.grads.clip import clip_grad_norm_ as clip_grad_norm_
from shardkit.grads.scale import GradScaler as GradScaler
from shardkit.grads.scale import global_token_count as global_token_count
from shardkit.grads.scale import scale_grads_ as scale_grads_
from shardkit.grads.scale import scale_loss as scale_loss
from shardkit.grads.scale import set_gradient_reduction as set_gradient_reduction
