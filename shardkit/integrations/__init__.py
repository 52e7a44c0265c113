"""Glue for other trainers, where they would harm a sharded model. The page docs/integrations.md has
the recipes.
"""

from shardkit.integrations.huggingface import keep_sharded as keep_sharded
