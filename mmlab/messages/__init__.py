"""What is said between processes: commands, acks, events, beacons. Small files, no torch."""

from mmlab.messages.beacon import PHASES, Beacon, BeaconState, read_beacons
from mmlab.messages.control import Ack, Command, Inbox, new_command, read_ack, send, wait_ack
from mmlab.messages.events import Event, EventLog, follow_events, read_events
from mmlab.messages.failures import Failure, claim_report, read_failures, write_failure
from mmlab.messages.files import RunPaths, process_alive, process_started, read_json, write_atomic, write_json

__all__ = [
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
    "claim_report",
    "follow_events",
    "new_command",
    "process_alive",
    "process_started",
    "read_ack",
    "read_beacons",
    "read_events",
    "read_failures",
    "read_json",
    "send",
    "wait_ack",
    "write_atomic",
    "write_failure",
    "write_json",
]
