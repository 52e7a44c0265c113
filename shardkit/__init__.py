"""Shard a whole model with PyTorch FSDP2 in one call, and read the plan before it runs."""
