"""What is said between processes: commands, acks, events, beacons. Small files, no torch."""

from mmlab.messages.beacon import AXES, LEFT_UNSAID, PHASES, Beacon, BeaconState, all_left, read_beacons
from mmlab.messages.control import Ack, Command, Inbox, answered, new_command, read_abort, read_ack, send, wait_ack
from mmlab.messages.events import ENDED, Event, EventLog, planned_steps, read_events
from mmlab.messages.failures import (
    Failure,
    claim_report,
    read_aborted,
    read_failures,
    write_aborted,
    write_failure,
)
from mmlab.messages.files import RunPaths, process_alive, process_started, read_json, write_atomic, write_json

__all__ = [
    "AXES",
    "ENDED",
    "LEFT_UNSAID",
    "PHASES",
    "Ack",
    "Beacon",
    "BeaconState",
    "Command",
    "Event",
    "EventLog",
    "Failure",
    "Inbox",
    "RunPaths",
    "all_left",
    "answered",
    "claim_report",
    "new_command",
    "planned_steps",
    "process_alive",
    "process_started",
    "read_abort",
    "read_aborted",
    "read_ack",
    "read_beacons",
    "read_events",
    "read_failures",
    "read_json",
    "send",
    "wait_ack",
    "write_aborted",
    "write_atomic",
    "write_failure",
    "write_json",
]
