"""The drop-in: FSDP1's class, and all that hangs on it, over ``fully_shard``.

The class: ``module`` is what a program sees, ``record`` what a wrapper remembers, ``construct`` what its constructor
does, ``roots`` what its first forward decides, ``copying`` its deep copies, ``methods`` the model's own methods.

What it does for a program: ``summon``; ``state``, ``state_load`` and ``settings`` for model state; ``optim_state``,
``optim_load``, ``optim_keys`` and ``rekey`` for optimizer state; ``optimizers`` for those that were built before
wrapping; ``tensors`` for programs that handle weights and gradients by hand.

Names: ``internals`` answers for FSDP1's attributes, ``private`` serves torch's private modules, ``guards`` torch's own
statics. ``redirect`` and ``rewrite`` run a program as it is; ``announce`` tells what runs.
"""
