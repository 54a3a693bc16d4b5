"""Records of runs: the reading side, without torch and without engines."""

from mmlab.tracking.record import ENDED, LIVE, RunRecord, list_runs

__all__ = ["ENDED", "LIVE", "RunRecord", "list_runs"]
