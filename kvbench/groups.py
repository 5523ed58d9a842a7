"""Which options each config group has: read from the folders with YAML files, without Hydra."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PARTS = ("scorer", "allocator", "codec", "decode")  # of a method: groups of their own, method/codec=kivi2


def options(folders: Iterable[str]) -> dict[str, list[str]]:
    """group -> its options, sorted: conf/task/longbench/qasper.yaml is option longbench/qasper of group task."""
    found: dict[str, set[str]] = {}
    for folder in map(Path, folders):
        for file in folder.glob("*/**/*.yaml"):
            group, *rest = file.relative_to(folder).with_suffix("").parts
            if group == "method" and len(rest) == 2 and rest[0] in PARTS:
                group, rest = f"method/{rest[0]}", rest[1:]
            if group != "hydra":  # Hydra's own groups (hydra/launcher) are not the user's axes
                found.setdefault(group, set()).add("/".join(rest))
    return {group: sorted(names) for group, names in sorted(found.items())}


def listing(names: Iterable[str]) -> list[str]:
    """Options for people: those of a subfolder as one entry, ``longbench/{2wikimqa, gov_report}``."""
    flat: list[str] = []
    nested: dict[str, list[str]] = {}
    for name in names:
        folder, slash, leaf = name.rpartition("/")
        if slash:
            nested.setdefault(folder, []).append(leaf)
        else:
            flat.append(name)
    return flat + [f"{folder}/{{{', '.join(leaves)}}}" for folder, leaves in sorted(nested.items())]
