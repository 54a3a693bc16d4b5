"""The end of what ranks print, followed: bounded reads, whatever a rank prints."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

MOST = 1 << 16
"""Bytes of one rank's log that are read at once."""
LONGEST = 2000
"""Characters of a line that are kept."""


def inode(path: Path) -> int:
    """What tells a file from another one of its name; 0 while there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


class LogTail:
    """Follows the log of one rank, through its rotation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._offset = 0
        self._begun = b""

    def read(self) -> list[str]:
        """Whole lines that came since the last call, of the last MOST bytes at most; a line says what was left out."""
        try:
            with open(self.path, "rb") as file:
                return self._read(file)
        except OSError:
            return []  # it has printed nothing yet, or its host's files are not visible from here

    def _read(self, file: BinaryIO) -> list[str]:
        now = os.fstat(file.fileno())
        rest = b""
        if self._inode not in (0, now.st_ino):
            rest, self._offset = self._of_rotated(), 0
        self._inode = now.st_ino
        if now.st_size < self._offset:  # it was truncated by hand
            self._offset, self._begun = 0, b""
        data, left_out = rest, 0
        if now.st_size > self._offset:
            left_out = max(0, now.st_size - self._offset - MOST)
            data = rest + os.pread(file.fileno(), MOST, self._offset + left_out)
            self._offset = now.st_size if left_out else self._offset + len(data) - len(rest)
        return self._lines(data, left_out)

    def _of_rotated(self) -> bytes:
        """What was printed before the rotation and not read yet."""
        with contextlib.suppress(OSError), open(self.path.with_name(f"{self.path.name}.1"), "rb") as old:
            if os.fstat(old.fileno()).st_ino == self._inode:
                return os.pread(old.fileno(), MOST, self._offset)
        return b""

    def _lines(self, data: bytes, left_out: int) -> list[str]:
        lines = []
        if left_out:
            self._begun = b""
            lines.append(f"... {left_out} bytes left out ...")
            data = data.partition(b"\n")[2] if b"\n" in data else data
        *whole, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MOST:
            whole.append(self._begun)
            self._begun = b""
        return lines + [clean(line) for line in whole]


def clean(line: bytes | str) -> str:
    """A line as a terminal would leave it: what a carriage return overwrites is gone; at most LONGEST characters."""
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    text = text.rstrip("\r\n").rpartition("\r")[2]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
