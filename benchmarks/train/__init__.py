"""Training steps of one model by many hands, measured: ``python -m benchmarks.train --suite h200 --out DIR``."""
