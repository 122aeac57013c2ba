"""The task of the paper's counter-example, the moments of LiSSA on it in closed form, and its simulation.

A binary logistic task at θ = 0 whose inputs are ``x = (√λ_1 ε_1, …, √λ_N ε_N)`` with independent signs ε, so that
``‖x‖² = Tr(H)`` pointwise, ``H = E xxᵀ = Diag(λ_1 … λ_N)`` and ``H̃ = (1/|B|) Σ xxᵀ``. With g = 0, hence u* = 0,

    E u^t     = Q^t u⁰,                      Q = I - η(H + λ)
    E‖u^t‖²   = Σ_i (u⁰_i)² (M^t 1)_i,       M_ii = Q_ii²,   M_ij = η² λ_i λ_j / |B|

where the paper's proof has ``R^t``, ``R = Diag(M 1)``. Derived in docs/math.md, 'The counter-example'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor

from whence.errors import OptionError
from whence.operators import Damped, Dense
from whence.solvers.lissa import Chain, Lissa
from whence.solvers.plan import Plan
from whence.spectrum import Estimate, Spectrum
from whence.vectors import ParamVector

__all__ = [
    "Setting",
    "SignedInputs",
    "critical_batch",
    "growth",
    "lemma_bound",
    "library_path",
    "mean_path",
    "mean_square_path",
    "printed_mean_square_path",
    "second_moment_matrix",
    "simulate",
    "theorem_matrix",
]

_CHUNK = 2**22  # numbers drawn at once


# --- the task --------------------------------------------------------------------------------------------


class SignedInputs(Dense):
    """``H = E xxᵀ`` of the lemma's inputs; a sample draws its batch of them afresh.

    Args:
        eigenvalues: λ_1 … λ_N, positive, ``[N]``. V = I without loss of generality.
    """

    def __init__(self, eigenvalues: Tensor) -> None:
        if eigenvalues.ndim != 1 or len(eigenvalues) == 0 or not bool((eigenvalues > 0).all()):
            raise OptionError(f"eigenvalues must be positive numbers, got {eigenvalues.tolist()}")
        super().__init__(torch.diag(eigenvalues), num_terms=2 ** len(eigenvalues))  # all vectors of signs
        self.eigenvalues = eigenvalues

    def sample(self, batch_size: int, generator: torch.Generator) -> Dense:
        self.check_batch_size(batch_size)
        inputs = _draw_inputs(self.eigenvalues, (batch_size,), generator)
        return Dense(inputs.T @ inputs / batch_size, num_terms=batch_size)


def _draw_inputs(eigenvalues: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Inputs ``x_i = ±√λ_i``, ``[*shape, N]``."""
    bits = torch.randint(0, 2, (*shape, len(eigenvalues)), generator=generator, dtype=torch.int8)
    return bits.to(eigenvalues.dtype).sub_(0.5).mul_(2 * eigenvalues.sqrt())


