"""Records, resume, statistics and tables: everything that a cell leaves behind and what is made of it.

Tables (``kvbench.results.render``) are not imported here, since they need pandas and the commands must start fast.
"""

from kvbench.results.checks import problems, warnings
from kvbench.results.environment import env
from kvbench.results.folder import TaskInfo
from kvbench.results.identity import cell_hash, cell_identity, cell_label
from kvbench.results.lock import CellBusy
from kvbench.results.store import CellStore, open_cell, record_unopened
from kvbench.results.summary import summarise

__all__ = [
    "CellBusy",
    "CellStore",
    "TaskInfo",
    "cell_hash",
    "cell_identity",
    "cell_label",
    "env",
    "open_cell",
    "problems",
    "record_unopened",
    "summarise",
    "warnings",
]
