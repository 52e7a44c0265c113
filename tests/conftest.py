"""What holds for every test: one thread, hypothesis without a deadline, and several processes for
the whole suite.
"""

import gc
import os
import sys
import traceback

# One thread for each process: ranks and tests share the cores, and a process that has started
# threads must not fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The first interpreter that a test starts compiles the package for all others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# of pyarrow, which TRL imports
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

import forks
import pytest
from hypothesis import settings
from side_by_side import pytest_runtestloop as pytest_runtestloop
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

# No deadline: a first example may start or import things.
settings.register_profile("shardkit", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shardkit")

# torch asks where it is for each seed that is set and each new operator of DTensors, and shows it
# to nobody.
extract_stack = traceback.extract_stack
traceback.extract_stack = lambda f=None, limit=None: extract_stack(
    f or sys._getframe(1), limit or 2
)
# torchrun reads the sources of all modules for it
dynamic_rendezvous.get_method_name = lambda depth=0: ""


def pytest_collection_finish(session: pytest.Session):
    """Import what all processes of a whole run will need; collecting garbage need not
    look at it.
    """
    zoo = sys.modules.get("zoo_transformers")
    if zoo is not None and len(session.items) > 1000:
        zoo.import_models()
    gc.freeze()
    forks.serve()
