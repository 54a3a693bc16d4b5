"""What a cloud says about its own machine: whether it may be taken away at any time, and that it is about to be.

One small class a cloud, over its metadata server as its documentation describes it:
- AWS EC2, IMDSv2 ("Spot Instance interruption notices", "EC2 instance rebalance recommendations"): a token by PUT, then
  `spot/instance-action` (404 until there is a notice, some two minutes before the end) and
  `events/recommendations/rebalance`.
- Google Compute Engine ("Preemptible VM instances", "Live migration process"): `instance/preempted` (30 s before the
  end) and `instance/maintenance-event`, each request with `Metadata-Flavor: Google`; waits for a change.
- Azure ("Scheduled Events for Linux VMs"): `scheduledevents` with `Metadata: true`; Preempt comes 30 s before the end.
"""

from __future__ import annotations

import calendar
import contextlib
import email.utils
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from mmlab.messages import RunPaths
from mmlab.messages.notices import Notice, write_notice

METADATA = "MMLAB_METADATA"
"""Environment variable: where the metadata server is, such as http://127.0.0.1:1234, instead of the clouds' own
address."""
EXPENDABLE = "MMLAB_EXPENDABLE"
"""Environment variable: 1 or 0, whether this host may be taken away at any time, whatever its cloud says."""
ADDRESS = "http://169.254.169.254"
"""All three clouds' metadata servers, which only their own machines reach."""
PROBE = 0.3
"""Seconds that a metadata server, a hop away, may take to answer before there is none."""
PROBES = 5
"""Times that a run asks, each with twice the patience (4.8 s in the end): while its ranks start, a busy host may miss
an answer within PROBE, and would then hear of no notice for as long as the run lasts."""
ANSWER = 5.0
"""Seconds that a known one may take."""
EVERY = 5.0
"""Seconds between looks (AWS asks for 5; Google's server holds the request that long)."""
TOKEN = 21600
"""Seconds that an AWS token lives."""


