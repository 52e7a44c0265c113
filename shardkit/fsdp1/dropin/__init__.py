"""The drop-in: FSDP1's class and its methods, on ``fully_shard``.

The class: ``module`` is what a program sees, ``record`` what a wrapper remembers, ``construct`` what its constructor
does, ``roots`` what its first forward decides, ``attributes`` what it answers to names that are FSDP1's or the model's.

Its methods: ``summon``; ``state`` for model state; ``optim_state`` for optimizer state; ``optimizers`` for optimizers
that were built before wrapping; ``tensors`` for programs that handle weights and gradients by hand; ``errors``.

Around it: ``guards`` serves torch's own static methods, ``replace`` runs a program unchanged, ``announce`` prints the
plan.
"""
