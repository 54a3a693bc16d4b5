"""With the ipyparallel controller stopped the server answers on every route; a run is steered and its lab ended."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from own_places import WORKERS, own_places
from server.jupyter import Server, jupyter_server

from mmlab import Plan
from mmlab.lab import Lab
from mmlab.messages.files import process_alive

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]
LIMIT = 0.2
"""Seconds in which the server's other routes answer, on a machine that has time for them."""
FREEZE = 5.0
"""Seconds that no answer takes on a busy machine either: an ipyparallel client froze the server for 20."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Labs and runs of the test's own, for the server too."""
    own_places(monkeypatch, tmp_path, "root/runs")
    monkeypatch.syspath_prepend(str(WORKERS))
    (tmp_path / "root" / "runs").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def lab(place: Path) -> Iterator[Lab]:
    lab = Lab(engines=2, worker="fake_worker")
    info: dict[str, Any] = {}
    try:
        lab.wait(timeout=90)
        info = lab.info()
        yield lab
    finally:
        lab.close()
        for record in info.get("processes", []):
            if process_alive(record["pid"], record["started"]):
                os.kill(record["pid"], signal.SIGKILL)


def wait_state(server: Server, key: str, states: tuple[str, ...]) -> Any:
    end = time.monotonic() + 60
    while (found := server.run(key))["state"] not in states:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def test_the_server_answers_while_the_controller_is_stopped(place: Path, lab: Lab) -> None:
    plan = Plan.preset("laptop").with_("train.steps=100000", "parallel.pp=1", "cluster.max_recoveries=0")
    run = lab.train(plan)
    key = f"runs/{run.id}"
    (controller,) = [p["pid"] for p in lab.info()["processes"] if p["kind"] == "controller"]
    with jupyter_server(place / "root", place) as server:
        wait_state(server, key, ("running",))
        family = [psutil.Process(controller), *psutil.Process(controller).children(recursive=True)]
        try:
            for process in family:
                process.send_signal(signal.SIGSTOP)
            times = other_routes_meanwhile(server, lambda: all_routes(server, key, lab.id))
            assert statistics.median(times) < LIMIT
            assert max(times) < FREEZE
            assert server.ask("POST", f"mmlab/runs/{key}/stop", {})[0] == 200
            wait_state(server, key, ("stopped",))
            began = time.monotonic()
            assert server.ask("POST", f"mmlab/labs/{lab.id}/close", {})[0] == 200
            print(f"lab closed in {time.monotonic() - began:.1f} s", file=sys.stderr)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
        assert lab.status()["state"] == "ended"
        assert server.ask("GET", "mmlab/overview")[1]["labs"] == []


def all_routes(server: Server, key: str, lab_id: str) -> None:
    """Ask everything but for the end, a few times."""
    for _ in range(5):
        status, overview = server.ask("GET", "mmlab/overview")
        assert (status, [one["id"] for one in overview["labs"]]) == (200, [lab_id])
        assert len(server.run(key)["ranks"]) == 2
        for verb in ("pause", "resume"):
            assert server.ask("POST", f"mmlab/runs/{key}/{verb}", {})[0] == 200


def other_routes_meanwhile(server: Server, work: Any) -> list[float]:
    """Seconds that Jupyter's own status route takes each time while another thread works on ours."""
    thread = threading.Thread(target=work)
    times = []
    thread.start()
    while thread.is_alive() or len(times) < 10:
        began = time.monotonic()
        assert server.ask("GET", "api/status")[0] == 200
        times.append(time.monotonic() - began)
        time.sleep(0.02)
    thread.join()
    print(f"api/status: median {statistics.median(times):.3f} s, longest {max(times):.3f} s", file=sys.stderr)
    return times
