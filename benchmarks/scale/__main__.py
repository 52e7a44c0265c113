"""``python -m benchmarks.scale``; see :mod:`benchmarks.scale.tables`."""

from benchmarks.scale.tables import main

main()
