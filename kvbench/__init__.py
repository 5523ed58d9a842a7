"""kvbench measures what KV-cache compression costs, with and without sight of the question."""

__version__ = "0.1.0"
