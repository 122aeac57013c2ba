"""Why should one believe these scores? The field's ground truths, in one place.

* `pbrf`: fine-tuning instead of solving; what damped influence approximates, without any Hessian.
* `removal_effects`, `brittleness`: retraining without some examples.
* `linear_datamodeling_score`: do scores predict what training on a random half does?
* `detection_curve`: how many wrong labels are found, and how soon.
* `check_condition`: does the assumption behind the batch size hold? `damping_sweep`: what does λ change?
"""

from whence.validation.response import ProximalResponse, pbrf

__all__ = ["ProximalResponse", "pbrf"]
