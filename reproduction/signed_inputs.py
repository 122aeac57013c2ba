"""The task of the paper's counter-example, the moments of LiSSA on it in closed form, and its simulation.

A binary logistic task at θ = 0 whose inputs are ``x = (√λ_1 ε_1, …, √λ_N ε_N)`` with independent signs ε, so that
``‖x‖² = Tr(H)`` pointwise, ``H = E xxᵀ = Diag(λ_1 … λ_N)`` and ``H̃ = (1/|B|) Σ xxᵀ``. With g = 0, hence u* = 0,

    E u^t     = Q^t u⁰,                      Q = I - η(H + λ)
    E‖u^t‖²   = Σ_i (u⁰_i)² (M^t 1)_i,       M_ii = Q_ii²,   M_ij = η² λ_i λ_j / |B|

The second line is exact for every H: ``E (I - η(H̃+λ)) D (I - η(H̃+λ))`` is diagonal for diagonal D, with the entries
``M diag(D)``, because ``E H̃DH̃ = (1/|B|) Tr(HD) H + (1 - 1/|B|) HDH``. The paper's proof has ``R^t`` in its place, where
``R = Diag(M 1)`` is the matrix of Theorem 1. They agree for t ≤ 1, and for all t when H's eigenvalues are equal. Else
``R^t`` promises more growth than there is: the largest row sum of M bounds its largest eigenvalue, and
need not be near it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor

from whence.errors import OptionError
from whence.operators import Damped, LinearOperator
from whence.solvers.lissa import Chain, Lissa
from whence.solvers.plan import Plan
from whence.spectrum import Estimate, Spectrum
from whence.vectors import ParamVector

__all__ = [
    "Paths",
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
_RESOLVED = 0.03  # a simulated mean square is believed while its standard error is below this part of it


# --- the task ----------------------------------------------------------------------------------------------------


class SignedInputs(LinearOperator):
    """``H = E xxᵀ`` of the lemma's inputs; a sample draws its batch of them afresh.

    Args:
        eigenvalues: λ_1 … λ_N, positive, ``[N]``. V = I without loss of generality.
    """

    def __init__(self, eigenvalues: Tensor) -> None:
        if eigenvalues.ndim != 1 or len(eigenvalues) == 0 or not bool((eigenvalues > 0).all()):
            raise OptionError(f"eigenvalues must be positive numbers, got {eigenvalues.tolist()}")
        self.eigenvalues = eigenvalues

    def zeros(self, columns: int | None = None) -> ParamVector:
        return ParamVector({"u": torch.zeros_like(self.eigenvalues)}).zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        return ParamVector({"u": vector["u"] * self.eigenvalues}, columns=vector.columns)

    @property
    def num_terms(self) -> int:
        """All vectors of signs."""
        return int(2 ** len(self.eigenvalues))

    def sample(self, batch_size: int, generator: torch.Generator) -> LinearOperator:
        self.check_batch_size(batch_size)
        return _Batch(draw_inputs(self.eigenvalues, (batch_size,), generator))


class _Batch(LinearOperator):
    """``H̃ = (1/|B|) Σ xxᵀ`` of some inputs, ``[|B|, N]``."""

    def __init__(self, inputs: Tensor) -> None:
        self._inputs = inputs

    def zeros(self, columns: int | None = None) -> ParamVector:
        return ParamVector({"u": self._inputs.new_zeros(self._inputs.shape[1])}).zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        product = vector["u"] @ self._inputs.T @ self._inputs / len(self._inputs)
        return ParamVector({"u": product}, columns=vector.columns)

    @property
    def num_terms(self) -> int:
        return len(self._inputs)


def draw_inputs(eigenvalues: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
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


# --- closed forms ------------------------------------------------------------------------------------------------


def second_moment_matrix(setting: Setting) -> Tensor:
    """``M``: how the diagonal of ``E C_tᵀC_t`` moves in a step, ``C_t`` the product of the first t steps' matrices."""
    values, eta = setting.values, setting.step_size
    matrix = eta**2 / setting.batch_size * torch.outer(values, values)
    matrix.diagonal().copy_((1 - eta * (values + setting.damping)).square())
    return matrix


def theorem_matrix(setting: Setting) -> Tensor:
    """Diagonal of Theorem 1's ``R = (1 - η(H+λ))² + η²(E H̃² - H²)``, where ``E H̃² - H² = (Tr(H)H - H²)/|B|``."""
    values, eta = setting.values, setting.step_size
    gap = (values.sum() * values - values.square()) / setting.batch_size
    return (1 - eta * (values + setting.damping)).square() + eta**2 * gap


