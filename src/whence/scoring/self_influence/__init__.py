"""Self-influence of every training example, without a solve for each."""

from whence.scoring.self_influence.bounds import Bounds, affordable_rank, measure_bounds
from whence.scoring.self_influence.calibration import Calibration, calibrate
from whence.scoring.self_influence.reading import Readings, read_examples
from whence.scoring.self_influence.result import SelfInfluence, self_influence

__all__ = [
    "Bounds",
    "Calibration",
    "Readings",
    "SelfInfluence",
    "affordable_rank",
    "calibrate",
    "measure_bounds",
    "read_examples",
    "self_influence",
]
