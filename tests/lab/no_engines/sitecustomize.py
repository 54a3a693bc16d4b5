"""On PYTHONPATH of a lab: while the file in MMLAB_TEST_NO_ENGINES exists, engines end before they begin."""

import os
import sys

if "mmlab.cluster.engine_main" in sys.orig_argv and os.path.exists(os.environ.get("MMLAB_TEST_NO_ENGINES", "")):
    os._exit(3)
