"""LongBench's records, from a folder, a zip, parquet files or the hub, always with the same columns.

The loading script of the data set is never run (datasets >= 4 cannot); what it wraps is a zip of JSON lines.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from kvbench.errors import InputError

REPOSITORY, ARCHIVE = "zai-org/LongBench", "data.zip"
_FIELDS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")


def read_records(task: str, extended: bool, path: str | None, revision: str) -> list[dict[str, Any]]:
    """All records of one task, in file order. Raises InputError(task.path) if there are none to be had."""
    stem = f"{task}_e" if extended else task
    if path is None:
        return _from_zip(_download(revision), stem)
    source = Path(path).expanduser()
    if not source.exists():
        raise InputError("task.path", path, "there is no such file or folder.", f"It should hold {stem}.jsonl.")
    if source.is_dir():
        return _from_folder(source, stem)
    if source.suffix == ".parquet":
        return _from_parquet([source])
    if zipfile.is_zipfile(source):
        return _from_zip(source, stem)
    return _from_lines(source.read_bytes(), str(source))


def records_sha256(records: list[dict[str, Any]]) -> str:
    """Content hash of records: the same for the same data in a zip, a folder or a parquet file."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record[name] for name in _FIELDS]).encode() + b"\n")
    return digest.hexdigest()


def _download(revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(REPOSITORY, ARCHIVE, repo_type="dataset", revision=revision))
    except Exception as error:  # the hub's client raises a dozen unrelated types; all mean: no data
        raise InputError(
            "task.path",
            None,
            f"{ARCHIVE} of {REPOSITORY} (revision {revision}) is neither in the hub's cache nor could be fetched "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}).",
            "Set task.path to a folder of <task>.jsonl files, to a data.zip or to parquet files; without a network "
            "set HF_HUB_OFFLINE=1 as well, or the client retries for half a minute.",
        ) from error


def _from_folder(folder: Path, stem: str) -> list[dict[str, Any]]:
    for lines in (folder / f"{stem}.jsonl", folder / "data" / f"{stem}.jsonl"):
        if lines.is_file():
            return _from_lines(lines.read_bytes(), str(lines))
    # the hub's parquet mirrors: <task>.parquet, <task>/test-00000-of-00001.parquet, <task>-00000-of-00001.parquet
    for pattern in (f"{stem}.parquet", f"{stem}/*.parquet", f"{stem}-*.parquet"):
        shards = sorted(folder.glob(pattern))
        if shards:
            return _from_parquet(shards)
    if (folder / ARCHIVE).is_file():
        return _from_zip(folder / ARCHIVE, stem)
    raise InputError(
        "task.path",
        str(folder),
        f"the folder has neither {stem}.jsonl nor {stem}.parquet nor {stem}/*.parquet nor {ARCHIVE}.",
        f"It has {', '.join(sorted(entry.name for entry in folder.iterdir())[:5]) or 'nothing'}.",
    )


def _from_zip(archive: Path, stem: str) -> list[dict[str, Any]]:
    with zipfile.ZipFile(archive) as opened:
        for member in (f"data/{stem}.jsonl", f"{stem}.jsonl"):
            if member in opened.namelist():
                return _from_lines(opened.read(member), f"{archive}::{member}")
    raise InputError("task.path", str(archive), f"the archive has no member data/{stem}.jsonl.")


def _from_lines(content: bytes, source: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            row = {name: record.get(name) for name in _FIELDS}
            row["answers"], row["all_classes"] = strings(row["answers"]), strings(row["all_classes"])
        except (ValueError, AttributeError, TypeError) as error:
            raise InputError("task.path", source, f"line {number} is no LongBench record: {error}") from error
        rows.append(row)
    if not rows:
        raise InputError("task.path", source, "there is not one record in it.")
    from datasets import Dataset

    try:
        dataset = Dataset.from_list(rows, features=_features())
    except (ValueError, TypeError) as error:  # Arrow's errors are subclasses of these
        raise InputError("task.path", source, f"a field has the wrong type: {error}") from error
    return _rows(dataset, source)


def _from_parquet(files: list[Path]) -> list[dict[str, Any]]:
    import pyarrow.parquet
    from datasets import Dataset

    # read directly: Dataset.from_parquet would leave a second copy of the data in the user's cache
    rows = [row for file in files for row in _rows(Dataset(pyarrow.parquet.read_table(file)), str(file))]
    if not rows:
        raise InputError("task.path", str(files[0]), "there is not one record in it.")
    return rows


def _rows(dataset: Any, source: str) -> list[dict[str, Any]]:
    missing = {"input", "context", "answers"} - set(dataset.column_names)
    if missing:
        raise InputError("task.path", source, f"the data has no column {', '.join(sorted(missing))}.")
    rows = []
    for number, record in enumerate(dataset, 1):
        row = {name: record.get(name) for name in _FIELDS}
        row["answers"], row["all_classes"] = strings(row["answers"]), strings(row["all_classes"])
        if not isinstance(row["context"], str) or not isinstance(row["input"], str) or not row["answers"]:
            raise InputError("task.path", source, f"record {number} lacks its context, input or answers.")
        rows.append(row)
    return rows


def _features() -> Any:
    """Explicit column types; without them an all-null column (all_classes) gets none, and files differ."""
    from datasets import Features, List, Value

    text, texts = Value("string"), List(Value("string"))
    return Features(
        {
            "input": text,
            "context": text,
            "answers": texts,
            "length": Value("int64"),
            "dataset": text,
            "language": text,
            "all_classes": texts,
            "_id": text,
        }
    )


def strings(value: Any) -> list[str]:
    """A list of strings out of one, out of None, or out of the text of a Python list, as some copies store it.

    A text that is no list counts as one string. Raises ValueError for anything else.
    """
    if value is None:
        return []
    if isinstance(value, str):
        parsed = _literal(value)
        return [str(item) for item in parsed] if isinstance(parsed, (list, tuple)) else [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return list(value)
    raise ValueError(f"expected a list of strings, found {value!r:.80}")


def _literal(text: str) -> Any:
    import ast

    if not text.lstrip().startswith(("[", "(")):
        return None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None  # an ordinary answer that happens to begin with a bracket
