"""Two hosts on one machine: two network namespaces joined by a link that carries so many bits a second each way.

Linux and root only (`two_hosts` says what is missing). Whatever becomes of the process that made them, a guardian
process ends what runs in the namespaces and removes them; what a dead guardian left goes at the next start.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmlab.cluster.pool import Host
from mmlab.errors import MmlabError

DEVICE = "link0"
"""The interface that leads to the other host, in each namespace."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the two hosts; seen in their namespaces alone, so that several pairs can have the same."""
OUTSIDE = "192.0.2.0/24"
"""All of the outside that the hosts have a way to: addresses that nobody has, by which a rank finds its interface
(`train.worker.routable_address`). With a way to everywhere each lookup of a name would wait for an answer: those of the
store's clients made a short run take 35 s instead of 14."""
NAMESPACES = Path("/run/netns")
BURST = 1e-3
"""Seconds' worth of bits that the shaper may let pass at once: 12.5 kB at 100 Mbit/s. 256 kB at once is so much that a
transfer of 4 MB measures 0.98 of the time that the rate allows."""
FRAME = 1514
"""Bytes of a whole Ethernet frame: the shaper's bucket holds at least two."""
QUEUE = "400ms"
"""How long the shaper's queue may be: never full in any measurement, so TCP never has to send anything twice."""
SLOWEST, FASTEST = 1e5, 1e11
WAIT = 20.0
"""Seconds that an `ip` or `tc` may take; on two busy cores they take milliseconds."""
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NAME = re.compile(r"mmlab-(\d+)-(\d+)-[0-9a-f]{8}-[ab]")


@dataclass(frozen=True)
class Shape:
    """What the link is like, each way: `rate` bits a second, `delay` seconds on top of what queues take."""

    rate: float
    delay: float = 0.0

    @classmethod
    def parse(cls, rate: str, delay: str = "0ms") -> Shape:
        """From text such as "100mbit" and "5ms". MmlabError when it is no such text, or out of range."""
        bits = _number("--rate", rate, _UNITS, "100mbit")
        if not SLOWEST <= bits <= FASTEST:
            raise MmlabError(f"--rate {rate}: must be 100kbit to 100gbit; 100mbit is a slow network between hosts")
        seconds = _number("--delay", delay, _TIMES, "5ms")
        if seconds > 1.0:
            raise MmlabError(f"--delay {delay}: must be 0ms to 1s")
        return cls(bits, seconds)


def _number(option: str, text: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", text.strip().lower())
    if found is None:
        raise MmlabError(f"{option} {text}: must be a number and one of {', '.join(units)}, such as {example}")
    return float(found[1]) * units[found[2]]


def ip(*arguments: str, program: str = "ip") -> str:
    """What iproute2 prints. MmlabError with what it says when it fails, and when it does not end."""
    try:
        ended = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=WAIT, check=False)
    except subprocess.TimeoutExpired:
        raise MmlabError(f"`{program} {' '.join(arguments)}` has not ended after {WAIT:g} s") from None
    if ended.returncode:
        raise MmlabError(f"`{program} {' '.join(arguments)}` failed: {(ended.stderr or ended.stdout).strip()}")
    return ended.stdout


