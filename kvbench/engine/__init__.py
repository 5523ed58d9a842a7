"""Prefill, capture, caches and decoding for any decoder model that uses transformers' attention interface."""

from kvbench.engine.cache import Cache
from kvbench.engine.capture import Capture, LayerCapture, Needs
from kvbench.engine.engine import Engine, Generated, StopRule

__all__ = ["Cache", "Capture", "Engine", "Generated", "LayerCapture", "Needs", "StopRule"]
