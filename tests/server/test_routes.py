"""The routes of a real Jupyter server: who is let in, what is shown, what is left in an inbox."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from server.jupyter import BASE, Server, jupyter_server
from ui.synthetic import SyntheticRun

from mmlab.messages import Inbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    (place / "root" / "runs").mkdir(parents=True)
    with jupyter_server(place / "root", place, environment={"MMLAB_RUNS": str(place / "elsewhere")}) as server:
        yield server


@pytest.fixture
def run(server: Server) -> Iterator[SyntheticRun]:
    run = SyntheticRun(server.root / "runs")
    run.start()
    run.train(30)
    yield run
    run.close()
    shutil.rmtree(run.dir)


def key_of(server: Server, run: SyntheticRun) -> str:
    return run.dir.relative_to(server.root).as_posix()


def listed(server: Server, key: str, state: str) -> Any:
    """A run in the overview, which is good for half a second, once it is in that state."""
    end = time.monotonic() + 30
    while True:
        status, overview = server.ask("GET", "mmlab/overview")
        assert (status, overview["allow_control"]) == (200, True)
        found = [one for one in overview["runs"] if one["key"] == key and one["state"] == state]
        if found:
            return found[0]
        assert time.monotonic() < end, overview
        time.sleep(0.1)


def commands(run: SyntheticRun) -> list[str]:
    return [command.verb for command in Inbox(run.paths.control).pending()]


ROUTES = [
    ("GET", "mmlab/overview"), ("GET", "mmlab/runs/runs/x"), ("POST", "mmlab/runs/runs/x/stop"), ("POST", "mmlab/labs"),
    ("POST", "mmlab/labs/abc123/close"), ("POST", "mmlab/labs/abc123/grow"), ("POST", "mmlab/notebook"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nobody_is_let_in_without_the_token(server: Server, method: str, path: str) -> None:
    for token in (None, "wrong"):
        status, _ = server.ask(method, path, {} if method == "POST" else None, token=token)
        assert status == 403


def logged_in(server: Server) -> tuple[str, str]:
    """The cookies of a browser that has logged in with the token, and the XSRF token in them."""
    _, _, first = server.raw("GET", BASE + "login", token=None)
    jar = SimpleCookie()
    for name, value in first:
        if name.lower() == "set-cookie":
            jar.load(value)
    xsrf = jar["_xsrf"].value
    form = f"password=a-token-for-tests&_xsrf={xsrf}".encode()
    sent = {"Cookie": f"_xsrf={xsrf}", "Content-Type": "application/x-www-form-urlencoded"}
    status, _, second = server.raw("POST", BASE + "login", form, token=None, headers=sent)
    assert status == 302
    for name, value in second:
        if name.lower() == "set-cookie":
            jar.load(value)
    return "; ".join(f"{name}={morsel.value}" for name, morsel in jar.items()), jar["_xsrf"].value


def test_a_cookie_alone_changes_nothing(server: Server, run: SyntheticRun) -> None:
    cookie, xsrf = logged_in(server)
    path = f"mmlab/runs/{key_of(server, run)}/stop"
    origin = {"Cookie": cookie, "Origin": f"http://127.0.0.1:{server.port}"}
    assert server.ask("GET", "mmlab/overview", token=None, headers=origin)[0] == 200
    assert server.ask("POST", path, {}, token=None, headers=origin)[0] == 403
    assert commands(run) == []
    foreign = {"Cookie": cookie, "X-XSRFToken": xsrf, "Origin": "http://elsewhere.example"}
    assert server.ask("POST", path, {}, token=None, headers=foreign)[0] in (403, 404)
    assert commands(run) == []
    status, sent = server.ask("POST", path, {}, token=None, headers=origin | {"X-XSRFToken": xsrf})
    assert status == 200, sent
    assert commands(run) == ["stop"]


def test_routes_lie_below_the_base_url_alone(server: Server) -> None:
    assert server.ask("GET", BASE + "mmlab/overview")[0] == 200
    assert server.ask("GET", "/mmlab/overview")[0] == 404


def test_a_run_is_shown_and_steered(server: Server, run: SyntheticRun) -> None:
    key = key_of(server, run)
    shown = listed(server, key, "running")
    assert (shown["step"], shown["steps"]) == (30, 120)
    found = server.run(key)
    assert found["loss"] == shown["loss"] == found["curve"][-1][1]
    assert len(found["curve"]) == 30
    assert [rank["rank"] for rank in found["ranks"]] == list(range(6))
    assert found["ranks"][0]["step"] == 30

    sent = {}
    for verb, body in (("pause", None), ("step", {"n": 3}), ("checkpoint", {"name": "mine"}), ("abort", {})):
        status, sent[verb] = server.ask("POST", f"mmlab/runs/{key}/{verb}", body)
        assert status == 200, sent
    waiting = Inbox(run.paths.control).pending()
    assert [(c.verb, c.args) for c in waiting] == [
        ("pause", {}), ("step", {"n": 3}), ("checkpoint", {"name": "mine"}), ("abort", {"generation": 0}),
    ]  # fmt: skip
    assert server.run(key, command=sent["step"]["id"])["ack"] is None
    run.answer()
    ack = server.run(key, command=sent["step"]["id"])["ack"]
    assert (ack["ok"], ack["step"], ack["ranks"]) == (True, 30, list(range(6)))


@pytest.mark.parametrize(
    ("verb", "body", "status", "said"),
    [
        ("step", {"n": "3"}, 409, "whole number"), ("step", {"n": 0}, 409, "at least 1"),
        ("checkpoint", {"name": 3}, 409, "text"), ("stop", b"[1]", 400, "JSON object"), ("stop", b"{", 400, "JSON"),
        ("stop", b"[" * 60_000, 400, "JSON"), ("stop", b" " * 70_000, 413, "bytes"),
    ],
)  # fmt: skip
def test_what_no_run_takes_is_refused(
    server: Server, run: SyntheticRun, verb: str, body: Any, status: int, said: str
) -> None:
    answered, why = server.ask("POST", f"mmlab/runs/{key_of(server, run)}/{verb}", body)
    assert answered == status
    assert said in why["message"]
    assert commands(run) == []


def test_a_run_that_has_ended_says_so(server: Server, run: SyntheticRun) -> None:
    run.finish("failed", "rank 2: 100 % of memory")
    key = key_of(server, run)
    shown = listed(server, key, "failed")
    assert (shown["reason"], shown["step"]) == ("rank 2: 100 % of memory", 30)
    status, why = server.ask("POST", f"mmlab/runs/{key}/stop", {})
    assert (status, "has ended (failed)" in why["message"]) == (409, True)


def test_paths_do_not_leave_the_root(server: Server, run: SyntheticRun, place: Path) -> None:
    outside = SyntheticRun(place / "outside")
    outside.start()
    os.symlink(outside.dir, server.root / "runs" / "link")
    inner = server.root / "runs" / "inner"
    shutil.copytree(run.dir, inner)
    shutil.rmtree(inner / "control")
    os.symlink(outside.paths.control, inner / "control")
    try:
        keys = [
            "link", "runs/link", "runs/inner", f"../outside/{outside.dir.name}", f"..%2foutside%2f{outside.dir.name}",
            f"runs/..%2f..%2foutside/{outside.dir.name}", f"/{outside.dir}", f"%2f{outside.dir}", ".", "runs",
            "runs/none", f"runs//{run.dir.name}", f"runs/./{run.dir.name}", f"runs%00/{run.dir.name}",
            f"runs\\{run.dir.name}", "a" * 300,
        ]  # fmt: skip
        for key in keys:
            assert server.ask("GET", f"mmlab/runs/{key}")[0] == 404, key
            assert server.ask("POST", f"mmlab/runs/{key}/stop", {})[0] == 404, key
        shown = [one["key"] for one in server.ask("GET", "mmlab/overview")[1]["runs"]]
        assert not {"runs/link", "runs/inner"} & set(shown)
        assert commands(outside) == []
    finally:
        outside.close()
        os.unlink(server.root / "runs" / "link")
        shutil.rmtree(inner)


def test_the_quickstart_notebook_is_copied_once(server: Server) -> None:
    status, found = server.ask("POST", "mmlab/notebook", {})
    assert (status, found) == (200, {"path": "01_quickstart.ipynb"})
    (server.root / found["path"]).write_text("my own changes")
    assert server.ask("POST", "mmlab/notebook", {})[0] == 200
    assert (server.root / found["path"]).read_text() == "my own changes"


def test_labs_that_cannot_be_are_refused(server: Server) -> None:
    for engines in (0, 65, True, "3", None):
        status, why = server.ask("POST", "mmlab/labs", {"engines": engines})
        assert (status, bool(re.search("1 to 64 engines", why["message"]))) == (409, True)
    for path, body in (("close", {}), ("grow", {"engines": 3})):
        status, why = server.ask("POST", f"mmlab/labs/abc123/{path}", body)
        assert (status, why["message"]) == (409, "no lab abc123 lives: it has ended")
    status, why = server.ask("POST", "mmlab/labs/abc123/grow", {"engines": 65})
    assert (status, "64 at most" in why["message"]) == (409, True)


def test_a_server_that_only_looks_refuses_every_change(place: Path) -> None:
    run = SyntheticRun(place / "kept" / "runs")
    run.start()
    options = ("--MmlabServer.allow_control=False", f"--MmlabServer.root_dir={place / 'kept'}")
    with jupyter_server(place, place, *options) as server:
        key = f"runs/{run.dir.name}"
        assert server.ask("GET", "mmlab/overview")[1]["allow_control"] is False
        assert server.run(key)["state"] == "running"
        changes = [f"runs/{key}/{verb}" for verb in ("pause", "resume", "step", "checkpoint", "stop", "abort")]
        for path in (*changes, "labs", "labs/abc123/close", "labs/abc123/grow", "notebook"):
            status, why = server.ask("POST", f"mmlab/{path}", {})
            assert (status, "allow_control is False" in why["message"]) == (403, True), path
    assert commands(run) == []
    assert not (place / "01_quickstart.ipynb").exists()
    run.close()
