"""Addresses of data whose package is not installed."""

import importlib.util

import pytest

from mmlab.plan import Plan

S3 = "s3://bucket/train-{0..3}.tar"


@pytest.mark.parametrize(
    ("field", "value", "package", "fix"),
    [
        ("data.path", S3, "s3fs", 'pip install "mmlab[remote]"'),
        ("data.path", "https://host/set", "aiohttp", 'pip install "mmlab[remote]"'),
        ("data.held_out", "gs://bucket/a.tar", "gcsfs", "pip install gcsfs"),
        ("data.sources", ("emoji", S3), "s3fs", 'pip install "mmlab[remote]"'),
    ],
)
def test_an_address_needs_its_package(monkeypatch, field, value, package, fix):
    plan = Plan.preset("laptop").with_({field: value})
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        found = [problem for problem in plan.check() if "not installed" in problem.message]
    assert [(p.field, package in p.message, str(p.fix)) for p in found] == [(field, True, fix)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as after the fix
    assert plan.check() == []


@pytest.mark.parametrize(
    ("field", "value", "fixed"),
    [
        ("data.path", "htps://host/a,b.tar", "https://host/a,b.tar"),
        ("data.held_out", "s33://bucket/a-{0..3}.tar", "s3://bucket/a-{0..3}.tar"),
        ("data.sources", ("emoji", "htp://h/a.tar"), ("emoji", "http://h/a.tar")),
        ("data.path", "nonsense://h/a.tar", "https://h/a.tar"),
    ],
)
def test_a_protocol_that_nothing_reads_is_corrected(field, value, fixed):
    plan = Plan.preset("laptop").with_({field: value})
    (problem,) = plan.check()
    assert problem.field == field
    assert "no protocol" in problem.message
    repaired = plan.with_(*problem.fix)
    assert repaired.check() == []
    assert repaired == Plan.preset("laptop").with_({field: fixed})


def test_pipes_and_paths_need_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for path in ("pipe:cat a.tar", "shards/train-{0..3}.tar", "emoji"):
        assert Plan.preset("laptop").with_({"data.path": path}).check() == []
