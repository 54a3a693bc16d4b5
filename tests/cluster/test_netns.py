"""Two hosts on one machine: what they are made of, what is refused, and that nothing is left of them."""

import os
import shutil
import subprocess
import sys
import time
import uuid

import pytest
from two_hosts import possible

from mmlab.cluster import netns
from mmlab.cluster.netns import Shape, two_hosts
from mmlab.errors import MmlabError


def here():
    return {path.name for path in netns.NAMESPACES.iterdir()} if netns.NAMESPACES.is_dir() else set()


def own():
    """Those of this process: other programs on this machine may have theirs meanwhile."""
    return {name for name in here() if name.startswith(f"mmlab-{os.getpid()}-")}


def test_rates_and_delays_are_read():
    assert Shape.parse("100mbit") == Shape(1e8)
    assert Shape.parse("1.5Gbit", "250us") == Shape(1.5e9, 2.5e-4)


@pytest.mark.parametrize("rate", ["", "fast", "0mbit", "-1mbit", "100", "100mb", "1bit", "9e9gbit", "nan", "101gbit"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(MmlabError, match=r"--rate .* such as 100mbit|--rate .* 100kbit to 100gbit"):
        Shape.parse(rate)


@pytest.mark.parametrize("delay", ["5", "ms", "-1ms", "2s"])
def test_a_delay_that_is_none_is_refused(delay):
    with pytest.raises(MmlabError, match="--delay"):
        Shape.parse("100mbit", delay)


def refused(monkeypatch, where, name, value):
    monkeypatch.setattr(where, name, value)
    with pytest.raises(MmlabError) as caught, two_hosts():
        pytest.fail("was not refused")
    return str(caught.value)


def test_what_this_machine_lacks_is_named(monkeypatch):
    assert "need Linux" in refused(monkeypatch, sys, "platform", "darwin")
    monkeypatch.setattr(sys, "platform", "linux")
    assert "`tc`" in refused(monkeypatch, shutil, "which", lambda name: None if name == "tc" else name)
    assert "`ip`" in refused(monkeypatch, shutil, "which", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert "need root" in refused(monkeypatch, os, "geteuid", lambda: 1000)


def test_namespaces_that_are_not_permitted_are_said_to_be_so(monkeypatch, tmp_path):
    """An `ip` that says no stands for a container without the capability."""
    for program in ("ip", "tc"):
        (tmp_path / program).write_text("#!/bin/sh\necho mount --make-shared /run/netns failed >&2; exit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    message = refused(monkeypatch, netns, "NAMESPACES", tmp_path / "none")
    assert "not permitted here" in message
    assert "make-shared" in message


def test_a_program_that_does_not_end_is_an_error_that_the_command_can_print(monkeypatch, tmp_path):
    (tmp_path / "ip").write_text("#!/bin/sh\nexec sleep 20\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(netns, "WAIT", 0.1)
    with pytest.raises(MmlabError, match="`ip netns list` has not ended"):
        netns.ip("netns", "list")


@possible
def test_two_pairs_at_once_are_shaped_and_nothing_is_left_of_them():
    before = own()
    with two_hosts(Shape.parse("10mbit")) as (first, second), two_hosts() as others:
        assert len(own() - before) == 4
        assert {first.namespace, second.namespace}.isdisjoint(host.namespace for host in others)
        for host in (first, second):
            assert "tbf" in netns.ip("-n", host.namespace, "qdisc", "show", "dev", netns.DEVICE, program="tc")
        inside = subprocess.Popen([*second.command, "sleep", "60"])
        while inside.pid not in netns._pids(second.namespace):  # `ip netns exec` has still to enter it
            assert inside.poll() is None
            time.sleep(0.02)
        command = [*first.command, "cat", f"/sys/class/net/{netns.DEVICE}/operstate"]
        assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "up\n"
        netns.reshape((first, second), None)
        assert "tbf" not in netns.ip("-n", first.namespace, "qdisc", "show", "dev", netns.DEVICE, program="tc")
    assert inside.wait(30) == -9
    assert own() == before


@possible
def test_what_a_dead_process_left_goes_at_the_next_start_and_what_a_live_one_has_stays():
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, timeout=30)
    tag = uuid.uuid4().hex[:8]
    dead = f"mmlab-{int(ended.stdout)}-1-{tag}-a"
    alive = f"mmlab-{os.getppid()}-{netns._started(os.getppid())}-{tag}-a"
    try:
        netns.ip("netns", "add", dead)
        netns.ip("netns", "add", alive)
        with two_hosts():
            assert dead not in here()
            assert alive in here()
    finally:
        netns.remove(dead, alive)


@possible
def test_a_kernel_without_netem_is_told_so_and_the_hosts_go():
    before = own()
    try:
        with two_hosts(Shape.parse("10mbit", "5ms")) as (first, _):
            assert "delay 5ms" in netns.ip("-n", first.namespace, "qdisc", "show", program="tc")
    except MmlabError as error:
        assert "leave --delay out" in str(error)  # noqa: PT017  which of the two it is depends on the kernel
    assert own() == before