def mean_path(setting: Setting) -> Tensor:
    """``E u^t = Q^t u⁰`` for t = 0 … steps, ``[steps + 1, N]``."""
    q = 1 - setting.step_size * (setting.values + setting.damping)
    return torch.stack([q**t * setting.start for t in range(setting.steps + 1)])


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

    M is a diagonal matrix and ``(η²/|B|) λλᵀ``, so that its largest eigenvalue is 1 where

        Σ_i ηλ_i² / (|B|(λ_i + λ)(2 - η(λ_i + λ)) + ηλ_i²) = 1
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


# --- simulation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """Independent runs of one setting.

    Attributes:
        setting: what was run.
        along: ``⟨u^t, E u^t⟩ / ‖E u^t‖`` in every run, ``[runs, steps + 1]``; its mean estimates ``‖E u^t‖``.
        squares: ``‖u^t‖²`` in every run, ``[runs, steps + 1]``.
        total: ``Σ_runs u^t``, ``[steps + 1, N]``.
    """

    setting: Setting
    along: Tensor
    squares: Tensor
    total: Tensor

    @property
    def mean(self) -> Tensor:
        """Estimates of ``‖E u^t‖``."""
        return self.along.mean(0)

    @property
    def mean_stderr(self) -> Tensor:
        return self.along.std(0) / math.sqrt(len(self.along))

    @property
    def square(self) -> Tensor:
        """Estimates of ``E‖u^t‖²``."""
        return self.squares.mean(0)

    @property
    def square_stderr(self) -> Tensor:
        return self.squares.std(0) / math.sqrt(len(self.squares))

    @property
    def resolved(self) -> int:
        """The last t up to which the mean square can be told: its standard error is below 3% of it.

        ``u^t`` is a product of random matrices, so ``‖u^t‖²`` has a long tail that grows with t: more and more of
        the mean is carried by runs too rare to be among those simulated. The sample mean then comes out too small, and
        so does its standard error.
        """
        bad = (self.square_stderr > _RESOLVED * self.square).nonzero().flatten()
        return int(bad[0]) - 1 if len(bad) else self.setting.steps

    @property
    def mean_resolved(self) -> int:
        """The last t up to which the mean can be told from zero, by 3 standard errors."""
        bad = (self.mean.abs() < 3 * self.mean_stderr).nonzero().flatten()
        return int(bad[0]) - 1 if len(bad) else self.setting.steps


def simulate(setting: Setting, *, runs: int, generator: torch.Generator) -> Paths:
    """Many independent runs of ``u ← u - η(H̃_t + λ)u`` at once, a fresh batch for every run and step.

    Args:
        setting: the task, step and batch.
        runs: how many.
        generator: all randomness comes from here.
    """
    if runs < 1:
        raise OptionError(f"runs is {runs}; it must be at least 1")
    values, eta = setting.values, setting.step_size
    means = mean_path(setting)
    norms = means.norm(dim=1, keepdim=True)
    directions = means / norms.clamp_min(torch.finfo(torch.float64).tiny)
    total = torch.zeros_like(means)
    along, squares = [], []
    chunk = max(1, _CHUNK // (setting.batch_size * len(values)))
    for first in range(0, runs, chunk):
        count = min(chunk, runs - first)
        u = setting.start.expand(count, -1)
        path = [u]
        for _ in range(setting.steps):
            x = draw_inputs(values, (count, setting.batch_size), generator)
            curved = torch.bmm(x.transpose(1, 2), torch.bmm(x, u.unsqueeze(2))).squeeze(2)
            u = u - eta * (curved / setting.batch_size + setting.damping * u)
            path.append(u)
        points = torch.stack(path, dim=1)  # [runs, steps + 1, N]
        along.append(torch.einsum("rtn,tn->rt", points, directions))
        squares.append(points.square().sum(2))
        total += points.sum(0)
    return Paths(setting, torch.cat(along), torch.cat(squares), total)


def library_path(setting: Setting, generator: torch.Generator) -> Tensor:
    """One run of the setting through the library's own LiSSA, ``[steps + 1, N]``."""
    operator = SignedInputs(setting.values)
    system, rhs = Damped(operator, setting.damping), operator.zeros()
    trace, largest = Estimate(float(setting.values.sum())), Estimate(float(setting.values.max()))
    spectrum = Spectrum(trace=trace, frobenius=Estimate(float(setting.values.norm())), lambda_max=largest)
    plan = Plan(
        damping=setting.damping,
        step_size=setting.step_size,
        batch_size=setting.batch_size,
        num_steps=setting.steps,
        chains=1,
        spectrum=spectrum,
        constant=1.0,
    )
    solver = Lissa(plan, average="last")
    iterate = ParamVector({"u": setting.start})
    chain = Chain(iterate, iterate, 0, generator)
    path = [setting.start]
    for t in range(1, setting.steps + 1):
        # With g = 0 the ball that holds the solution is a point, which every path has left: not a divergence here.
        solver.advance(chain, system, rhs, plan, until=t)
        path.append(chain.iterate["u"].clone())
    return torch.stack(path)
