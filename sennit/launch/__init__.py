"""How a run's processes start, find each other, log and end. Importing this package imports no torch."""

from sennit.launch.ranks import Ranks, find_ranks
from sennit.launch.startup import Setting, restart, start_up_settings

__all__ = ["Ranks", "Setting", "find_ranks", "restart", "start_up_settings"]
