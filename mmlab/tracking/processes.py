"""What has become of the process of a rank."""

from __future__ import annotations

import socket

import psutil

from mmlab.messages.beacon import BeaconState
from mmlab.messages.files import process_alive


def process_state(beacon: BeaconState) -> str:
    """alive, stopped (SIGSTOP), gone, left (the run, as it should) or elsewhere (on another host, out of sight)."""
    if beacon.done:
        return "left"
    if beacon.host != socket.gethostname():
        return "elsewhere"
    if not process_alive(beacon.pid, beacon.started):
        return "gone"
    try:
        stopped = psutil.Process(beacon.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return "gone"
    return "stopped" if stopped else "alive"
