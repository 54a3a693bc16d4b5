"""Built-in data sets: made on first use in the data cache, or on command in a folder of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mmlab.data.cache import cache_folder, make_folder, make_folder_once
from mmlab.data.index import Progress
from mmlab.data.write import DESCRIPTION
from mmlab.errors import DataError

BUILT_IN = ("emoji", "shapes")
__all__ = ["BUILT_IN", "DESCRIPTION", "ensure", "make"]


def _builder(name: str) -> tuple[Callable[..., None], str]:
    """(build function, version) of a built-in set. Imported only when asked for: readers do not need the makers."""
    if name == "emoji":
        from mmlab.data.datasets import emoji

        return emoji.build, emoji.set_version()
    if name == "shapes":
        from mmlab.data.datasets import shapes

        return shapes.build, shapes.VERSION
    raise DataError(f'There is no built-in data set "{name}". There are: {", ".join(BUILT_IN)}.')


def make(
    name: str, folder: Path | str, *, samples: int | None = None, seed: int = 0, progress: Progress | None = None
) -> Path:
    """Make a built-in set in a folder (new or empty) and return it. `samples`: training samples (None: the set's own
    number). `progress(done, total, what)`. DataError when the folder is in use or cannot be written."""
    build, _ = _builder(name)
    folder = Path(folder)
    make_folder(folder, partial(build, samples=samples, seed=seed, progress=progress))
    return folder


def ensure(name: str, progress: Progress | None = None) -> Path:
    """The folder of a built-in set in the cache, made if need be; safe when several processes ask at once."""
    build, version = _builder(name)
    return make_folder_once(cache_folder() / f"{name}-{version}", partial(build, progress=progress))
