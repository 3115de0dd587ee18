"""Records (dicts of columns) from files people have: text, JSONL, CSV, Parquet, saved Hugging Face datasets, and the hub.

Each record knows its file, its row (counted from 1; of text and JSONL, the line) and its id, so that what is wrong with it has a name.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.extras import import_extra
from magic_pipeline.tasks.hub import offline, refuse_unreachable


@dataclass(frozen=True)
class Record:
    """One row of the data: `source` is a file, or the name of a dataset."""

    source: Path | str
    row: int
    id: str
    columns: Mapping[str, Any]

    def error(self, message: str) -> InputError:
        """An InputError that names the file, the row and the id."""
        file = self.source if isinstance(self.source, Path) else None
        where = f"row {self.row}" if file is not None else f"{self.source}, row {self.row}"
        return InputError(f"{where}: {message}", file=file, field=f"example {self.id!r}")

    def column(self, name: str) -> Any:
        """The value of a column. Raises InputError where there is none."""
        if self.columns.get(name) is None:
            has = "is empty" if name in self.columns else f"is not there; columns: {', '.join(sorted(self.columns))}"
            raise self.error(f"the column {name!r} {has}")
        return self.columns[name]

    def text(self, name: str) -> str:
        """The text of a column. Raises InputError where it is not there, no text or empty."""
        value = self.column(name)
        if not isinstance(value, str):
            raise self.error(f"the column {name!r} should hold text, found {type(value).__name__}")
        if not value.strip():
            raise self.error(f"the column {name!r} is empty")
        return value


def read_records(source: str, *, folder: Path, split: str, id_column: str | None) -> list[Record]:
    """The records of a file or folder relative to `folder`, or else of a dataset on the hub, in their order.

    Args:
        source: a .txt file (a document a line, blank lines skipped), .jsonl, .csv or .parquet file; a folder of .txt files (a document
            each) or one that `datasets` has saved; or a hub name.
        split: of a saved dataset with splits, and of the hub's.
        id_column: the column of the ids; None takes `id` where there is one, else `{name}:{row}`.

    Raises:
        InputError: it is not there, cannot be read, or is empty.
    """
    path = folder / source
    if path.is_dir():
        rows = _saved(path, split) if _is_saved(path) else _folder(path)
    elif path.is_file():
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise InputError(f"should end in one of {', '.join(_READERS)}", file=path, field="task.data")
        rows = reader(path)
    else:
        rows = _from_hub(source, path, split)
    found = [_record(origin, row, columns, id_column) for origin, row, columns in rows]
    if not found:
        raise InputError("holds no record", file=path if path.exists() else None, field="task.data")
    return found


Rows = Iterable[tuple[Path | str, int, Mapping[str, Any]]]


def _record(source: Path | str, row: int, columns: Mapping[str, Any], id_column: str | None) -> Record:
    name = source.name if isinstance(source, Path) else source
    record = Record(source, row, f"{name}:{row}", columns)
    if id_column is None and "id" not in columns:
        return record
    given = record.column(id_column or "id")
    if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
        raise record.error(f"expected a non-empty text or a whole number as id, found {given!r}")
    return Record(source, row, str(given), columns)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read as UTF-8 text: {error}", file=path, field="task.data") from error


def _lines(path: Path) -> Rows:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield path, number, {"text": line.rstrip("\r")}


def _jsonl(path: Path) -> Rows:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"line {number}: not JSON ({error.msg} at column {error.colno})", file=path) from error
        if not isinstance(content, dict):
            raise InputError(f"line {number}: expected an object, found {line.strip()[:40]}", file=path)
        yield path, number, content


def _csv(path: Path) -> Rows:
    try:
        for number, row in enumerate(csv.DictReader(_read_text(path).splitlines(keepends=True), strict=True), start=1):
            if None in row or None in row.values():
                raise InputError(f"row {number}: has another number of fields than the header", file=path)
            yield path, number, row
    except csv.Error as error:
        raise InputError(f"is no CSV: {error}", file=path, field="task.data") from error


def _parquet(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot be read as Parquet: {error}", file=path, field="task.data") from error
    yield from ((path, number, row) for number, row in enumerate(content, start=1))


def _folder(path: Path) -> Rows:
    files = sorted(path.rglob("*.txt"))
    if not files:
        message = "a folder should hold .txt files, or be a dataset that Hugging Face datasets has saved"
        raise InputError(message, file=path, field="task.data")
    for file in files:
        yield file, 1, {"text": _read_text(file), "id": file.relative_to(path).as_posix()}


def _is_saved(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _saved(path: Path, split: str) -> Rows:
    datasets = import_extra("datasets", extra="hf", needed_by="a saved dataset")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as a saved dataset: {error}", file=path, field="task.data") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise InputError(f"no split {split!r}; it has {', '.join(loaded)}", file=path, field="task.split")
        loaded = loaded[split]
    yield from _rows_of(path, loaded)


def _rows_of(source: Path | str, loaded: Any) -> Iterator[tuple[Path | str, int, Mapping[str, Any]]]:
    for number, row in enumerate(loaded, start=1):
        yield source, number, row


def _from_hub(name: str, path: Path, split: str) -> Rows:
    if Path(name).suffix in _READERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"there is no file or folder {path}", field="task.data")
    datasets = import_extra("datasets", extra="hf", needed_by=f"the dataset {name}")
    refuse_unreachable(name, f"there is no file or folder {path}, and the dataset", field="task.data")
    try:
        loaded = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise InputError(f"the dataset {name!r} cannot be loaded: {offline(error)}", field="task.data") from error
    yield from _rows_of(name, loaded)


_READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".txt": _lines,
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
