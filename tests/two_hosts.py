"""What tests with two hosts on one machine need (`mmlab.cluster.netns`)."""

import os
import shutil
import sys

import pytest

possible = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need Linux, root and iproute2",
)
