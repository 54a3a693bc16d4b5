"""Tests that several processes share: each runs in one of them, with the others of its module, in their order."""

from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

from sharing import taken


def test_every_module_is_taken_whole_by_one_process(tmp_path: Path) -> None:
    names = [f"tests/{folder}/test_{i}.py::test_{k}" for folder in ("a", "b") for i in range(4) for k in range(3)]
    items = [SimpleNamespace(nodeid=name, path=Path(name.split("::")[0])) for name in names]
    shares: list[list[str]] = [[], []]
    for pair in zip_longest(*(taken(items, tmp_path) for _ in shares)):  # type: ignore[arg-type]
        for share, item in zip(shares, pair, strict=True):
            share += [item.nodeid] if item else []
    assert sorted(shares[0] + shares[1]) == sorted(names)
    modules = [{name.split("::")[0] for name in share} for share in shares]
    assert len(modules[0]) == len(modules[1]) == 4
    assert not modules[0] & modules[1]
    assert all(share == [name for name in names if name in share] for share in shares)
    assert list(taken(items, tmp_path)) == []  # type: ignore[arg-type]