def refuse_elsewhere() -> None:
    """MmlabError with the first thing that is missing for namespaces and a shaped link."""
    if not sys.platform.startswith("linux"):
        raise MmlabError(f"two hosts on one machine need Linux's network namespaces; this is {sys.platform}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise MmlabError(f"two hosts on one machine need iproute2's `{program}`; install it (Debian: iproute2)")
    if os.geteuid() != 0:
        raise MmlabError("two hosts on one machine need root, to make network namespaces; use sudo")


@contextlib.contextmanager
def two_hosts(shape: Shape | None = None) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them (of no particular rate: None), gone when the block ends.

    MmlabError when this machine cannot have them.
    """
    refuse_elsewhere()
    remove(*stale())
    tag = f"mmlab-{os.getpid()}-{_started(os.getpid())}-{uuid.uuid4().hex[:8]}"
    names = (f"{tag}-a", f"{tag}-b")
    hosts = (Host(names[0], ADDRESSES[0], DEVICE), Host(names[1], ADDRESSES[1], DEVICE))
    guardian = _Guardian(names)
    try:
        _make(names)
        reshape(hosts, shape)
        yield hosts
    finally:
        remove(*names)
        guardian.dismiss()


def _make(names: tuple[str, str]) -> None:
    try:
        for name in names:
            ip("netns", "add", name)
    except MmlabError as error:
        raise MmlabError(
            f"network namespaces are not permitted here, also not to root: {error}. In a container: run it with "
            "--privileged (or --cap-add SYS_ADMIN --cap-add NET_ADMIN)."
        ) from None
    ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
    for name, mine, other in zip(names, ADDRESSES, reversed(ADDRESSES), strict=True):
        ip("-n", name, "address", "add", f"{mine}/24", "dev", DEVICE)
        ip("-n", name, "link", "set", DEVICE, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "route", "add", OUTSIDE, "via", other)


def reshape(hosts: tuple[Host, Host], shape: Shape | None) -> None:
    """Give the link another rate and delay, at both ends; None: none. MmlabError where the kernel cannot."""
    for host in hosts:
        with contextlib.suppress(MmlabError):  # there was no shaper
            ip("-n", host.namespace, "qdisc", "del", "dev", DEVICE, "root", program="tc")
        if shape is None:
            continue
        parent = ["root"]
        if shape.delay:
            _delay(host, shape)
            parent = ["parent", "1:1"]
        burst = max(2 * FRAME, round(shape.rate / 8 * BURST))
        limits = ["rate", f"{shape.rate:.0f}bit", "burst", f"{burst}b", "latency", QUEUE]
        ip("-n", host.namespace, "qdisc", "add", "dev", DEVICE, *parent, "tbf", *limits, program="tc")


def _delay(host: Host, shape: Shape) -> None:
    packets = max(1000, round(2 * shape.rate * shape.delay / 8 / FRAME))
    how = ["netem", "delay", f"{shape.delay * 1e6:.0f}us", "limit", str(packets)]
    try:
        ip("-n", host.namespace, "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", *how, program="tc")
    except MmlabError as error:
        raise MmlabError(
            f"--delay needs the kernel's netem, which this one lacks ({error}); leave --delay out"
        ) from None


class _Guardian:
    """The process that cleans up: it reads a pipe that only this process can write to, and so sees its end."""

    def __init__(self, names: tuple[str, ...]) -> None:
        end, self._pipe = os.pipe()
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mmlab.cluster.netns_guard", *names],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=root,  # the caller's folder may be gone by then
            start_new_session=True,  # what ends the terminal's processes does not end it
        )
        os.close(end)

    def dismiss(self) -> None:
        """Let it look once more, and end."""
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)


def remove(*names: str) -> None:
    """End what runs in these namespaces and remove them, and with them their end of a link. Those that are gone
    already are no error."""
    for name in names:
        end = time.monotonic() + 10.0
        while (pids := _pids(name)) and time.monotonic() < end:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        with contextlib.suppress(MmlabError):
            ip("netns", "delete", name)


def _pids(name: str) -> list[int]:
    with contextlib.suppress(MmlabError):
        return [int(pid) for pid in ip("netns", "pids", name).split()]
    return []


def stale() -> list[str]:
    """Namespaces of calls whose process is gone."""
    if not NAMESPACES.is_dir():
        return []
    found = ((entry.name, _NAME.fullmatch(entry.name)) for entry in NAMESPACES.iterdir())
    return [name for name, match in found if match and _started(int(match[1])) != int(match[2])]


def _started(pid: int) -> int:
    """When a process started, in clock ticks since the machine did, which no later process of that number has in
    common with it; -1 when there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])
