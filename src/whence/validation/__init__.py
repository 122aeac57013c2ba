"""Why should one believe these scores? The field's ground truths, in one place.

* `validate`: what of the following is affordable for a finished run, with a verdict in words.
* `pbrf`: fine-tuning instead of solving; what damped influence approximates, without any Hessian.
* `removal_effects`, `brittleness`: retraining without some examples.
* `linear_datamodeling_score`: do scores predict what training on a random half does?
* `detection_curve`: how many wrong labels are found, and how soon.
* `tune`: which λ predicts retraining best?
"""

from whence.report.checks import Check, Comparison, Validation
from whence.validation.datamodeling import (
    DatamodelingDifference,
    DatamodelingScore,
    compare_datamodeling_scores,
    linear_datamodeling_score,
)
from whence.validation.mislabels import DetectionCurve, detection_curve
from whence.validation.pbrf import ProximalResponse, pbrf
from whence.validation.removal import Brittleness, RemovalEffects, brittleness, removal_effects
from whence.validation.retraining import Outcomes, Trainer, half_subsets, retrain
from whence.validation.tuning import Tuning, tune
from whence.validation.validate import validate

__all__ = [
    "Brittleness",
    "Check",
    "Comparison",
    "DatamodelingDifference",
    "DatamodelingScore",
    "DetectionCurve",
    "Outcomes",
    "ProximalResponse",
    "RemovalEffects",
    "Trainer",
    "Tuning",
    "Validation",
    "brittleness",
    "compare_datamodeling_scores",
    "detection_curve",
    "half_subsets",
    "linear_datamodeling_score",
    "pbrf",
    "removal_effects",
    "retrain",
    "tune",
    "validate",
]
