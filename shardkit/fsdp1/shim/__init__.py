"""The drop-in: FSDP1's class, and all that hangs on it, over ``fully_shard``.

``module.py`` is the class, ``construct.py`` what its constructor does, ``roots.py`` what its first forward decides.
"""
