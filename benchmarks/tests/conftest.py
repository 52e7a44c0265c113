"""Tests of the benchmarks themselves: ``pytest benchmarks``, apart from the library's own."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # what they run beside each other shares the cores
