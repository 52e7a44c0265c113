"""What holds for every test: hypothesis without a deadline, for a first example may start or import things."""

from hypothesis import settings

settings.register_profile("shardkit", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shardkit")
