"""The drop-in: FSDP1's class and its methods, on ``fully_shard``.

``module`` is the class that a program sees, ``record`` what a wrapper remembers, ``construct`` what
its constructor does. Parameters are plain tensors, each rank's part: ``shardkit._fsdp.plain``.
``clip`` is for their norm, ``state`` for model state and full parameters, ``optim_state`` for
optimizer state. ``guards`` serves torch's own static methods, and ``program`` runs a program
unchanged.
"""
