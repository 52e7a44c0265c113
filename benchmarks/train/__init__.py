"""Training steps of one model, measured by implementation:
``python -m benchmarks.train --suite h200 --out DIR``.
"""
