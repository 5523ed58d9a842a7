"""kvbench measures what KV-cache compression costs, with and without sight of the question."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# Hydra finds plugins only in the namespace package `hydra_plugins`; ours lives inside this package, so that a checkout,
# an editable install and a wheel all have it. Appended, never first: it must not hide another plugin.
_PLUGINS = str(Path(__file__).resolve().parent / "_plugins")
if _PLUGINS not in sys.path:
    sys.path.append(_PLUGINS)
