"""``torch.distributed.fsdp.api``: torch's own enums and configurations, so that mixed imports
compare equal.
"""

from torch.distributed.fsdp.api import *  # noqa: F403
from torch.distributed.fsdp.api import __all__ as __all__
