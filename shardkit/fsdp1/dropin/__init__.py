"""The drop-in: FSDP1's class and its methods, on ``fully_shard``.

``module`` is the class that a program sees, ``construct`` what a call of it does, ``record`` what is
remembered of a module. ``state`` is for model state and full parameters, ``optim_state`` for optimizer
state, ``optimizers`` for optimizers that were built before wrapping, ``tensors`` for programs that
handle weights and gradients by hand. ``guards`` serves torch's own static methods, and ``replace`` runs
a program unchanged.
"""