@dataclass(frozen=True)
class Setting:
    """LiSSA on one task, from ``u⁰ = (1, …, 1)/√N``.

    Attributes:
        eigenvalues: of H.
        damping: λ.
        step_size: η.
        batch_size: |B|.
        steps: how many are followed.
    """

    eigenvalues: tuple[float, ...]
    damping: float
    step_size: float
    batch_size: int
    steps: int

    def __post_init__(self) -> None:
        if not self.eigenvalues or not all(0 < value < math.inf for value in self.eigenvalues):
            raise OptionError(f"eigenvalues must be positive numbers, got {self.eigenvalues}")
        for name in ("damping", "step_size"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} must be a positive number, got {getattr(self, name)}")
        for name in ("batch_size", "steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def values(self) -> Tensor:
        """The eigenvalues, in float64."""
        return torch.tensor(self.eigenvalues, dtype=torch.float64)

    @property
    def start(self) -> Tensor:
        """u⁰, of norm 1."""
        return torch.full_like(self.values, len(self.eigenvalues) ** -0.5)

    @property
    def contraction(self) -> Tensor:
        """The diagonal of Q."""
        return 1 - self.step_size * (self.values + self.damping)


# --- closed forms ----------------------------------------------------------------------------------------


def second_moment_matrix(setting: Setting) -> Tensor:
    """``M``: how the diagonal of ``E C_tᵀC_t`` moves in a step, ``C_t`` the product of the first t steps' matrices."""
    values = setting.values
    matrix = setting.step_size**2 / setting.batch_size * torch.outer(values, values)
    matrix.diagonal().copy_(setting.contraction.square())
    return matrix


def theorem_matrix(setting: Setting) -> Tensor:
    """Diagonal of Theorem 1's ``R = (1 - η(H+λ))² + η²(E H̃² - H²)``, where ``E H̃² - H² = (Tr(H)H - H²)/|B|``."""
    return second_moment_matrix(setting).sum(1)


def mean_path(setting: Setting) -> Tensor:
    """``E u^t = Q^t u⁰`` for t = 0 … steps, ``[steps + 1, N]``."""
    return torch.stack([setting.contraction**t * setting.start for t in range(setting.steps + 1)])


def mean_square_path(setting: Setting) -> Tensor:
    """``E‖u^t‖²`` for t = 0 … steps, exactly."""
    matrix, weights = second_moment_matrix(setting), setting.start.square()
    diagonal, path = torch.ones_like(weights), []
    for _ in range(setting.steps + 1):
        path.append(weights @ diagonal)
        diagonal = matrix @ diagonal
    return torch.stack(path)


def printed_mean_square_path(setting: Setting) -> Tensor:
    """``[u⁰]ᵀ R^t u⁰``, which the paper's proof gives for ``E‖u^t‖²``."""
    ratio, weights = theorem_matrix(setting), setting.start.square()
    return torch.stack([weights @ ratio**t for t in range(setting.steps + 1)])


def growth(setting: Setting) -> float:
    """Largest eigenvalue of M: the factor by which ``E‖u^t‖²`` grows or falls in a step, after many."""
    return float(torch.linalg.eigvalsh(second_moment_matrix(setting))[-1])


def lemma_bound(setting: Setting) -> float:
    """The lemma's ``(λmax/(λmax+λ))² Tr(H)/λmax``."""
    values = setting.values
    largest = float(values.max())
    return (largest / (largest + setting.damping)) ** 2 * float(values.sum()) / largest


def critical_batch(setting: Setting) -> float:
    """The |B|, as a real number, below which ``E‖u^t‖²`` grows for the setting's step: M's eigenvalue is 1 there.

    It solves ``Σ_i ηλ_i² / (|B|(λ_i + λ)(2 - η(λ_i + λ)) + ηλ_i²) = 1``. Derived in docs/math.md, 'The
    counter-example'.
    """
    values, eta = setting.values, setting.step_size
    room = (values + setting.damping) * (2 - eta * (values + setting.damping))
    if not bool((room > 0).all()):
        raise OptionError(
            f"step_size {eta} is above 2/(λmax + λ): no batch is large enough; use a shorter step"
        )

    def excess(log_batch: float) -> float:
        return float((eta * values**2 / (math.exp(log_batch) * room + eta * values**2)).sum()) - 1

    if len(values) == 1:
        return 0.0  # one eigenvalue: x² = λ_1 always, there is nothing to sample
    return math.exp(brentq(excess, -50.0, 50.0, xtol=1e-13))


# --- runs ------------------------------------------------------------------------------------------------


def simulate(setting: Setting, *, runs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Many independent runs of ``u ← u - η(H̃_t + λ)u`` at once, a fresh batch for every run and step.

    Args:
        setting: the task, step and batch.
        runs: how many.
        generator: all randomness comes from here.

    Returns:
        ``⟨u^t, E u^t⟩ / ‖E u^t‖`` in every run, whose mean estimates ``‖E u^t‖``, and ``‖u^t‖²`` in every run, both
        ``[runs, steps + 1]``; and ``Σ_runs u^t``, ``[steps + 1, N]``.
    """
    if runs < 1:
        raise OptionError(f"runs is {runs}; it must be at least 1")
    values, eta, means = setting.values, setting.step_size, mean_path(setting)
    directions = means / means.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    total = torch.zeros_like(means)
    along, squares = [], []
    chunk = max(1, _CHUNK // (setting.batch_size * len(values)))
    for first in range(0, runs, chunk):
        count = min(chunk, runs - first)
        path = [setting.start.expand(count, -1)]
        for _ in range(setting.steps):
            u, x = path[-1], _draw_inputs(values, (count, setting.batch_size), generator)
            curved = torch.bmm(x.transpose(1, 2), torch.bmm(x, u.unsqueeze(2))).squeeze(2)
            path.append(u - eta * (curved / setting.batch_size + setting.damping * u))
        points = torch.stack(path, dim=1)  # [runs, steps + 1, N]
        along.append(torch.einsum("rtn,tn->rt", points, directions))
        squares.append(points.square().sum(2))
        total += points.sum(0)
    return torch.cat(along), torch.cat(squares), total


def library_path(setting: Setting, generator: torch.Generator) -> Tensor:
    """One run of the setting through the library's own LiSSA, ``[steps + 1, N]``."""
    operator, values = SignedInputs(setting.values), setting.values
    system, rhs = Damped(operator, setting.damping), operator.zeros()
    trace, norm, largest = (Estimate(float(x)) for x in (values.sum(), values.norm(), values.max()))
    plan = Plan(
        damping=setting.damping,
        step_size=setting.step_size,
        batch_size=setting.batch_size,
        num_steps=setting.steps,
        chains=1,
        spectrum=Spectrum(trace=trace, frobenius=norm, lambda_max=largest),
        constant=1.0,
    )
    solver = Lissa(plan, average="last")
    iterate: ParamVector = operator.unflatten(setting.start)
    chain = Chain(iterate, iterate, 0, generator)
    path = [setting.start]
    for _ in range(setting.steps):
        # With g = 0 the ball that holds the solution is a point, which every path has left: not a divergence here.
        solver.update(chain, system, rhs, plan)
        path.append(operator.flatten(chain.iterate).clone())
    return torch.stack(path)
