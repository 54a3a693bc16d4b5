"""The guardian of two namespaces (`mmlab.cluster.netns`): waits until their owner is gone, then removes them."""

from __future__ import annotations

import signal
import sys
import time

from mmlab.cluster.netns import remove

AGAIN = 0.5
"""Seconds after which it looks once more: an `ip` that the owner had just started may have outlived it."""


def main() -> None:
    """Arguments: the namespaces. Standard input ends with the owner, however that ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    names = sys.argv[1:]
    remove(*names)
    time.sleep(AGAIN)
    remove(*names)


if __name__ == "__main__":
    main()
