"""Scorers, allocators and codecs; the papers' methods are YAML compositions of them (``conf/method``)."""

from kvbench.methods.method import Compressed, Method, Region, build
from kvbench.methods.selection import Protect

__all__ = ["Compressed", "Method", "Protect", "Region", "build"]
