"""Which cells exist, which are the same, and which share their prefill and their decode."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvbench.cell import Cell

log = logging.getLogger(__name__)


def distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Cells without repeats (a method that evicts nothing is the same cell at every budget)."""
    first: dict[tuple[str, str, str], Cell] = {}
    for cell in cells:
        known = first.setdefault((cell.run.runs, cell.run.experiment, cell.hash), cell)
        if known is not cell:
            log.info("%s %s %s: the same cell as before, run once", cell.task.name, cell.method.name, cell.budget)
    return list(first.values())


def grids(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that read the same prompts with the same model, together, in the order in which each first appears.

    A cell that must end at its first failure (``fail_fast``) is a grid of its own: it must not take others with it.
    """
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        run = cell.run
        key: tuple[object, ...] = (
            cell.source.content_sha256, cell.device, cell.dtype, repr(run.model), id(cell.task),
            run.max_new_tokens, run.max_prompt_tokens, run.truncation, cell.hash if run.fail_fast else None,
        )  # fmt: skip
        found.setdefault(key, []).append(cell)
    return list(found.values())
