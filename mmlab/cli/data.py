"""Commands about data sets: make a built-in one, pack one's own, check shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mmlab.cli.shared import JsonOption, check_writable, console, write_results
from mmlab.errors import DataError

_BAD_NAMED = 20
"""Bad members that are named on the screen."""
_NAMED = 5
"""Skipped records that are named on the screen; all are in report.json."""


def register(app: typer.Typer) -> None:
    """Add the commands about data sets."""
    data = typer.Typer(help="Make, pack and check data sets.", no_args_is_help=True)
    for command in (make, pack, check):
        data.command()(command)
    app.add_typer(data, name="data", rich_help_panel="Plans")


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int, str], None]]:
    from rich.progress import Progress

    out = console()
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(name, total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield progress


def make(
    name: Annotated[str, typer.Argument(help="emoji or shapes.")],
    folder: Annotated[Path | None, typer.Argument(help="Where to, new or empty; default: the data cache.")] = None,
) -> None:
    """Make a built-in data set: shards, held-out split and tokenizer."""
    from mmlab.data.cli_support import make_set
    from mmlab.data.datasets import ensure

    with _bar(name) as progress:
        said = str(ensure(name, progress)) if folder is None else make_set(name, folder, progress=progress)
    console().print(said, soft_wrap=True, markup=False)


def pack(  # noqa: PLR0913  # its options are what a person says, one by one
    source: Annotated[Path, typer.Argument(help="A folder of pictures, or the file with the captions.")],
    out: Annotated[Path, typer.Argument(help="The folder of shards: new, empty, or with a pack that was broken off.")],
    format_: Annotated[
        str, typer.Option("--format", help="coco, llava, csv, tsv, parquet, folder; default: as it looks.")
    ] = "",
    images: Annotated[Path | None, typer.Option(help="The folder that the pictures' names start from.")] = None,
    image_column: Annotated[str, typer.Option(help="The column of a table with the pictures.")] = "",
    text_column: Annotated[str, typer.Option(help="The column of a table with the captions.")] = "",
    captions: Annotated[str, typer.Option(help="all captions of a COCO picture, or the first.")] = "all",
    resize: Annotated[int, typer.Option(min=0, help="Pixels of the shorter side of larger pictures; 0: as is.")] = 0,
    tiles: Annotated[int, typer.Option(min=1, max=64, help="Keep what data.max_tiles tiles of --resize show.")] = 1,
    quality: Annotated[int, typer.Option(min=1, max=95, help="Quality of JPEGs that were made smaller.")] = 90,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the pictures for evaluation.")] = 0.0,
    samples_per_shard: Annotated[int, typer.Option(min=1, help="Most samples of a shard.")] = 1024,
    shard_mb: Annotated[float, typer.Option(min=0.01, help="Most megabytes of a shard.")] = 1000.0,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to put beside the shards.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; default: one a core.")] = None,
    follow_links: Annotated[bool, typer.Option(help="Also take what links in the folder lead to.")] = False,
    strict: Annotated[bool, typer.Option(help="Stop at the first record that cannot be packed.")] = False,
    max_skipped: Annotated[float, typer.Option(min=0, max=1, help="Share of records that may be skipped.")] = 0.05,
) -> None:
    """Pack captioned pictures into shards: COCO's or LLaVA's JSON, CSV, TSV, parquet, or a folder with texts beside.

    Broken off at any time, the same command goes on. OUT trains as it is: data.path = "OUT".
    """
    from mmlab.data.cli_support import pack_source
    from mmlab.data.packing import PackOptions

    options = PackOptions(
        format=format_,
        images=images,
        image_column=image_column,
        text_column=text_column,
        captions=captions,
        resize=resize,
        tiles=tiles,
        quality=quality,
        held_out=held_out,
        samples_per_shard=samples_per_shard,
        shard_mb=shard_mb,
        workers=(os.cpu_count() or 1) if workers is None else workers,
        follow_links=follow_links,
        strict=strict,
        max_skipped=max_skipped,
    )
    with _bar(source.name) as progress:
        said = pack_source(source, out, options, tokenizer, progress, named=_NAMED)
    console().print(said, soft_wrap=True, markup=False)


def check(
    path: Annotated[str, typer.Argument(help="Shards as data.path names them: a folder, a pattern, an address.")],
    quick: Annotated[bool, typer.Option(help="Headers only: no checksums, no decoding.")] = False,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; default: one a core.")] = None,
    json: JsonOption = None,
) -> None:
    """Verify shards: the manifest's checksums, tar structure, texts, every picture decodes; names bad members."""
    check_writable(json)
    from mmlab.data.cli_support import check_shards

    with _bar(path) as progress:
        cores = os.cpu_count() or 1
        said, results = check_shards(path, quick, cores if workers is None else workers, progress, named=_BAD_NAMED)
    write_results(json, results)
    console().print(said, soft_wrap=True, markup=False)
    if bad := results["bad"]:
        shards = len({one["shard"] for one in bad})
        raise DataError(f"{path}: {len(bad)} bad members or shards, in {shards} shards. Make or copy those again.")
    console().print("  no bad member")
