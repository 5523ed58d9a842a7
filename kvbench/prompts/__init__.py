"""From samples to token ids: context and question segments, chat templates, truncation."""

from __future__ import annotations

from .encoder import Prompt, PromptEncoder

__all__ = ["Prompt", "PromptEncoder"]