def _get(url: str, headers: dict[str, str], timeout: float, method: str = "GET") -> tuple[str, Any]:
    """A response's text and headers, never through a proxy. OSError (HTTPError for a status of 400 and above)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers, method=method), timeout=timeout) as response:
        return response.read().decode(errors="replace").strip(), response.headers


class Aws:
    """EC2."""

    name = "aws"

    def __init__(self, address: str) -> None:
        self._root = f"{address}/latest"
        self._token, self._until = "", 0.0
        self._said: set[str] = set()

    def _read(self, path: str, timeout: float = ANSWER) -> str | None:
        """A metadata item; None where there is none."""
        for _ in range(2):
            if time.monotonic() > self._until:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN)}
                self._token, _ = _get(f"{self._root}/api/token", headers, timeout, "PUT")
                self._until = time.monotonic() + TOKEN - 60
            try:
                return _get(f"{self._root}/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token}, timeout)[0]
            except urllib.error.HTTPError as error:
                if error.code == 401:  # the token has expired
                    self._until = 0.0
                    continue
                if error.code == 404:
                    return None
                raise
        return None

    def answers(self, seconds: float) -> bool:
        """Whether this is its metadata server."""
        return self._read("instance-life-cycle", seconds) is not None

    def expendable(self) -> bool:
        """Whether this is a spot instance."""
        return self._read("instance-life-cycle") == "spot"

    def look(self) -> Iterator[Notice]:
        """Notices that are new since the last look."""
        for path, kind in (("spot/instance-action", "leave"), ("events/recommendations/rebalance", "advice")):
            said = self._read(path)
            if said is None or said in self._said:
                continue
            self._said.add(said)
            found = json.loads(said)
            if found.get("action", "") == "hibernate":  # begins at once, and the machine comes back as it was
                kind = "advice"
            yield Notice(kind, self.name, socket.gethostname(), deadline=_iso(found.get("time", "")), said=said)


class Gcp:
    """Google Compute Engine."""

    name = "gcp"
    _headers = {"Metadata-Flavor": "Google"}  # noqa: RUF012  a constant
    _seconds = {"preempted": 30.0, "maintenance-event": 60.0}  # noqa: RUF012  a constant

    def __init__(self, address: str) -> None:
        self._root = f"{address}/computeMetadata/v1/instance"
        self._etag = ""
        self._last = {"preempted": "FALSE", "maintenance-event": "NONE"}

    def answers(self, seconds: float) -> bool:
        """Whether this is its metadata server."""
        return _get(f"{self._root}/id", self._headers, seconds)[1].get("Metadata-Flavor") == "Google"

    def expendable(self) -> bool:
        """Whether this is a preemptible or spot machine."""
        return _get(f"{self._root}/scheduling/preemptible", self._headers, ANSWER)[0] == "TRUE"

    def look(self) -> Iterator[Notice]:
        """Notices that are new since the last look; the server holds the request until one comes, up to EVERY."""
        wait = f"?wait_for_change=true&timeout_sec={EVERY:g}&last_etag={self._etag}" if self._etag else ""
        preempted, headers = _get(f"{self._root}/preempted{wait}", self._headers, EVERY + ANSWER)
        self._etag = headers.get("ETag", "")
        event, _ = _get(f"{self._root}/maintenance-event", self._headers, ANSWER)
        for name, said in (("preempted", preempted), ("maintenance-event", event)):
            before, self._last[name] = self._last[name], said
            if said == before or said in ("FALSE", "NONE"):
                continue
            kind = "leave" if said in ("TRUE", "TERMINATE_ON_HOST_MAINTENANCE") else "advice"  # else a live migration
            deadline = time.time() + self._seconds[name]
            yield Notice(kind, self.name, socket.gethostname(), deadline=deadline, said=f"{name}: {said}")


class Azure:
    """Azure virtual machines."""

    name = "azure"
    _headers = {"Metadata": "true"}  # noqa: RUF012  a constant
    _leave = ("Preempt", "Terminate", "Redeploy", "Reboot")

    def __init__(self, address: str) -> None:
        self._root = f"{address}/metadata"
        self._machine = ""
        self._said: set[str] = set()

    def _about(self, what: str, timeout: float) -> str:
        url = f"{self._root}/instance/compute/{what}?api-version=2021-02-01&format=text"
        return _get(url, self._headers, timeout)[0]

    def answers(self, seconds: float) -> bool:
        """Whether this is its metadata server."""
        self._machine = self._about("name", seconds)
        return bool(self._machine)

    def expendable(self) -> bool:
        """Whether this is a spot machine."""
        return self._about("priority", ANSWER) in ("Spot", "Low")

    def look(self) -> Iterator[Notice]:
        """Notices that are new since the last look."""
        self._machine = self._machine or self._about("name", ANSWER)
        text, _ = _get(f"{self._root}/scheduledevents?api-version=2020-07-01", self._headers, ANSWER)
        for event in json.loads(text).get("Events", []):
            about_others = event.get("Resources") and self._machine not in event["Resources"]
            if event["EventId"] in self._said or about_others or event.get("EventStatus") == "Completed":
                continue
            self._said.add(event["EventId"])
            kind = "leave" if event["EventType"] in self._leave else "advice"
            deadline = _http_date(event.get("NotBefore", "")) or time.time() + 30.0
            yield Notice(kind, self.name, socket.gethostname(), deadline=deadline, said=json.dumps(event))


Cloud = Aws | Gcp | Azure
CLOUDS: tuple[type[Cloud], ...] = (Aws, Gcp, Azure)


def _iso(text: str) -> float:
    """Seconds since the epoch of a time such as 2017-09-18T08:22:00Z; 0 for none."""
    with contextlib.suppress(ValueError):
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    return 0.0


def _http_date(text: str) -> float:
    """Seconds since the epoch of a time such as Mon, 19 Sep 2016 18:29:47 GMT; 0 for none."""
    with contextlib.suppress(ValueError, TypeError):
        return email.utils.parsedate_to_datetime(text).timestamp()
    return 0.0


def find_cloud(wanted: str, seconds: float = PROBE) -> Cloud | None:
    """The cloud of that name, or with "auto" the one whose metadata server answers within some seconds; None where none
    does."""
    address = os.environ.get(METADATA, ADDRESS).rstrip("/")
    for cloud in (one(address) for one in CLOUDS):
        if wanted == cloud.name:
            return cloud
        with contextlib.suppress(OSError, ValueError):
            if wanted == "auto" and cloud.answers(seconds):
                return cloud
    return None


def expendable(wanted: str) -> bool:
    """Whether this host may be taken away at any time: as MMLAB_EXPENDABLE says, else its cloud. May take a second."""
    said = os.environ.get(EXPENDABLE, "")
    if said:
        return said != "0"
    cloud = find_cloud(wanted)
    with contextlib.suppress(OSError, ValueError):
        return cloud is not None and cloud.expendable()
    return False


class SpotWatch:
    """A thread that turns what the cloud says into notices for a run; ends by itself where there is no cloud."""

    def __init__(self, paths: RunPaths, wanted: str) -> None:
        self._paths, self._wanted = paths, wanted
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmlab-spot", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        cloud = self._find()
        while cloud is not None and not self._end.is_set():
            began = time.monotonic()
            with contextlib.suppress(OSError, ValueError, KeyError):  # it may answer again
                for notice in cloud.look():
                    write_notice(self._paths, notice)
            self._end.wait(max(0.1, EVERY - (time.monotonic() - began)))

    def _find(self) -> Cloud | None:
        for turn in range(PROBES):
            patience, began = PROBE * 2**turn, time.monotonic()
            cloud = find_cloud(self._wanted, patience)
            if cloud is not None or self._end.wait(max(0.0, began + patience - time.monotonic())):
                return cloud  # without the wait a server that refuses at first would use up all turns in milliseconds
        return None

    def close(self) -> None:
        """End the thread; a request under way is not waited for."""
        self._end.set()
