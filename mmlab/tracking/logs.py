"""What ranks print, followed: bounded reads, whatever a rank prints, for whoever shows the end of it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO

MOST = 1 << 16
"""Bytes of one rank's log that are read at once, and that a line may have."""
LONGEST = 2000
"""Characters of a line that are kept."""


LINE = re.compile(rb"\n")
UPDATE = re.compile(rb"\r\n|\r(?!\Z)|\n")
"""What ends a line, or a progress bar as it was before its next update."""


class LogTail:
    """Follows the log of one rank, through its rotation; `most` bytes of it at once, and in a line, which ends with
    `end`."""

    def __init__(self, path: Path, most: int = MOST, end: re.Pattern[bytes] = LINE) -> None:
        self.path = path
        self.most = most
        self._end = end
        self._inode = 0
        self._offset = 0
        self._begun = b""

    @property
    def begun(self) -> str:
        """The start of a line that is still being printed."""
        return self._begun.decode(errors="replace")

    def read(self) -> list[str]:
        """Whole lines that came since the last call, of the last `most` bytes; a line says what was left out."""
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
            left_out = max(0, now.st_size - self._offset - self.most)
            data = rest + os.pread(file.fileno(), now.st_size - self._offset - left_out, self._offset + left_out)
            self._offset = now.st_size if left_out else self._offset + len(data) - len(rest)
        return self._lines(data, left_out)

    def _of_rotated(self) -> bytes:
        """What was printed before the rotation and not read yet."""
        rest = b""
        for number in (1, 2):  # it may have been rotated twice since
            with contextlib.suppress(OSError), open(self.path.with_name(f"{self.path.name}.{number}"), "rb") as old:
                then = os.fstat(old.fileno())
                start = self._offset if then.st_ino == self._inode else 0
                rest = os.pread(old.fileno(), max(0, min(self.most, then.st_size - start)), start) + rest
                if then.st_ino == self._inode:
                    return rest
        return b""

    def _lines(self, data: bytes, left_out: int) -> list[str]:
        lines = []
        if left_out:
            self._begun = b""
            lines.append(f"... {left_out} bytes left out ...")
            data = data.partition(b"\n")[2] if b"\n" in data else data
        *whole, self._begun = self._end.split(self._begun + data)
        if len(self._begun) > self.most:
            whole.append(self._begun)
            self._begun = b""
        return lines + [line.decode(errors="replace") for line in whole]


def clean(line: str) -> str:
    """A line as a terminal would leave it: what a carriage return overwrites is gone; at most LONGEST characters."""
    text = line.rstrip("\r\n").rpartition("\r")[2]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
