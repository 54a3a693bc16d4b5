"""Captions in tables: CSV, TSV and parquet, a row a sample, with paths (parquet: or bytes) of pictures."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmlab.data.packing.jsons import caption_record
from mmlab.data.packing.options import PackOptions, Record
from mmlab.errors import DataError

IMAGE_COLUMNS = ("image", "image_path", "path", "file_name", "filename", "filepath", "file", "img", "images")
TEXT_COLUMNS = ("caption", "text", "title", "description", "conversations", "messages")
Report = Callable[[int, int], None]
_ROWS = 1000
"""Rows of parquet held at once."""


def _column(path: Path, columns: Sequence[str], given: str, known: Sequence[str], option: str) -> str:
    """The column that was named, else the first known one. DataError that lists what there is."""
    listed = ", ".join(columns) or "none"
    if given:
        if given not in columns:
            raise DataError(f"--{option} {given}: {path} has no such column. It has: {listed}.")
        return given
    by_name = {name.strip().lower(): name for name in reversed(columns)}
    found = next((by_name[name] for name in known if name in by_name), None)
    if found is None:
        raise DataError(f"{path}: which column to take is not clear. Say it by --{option}; it has: {listed}.")
    return found


def _row_record(number: int, row: Mapping[str, Any], image: str, text: str) -> Record:
    """A row as a record. A cell with a conversation holds it as JSON, or as a list of its turns."""
    origin, cell, said = f"row {number + 1}", row.get(image), row.get(text)
    pictures: tuple[str | bytes, ...] = ()
    for one in cell if isinstance(cell, list) else [cell]:
        if isinstance(one, dict):  # how Hugging Face datasets store a picture
            one = one.get("bytes") or one.get("path")
        if isinstance(one, str | bytes) and one:
            pictures += (one,)
        elif one not in (None, ""):
            return Record(number, origin, problem=f"column {image}: is neither a path nor the bytes of a picture")
    if text.strip().lower() in ("conversations", "messages"):
        try:
            turns = json.loads(said) if isinstance(said, str | bytes) else said
        except ValueError as error:
            return Record(number, origin, pictures, problem=f"column {text}: is no JSON ({error})")
        return Record(number, origin, pictures, {"conversations": turns})
    return caption_record(number, origin, pictures, said)


def csv_records(path: Path, options: PackOptions, kind: str, report: Report | None) -> Iterator[Record]:
    """A record for each row; the first line names the columns. Rows without a picture's path are text alone."""
    csv.field_size_limit(min(sys.maxsize, 1 << 30))
    try:
        size = path.stat().st_size
        with open(path, "rb") as raw:
            lines = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
            delimiter = "\t" if kind == "tsv" else _delimiter(lines)
            table = csv.DictReader(lines, delimiter=delimiter, strict=True)
            columns = [name for name in table.fieldnames or () if name]
            image = _column(path, columns, options.image_column, IMAGE_COLUMNS, "image-column")
            text = _column(path, columns, options.text_column, TEXT_COLUMNS, "text-column")
            for number, row in enumerate(table):
                if report and number % 100 == 0:
                    report(raw.tell(), size)
                if None in row or row[text] is None:
                    problem = f"has {'more' if None in row else 'fewer'} cells than there are columns"
                    yield Record(
                        number, f"row {number + 1}", problem=f"{problem} (quote text that holds a {delimiter!r})"
                    )
                else:
                    yield _row_record(number, row, image, text)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error.reason}). Save it as UTF-8.") from None
    except csv.Error as error:
        raise DataError(f"{path}: is no table that can be read ({error}). Correct it.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def _delimiter(lines: io.TextIOWrapper) -> str:
    """A semicolon or a tab where the first line has one and no comma, as spreadsheets save in some countries."""
    first = lines.readline()
    lines.seek(0)
    return next((mark for mark in ",;\t" if mark in first), ",")


def parquet_files(path: Path) -> list[Path]:
    """The file, or all *.parquet of a folder in order of their names. DataError when there is none."""
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no *.parquet in this folder. Leave --format out, or name the folder that has them.")
    return files


def parquet_records(path: Path, options: PackOptions, report: Report | None) -> Iterator[Record]:
    """A record for each row of a file, or of all files of a folder one after the other."""
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f'{path}: parquet is read by pyarrow, which is not installed. pip install "mmlab[pack]"')
    parquet = importlib.import_module("pyarrow.parquet")
    arrow_error = importlib.import_module("pyarrow").ArrowException
    number = 0
    for file in parquet_files(path):
        try:
            with parquet.ParquetFile(file) as table:
                columns = table.schema_arrow.names
                image = _column(file, columns, options.image_column, IMAGE_COLUMNS, "image-column")
                text = _column(file, columns, options.text_column, TEXT_COLUMNS, "text-column")
                total, first = table.metadata.num_rows, number
                for batch in table.iter_batches(_ROWS, columns=list(dict.fromkeys((image, text)))):
                    for row in batch.to_pylist():
                        if report and number % 100 == 0:
                            report(number - first, total)
                        yield _row_record(number, row, image, text)
                        number += 1
        except (arrow_error, OSError) as error:
            raise DataError(f"{file}: cannot be read as parquet ({str(error).splitlines()[0]}).") from None
