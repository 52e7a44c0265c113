"""The drop-in: FSDP1's class and its methods, on ``fully_shard``.

The class: ``module`` is what a program sees, ``record`` what a wrapper remembers, ``construct`` what its constructor
and deep copies do, ``roots`` what its first forward decides, ``attributes`` what it answers to names that are FSDP1's
or the model's.

Its methods: ``summon``; ``state`` and ``state_load`` for model state; ``optim_state`` and ``optim_load`` for optimizer
state; ``optimizers`` for optimizers that were built before wrapping; ``tensors`` for programs that handle weights and
gradients by hand; ``errors``.

Around it: ``private`` serves torch's private modules, ``guards`` torch's own static methods. ``redirect`` and
``rewrite`` run a program unchanged; ``announce`` prints what runs.
"""
