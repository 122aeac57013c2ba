"""Conjugate gradients and their certificate against dense float64 solutions of prescribed spectra."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import digits
from whence import Classification, Damped, Dense, FiniteSum, GaussNewton, ParamVector
from whence.errors import OptionError, SolverError, VectorError
from whence.preconditioners import Preconditioner
from whence.solvers import Certificate, CGState, ConjugateGradient

DOUBLE = torch.float64
SIZE = 60


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def rotation(n: int = SIZE, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=generator(seed), dtype=DOUBLE))[0]


SPECTRA = {
    "geometric": torch.logspace(0, -5, SIZE, dtype=DOUBLE),
    "clustered": torch.cat(
        [
            torch.linspace(0.99, 1.0, 10),
            torch.linspace(0.099, 0.1, 25),
            torch.full((SIZE - 35,), 1e-3),
        ]
    ).double(),
    "rank-deficient": torch.cat([torch.logspace(0, -2, 20), torch.zeros(SIZE - 20)]).double(),
    "one huge": torch.cat([torch.tensor([1e3]), torch.logspace(0, -3, SIZE - 1)]).double(),
}


class Problem:
    """``(H + λ)u = g`` with a prescribed spectrum, as it is after rounding to the vectors' precision."""

    def __init__(
        self, values: Tensor, q: int = 1, *, damping: float, dtype: torch.dtype = DOUBLE, seed: int = 0
    ) -> None:
        Q = rotation(len(values))
        self.hessian = ((Q * values) @ Q.T).to(dtype)
        self.damping = damping
        self.operator = Dense(self.hessian, num_terms=7)
        self.system = Damped(self.operator, damping)
        self.matrix = self.hessian.double() + damping * torch.eye(len(values), dtype=DOUBLE)
        g = torch.randn(q, len(values), generator=generator(seed), dtype=DOUBLE)
        if seed % 2:  # like gradients: mostly where H is large
            g = g @ self.hessian.double() + 1e-3 * g
        self.g = ParamVector({"x": g.to(dtype)}, columns=q)
        self.solution = torch.linalg.solve(self.matrix, self.g["x"].double().T).T

    def error(self, x: ParamVector) -> Tensor:
        """The exact ``‖x - u*‖_A``."""
        difference = x["x"].double() - self.solution
        return ((difference @ self.matrix) * difference).sum(1).sqrt()

    def solve(self, *, start: ParamVector | None = None, **options: object) -> ConjugateGradient:
        return ConjugateGradient(**options).solve(self.system, self.g, generator=generator(), start=start)


class DensePreconditioner(Preconditioner):
    """``P = M``, with the exact smallest eigenvalue of ``M⁻¹A`` unless told otherwise."""

    def __init__(self, matrix: Tensor, problem: Problem, smallest: float | None = None) -> None:
        self.matrix, self.damping = matrix, problem.damping
        self.inverse = torch.linalg.inv(matrix)
        root = torch.linalg.inv(torch.linalg.cholesky(matrix))
        exact = float(torch.linalg.eigvalsh(root @ problem.matrix @ root.T)[0])
        self._smallest = exact if smallest is None else smallest

    def solve(self, vector: ParamVector) -> ParamVector:
        x = vector["x"]
        return ParamVector({"x": x @ self.inverse.to(x.dtype)}, columns=vector.columns)

    def root_solve(self, vector: ParamVector) -> ParamVector:
        raise NotImplementedError

    def with_damping(self, damping: float) -> Preconditioner:
        raise NotImplementedError

    @property
    def smallest(self) -> float:
        return self._smallest


def top_eigenvectors(
    problem: Problem, values: Tensor, rank: int = 10, **options: float
) -> DensePreconditioner:
    """λ plus the largest eigenvalues' part of H, as Nyström's method finds it at best."""
    Q = rotation(len(values))[:, :rank]
    matrix = (Q * values[:rank]) @ Q.T + problem.damping * torch.eye(len(values), dtype=DOUBLE)
    return DensePreconditioner(matrix, problem, **options)


# --- the solution ----------------------------------------------------------------------------------------------


def test_the_solution_is_the_dense_one_in_the_models_own_shapes() -> None:
    shapes = {"weight": (6, 4), "bias": (6,)}
    template = ParamVector({n: torch.zeros(s, dtype=DOUBLE) for n, s in shapes.items()})
    Q = rotation(30)
    matrix = (Q * torch.logspace(0, -3, 30, dtype=DOUBLE)) @ Q.T
    H = Dense(matrix, template)
    rows = torch.randn(3, 30, generator=generator(), dtype=DOUBLE)
    expected = torch.linalg.solve(matrix + 0.01 * torch.eye(30, dtype=DOUBLE), rows.T).T
    solver = ConjugateGradient(tolerance=1e-10)
    block = solver.solve(Damped(H, 0.01), H.unflatten(rows), generator=generator())
    torch.testing.assert_close(H.flatten(block.value), expected, rtol=1e-8, atol=1e-9)
    single = solver.solve(Damped(H, 0.01), H.unflatten(rows[0]), generator=generator())
    torch.testing.assert_close(H.flatten(single.value), expected[0], rtol=1e-8, atol=1e-9)
    assert single.value.columns is None
    assert single.residual.shape == single.converged.shape == single.certificate.upper.shape == ()
    assert bool(block.converged.all())
    assert bool(single.converged)
    assert bool((block.residual < 1e-9).all())


def test_a_block_gives_the_separate_solutions_with_fewer_products() -> None:
    problem = Problem(SPECTRA["geometric"], q=6, damping=0.005)
    solver = ConjugateGradient(tolerance=1e-7, verify=False)
    together = solver.solve(problem.system, problem.g, generator=generator())
    products = []
    for k, g in enumerate(problem.g.unstack()):
        alone = solver.solve(problem.system, g, generator=generator())
        torch.testing.assert_close(together.value["x"][k], alone.value["x"], rtol=1e-5, atol=1e-5)
        products.append(alone.num_products)
    assert together.num_products < 0.5 * min(products)  # of q times the columns each


def test_what_a_solution_says() -> None:
    problem = Problem(SPECTRA["geometric"], q=2, damping=0.02)
    solution = problem.solve(tolerance=1e-6)
    iterations = solution.num_products - 1
    assert solution.num_term_products == 7 * solution.num_products
    assert solution.stats.paths.shape == (1, iterations, 2)
    torch.testing.assert_close(solution.stats.paths[0, -1], (problem.g["x"] * solution.value["x"]).sum(1))
    rise = solution.stats.paths[0].diff(dim=0)  # from zero, gᵀx = ‖u*‖²_A - ‖e‖²_A, which never falls
    assert bool((rise > -1e-6 * solution.stats.paths[0, -1]).all())
    residual = (solution.value["x"] @ problem.matrix - problem.g["x"]).norm(dim=1) / problem.g["x"].norm(
        dim=1
    )
    torch.testing.assert_close(solution.residual, residual, rtol=1e-6, atol=1e-15)
    assert solution.stats.residual_stderr.tolist() == [0.0, 0.0]
    assert len(solution.chains) == 1
    assert solution.stats.events == ()


def test_no_more_products_than_asked_and_then_unconverged() -> None:
    problem = Problem(SPECTRA["geometric"], damping=1e-4)
    solution = problem.solve(max_iterations=3, tolerance=1e-3)
    assert solution.num_products == 4
    assert not bool(solution.converged.any())
    assert bool((problem.error(solution.value) <= solution.certificate.upper).all())


# --- the certificate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("preconditioned", [False, True], ids=["plain", "preconditioned"])
@pytest.mark.parametrize("q", [1, 3, 8])
@pytest.mark.parametrize("spectrum", list(SPECTRA))
def test_the_bounds_hold_at_every_iteration(
    spectrum: str, q: int, preconditioned: bool, dtype: torch.dtype
) -> None:
    values = SPECTRA[spectrum]
    for condition, seed in ((50.0, 0), (5000.0, 1)):
        damping = float(values.max()) / condition
        problem = Problem(values, q, damping=damping, dtype=dtype, seed=seed)
        # In float32 until rounding is all that is left, in float64 as far as the reference is exact.
        solver = ConjugateGradient(
            tolerance=1e-9 if dtype == torch.float32 else 1e-7,
            max_iterations=25,
            preconditioner=top_eigenvectors(problem, values) if preconditioned else None,
            largest=float(torch.linalg.eigvalsh(problem.hessian.double())[-1]),
        )
        seen = []

        def check(state: CGState) -> None:
            error = problem.error(state.iterate)  # noqa: B023
            assert bool((state.lower <= error * (1 + 1e-6)).all())
            assert bool((error <= state.upper * (1 + 1e-6)).all())
            seen.append(state.iteration)  # noqa: B023

        solution = solver.solve(problem.system, problem.g, generator=generator(), on_step=check)
        error = problem.error(solution.value)
        assert bool((solution.certificate.lower <= error * (1 + 1e-6)).all())
        assert bool((error <= solution.certificate.upper * (1 + 1e-6)).all())
        assert seen == list(range(1, len(seen) + 1))
        assert len(seen) >= 2
        assert not any(
            "met" in event for event in solution.stats.events
        )  # nothing contradicted what was given


def test_the_bounds_are_close() -> None:
    """Within a factor of 3 on both sides at any time, and mostly much closer than ‖r‖/√λ."""
    problem = Problem(SPECTRA["geometric"], q=4, damping=0.005)
    ratios, plain = [], []

    def check(state: CGState) -> None:
        error = problem.error(state.iterate)
        if state.iteration >= 3:
            ratios.append(state.upper / error)
            plain.append(state.residual * problem.g["x"].norm(dim=1) / math.sqrt(problem.damping) / error)

    solver = ConjugateGradient(tolerance=1e-4)
    solution = solver.solve(problem.system, problem.g, generator=generator(), on_step=check)
    assert bool((solution.certificate.lower >= problem.error(solution.value) / 3).all())
    assert float(torch.stack(ratios).max()) < 3
    assert float(torch.stack(ratios).median()) < 1.3
    assert float(torch.stack(plain).median()) > 1.5


def test_a_lower_bound_without_a_product_comes_from_the_largest_eigenvalue() -> None:
    problem = Problem(SPECTRA["geometric"], q=4, damping=0.005)
    without = problem.solve(tolerance=0.01, verify=False)
    assert without.certificate.lower.tolist() == [0.0] * 4
    bounded = problem.solve(tolerance=0.01, verify=False, largest=1.0)
    error = problem.error(bounded.value)
    assert bool((bounded.certificate.lower <= error).all())
    assert bool((bounded.certificate.lower >= 0.05 * error).all())


def test_the_rule_bounds_the_error_of_scores() -> None:
    """With ``H = mean wwᵀ``, the mean of ``(wᵀe)²`` over the terms is ``eᵀHe``, that of ``(wᵀu)²`` is ``‖u‖²_H``."""
    w = torch.randn(300, 40, generator=generator(), dtype=DOUBLE) * torch.logspace(0, -2, 40, dtype=DOUBLE)
    H = FiniteSum(torch.einsum("ti,tj->tij", w, w))
    system = Damped(H, 0.005)
    g = ParamVector({"x": w[:5]}, columns=5)
    solution = ConjugateGradient(tolerance=0.05).solve(system, g, generator=generator())
    exact = torch.linalg.solve(H.mean.matrix + 0.005 * torch.eye(40, dtype=DOUBLE), w[:5].T).T
    scores, wanted = solution.value["x"] @ w.T, exact @ w.T
    assert bool(solution.converged.all())
    relative = (scores - wanted).square().mean(1).sqrt() / scores.square().mean(1).sqrt()
    assert bool((relative <= 0.05).all())
    assert bool((relative >= 1e-4).all())  # it stopped, too
    certificate, norms = solution.certificate, w.norm(dim=1)
    assert bool(((scores - wanted).abs() <= certificate.score_bound(norms)).all())
    typical = certificate.score_error(norms, float(H.mean.matrix.trace()))
    torch.testing.assert_close(typical.square().mean(1).sqrt(), certificate.upper)
    assert bool(((scores - wanted).square().mean(1).sqrt() <= certificate.upper).all())


def test_root_mean_square_of_scores_from_zero_and_from_a_start() -> None:
    problem = Problem(SPECTRA["geometric"], q=2, damping=0.01)
    start = ParamVector({"x": torch.randn(2, SIZE, generator=generator(5), dtype=DOUBLE)}, columns=2)
    solver = ConjugateGradient(max_iterations=4, tolerance=1e-9)

    def check(state: CGState) -> None:
        x = state.iterate["x"]
        expected = ((x @ problem.hessian) * x).sum(1).sqrt()
        torch.testing.assert_close(state.score_rms, expected, rtol=1e-8, atol=0)

    for x0 in (None, start):
        solver.solve(problem.system, problem.g, generator=generator(), start=x0, on_step=check)


def test_certificates_name_what_they_cannot_use() -> None:
    certificate = Certificate(torch.tensor(0.0), torch.tensor(1.0), damping=0.1, operator_terms=1)
    with pytest.raises(OptionError, match=r"trace is 0\.0"):
        certificate.score_error(torch.ones(3), 0.0)
    with pytest.raises(OptionError, match="negative"):
        certificate.score_bound(torch.tensor([1.0, -1.0]))
    assert certificate.score_bound(torch.ones(3)).shape == (3,)


# --- blocks that are not full ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("preconditioned", [False, True], ids=["plain", "preconditioned"])
def test_equal_zero_and_nearly_dependent_right_hand_sides(dtype: torch.dtype, preconditioned: bool) -> None:
    values = SPECTRA["geometric"]
    problem = Problem(values, q=6, damping=0.01, dtype=dtype)
    g = problem.g["x"]
    g[1] = g[0]
    g[2] = 0
    g[3] = 1e-12 * g[4]  # short, and along another
    g[5] = g[0] + 1e-9 * g[5]
    problem.solution = torch.linalg.solve(problem.matrix, g.double().T).T
    P = top_eigenvectors(problem, values) if preconditioned else None
    sizes = []
    solver = ConjugateGradient(tolerance=1e-3, preconditioner=P)
    solution = solver.solve(
        problem.system, problem.g, generator=generator(), on_step=lambda s: sizes.append(len(s.zeta))
    )
    error, certificate = problem.error(solution.value), solution.certificate
    assert max(sizes) == 2
    assert bool(solution.converged.all())
    assert bool((error <= certificate.upper).all())
    assert solution.value["x"][2].abs().max() == 0
    assert float(certificate.upper[2]) == float(solution.residual[2]) == 0
    assert float(certificate.upper[3]) <= 1e-11 * float(certificate.upper[4])


def test_a_zero_right_hand_side_alone_costs_nothing() -> None:
    problem = Problem(SPECTRA["geometric"], damping=0.01)
    problem.g["x"].zero_()
    solution = problem.solve(verify=False)
    assert solution.num_products == 0
    assert bool(solution.converged.all())
    assert solution.value["x"].abs().max() == 0
    assert solution.stats.paths.shape == (1, 0, 1)


@pytest.mark.parametrize("preconditioned", [False, True], ids=["plain", "preconditioned"])
def test_an_exhausted_space_is_the_solution(preconditioned: bool) -> None:
    values = torch.cat([torch.tensor([1.0, 0.5, 0.2]), torch.zeros(SIZE - 3)]).double()
    problem = Problem(values, q=2, damping=0.01)
    P = top_eigenvectors(problem, values, rank=1) if preconditioned else None
    solution = problem.solve(tolerance=1e-14, preconditioner=P)
    assert solution.num_products <= 4  # three eigenvalues and λ, two directions at a time
    assert float(problem.error(solution.value).max()) < 1e-10
    assert bool((problem.error(solution.value) <= solution.certificate.upper).all())


# --- starts ----------------------------------------------------------------------------------------------------


def test_a_good_start_saves_iterations_and_the_solution_none_is_needed_from() -> None:
    problem = Problem(SPECTRA["geometric"], q=2, damping=0.005)
    cold = problem.solve(tolerance=1e-4, verify=False)
    near = ParamVector({"x": problem.solution * (1 + 1e-3)}, columns=2)
    warm = problem.solve(tolerance=1e-4, verify=False, start=near)
    assert warm.num_products < 0.7 * cold.num_products
    assert bool((problem.error(warm.value) <= warm.certificate.upper).all())
    torch.testing.assert_close(near["x"], problem.solution * (1 + 1e-3))  # the start itself is left alone
    solved = problem.solve(
        tolerance=1e-4, verify=False, start=ParamVector({"x": problem.solution}, columns=2)
    )
    assert solved.num_products == 1
    assert bool(solved.converged.all())


def test_a_start_for_nothing_is_forgotten() -> None:
    problem = Problem(SPECTRA["geometric"], q=2, damping=0.005)
    problem.g["x"][1] = 0
    start = ParamVector({"x": torch.ones(2, SIZE, dtype=DOUBLE)}, columns=2)
    solution = problem.solve(tolerance=1e-3, start=start)
    assert solution.value["x"][1].abs().max() == 0
    assert bool(solution.converged.all())


# --- trouble ---------------------------------------------------------------------------------------------------


def test_an_operator_that_is_not_positive_is_noticed() -> None:
    values = SPECTRA["geometric"].clone()
    values[7] = -0.5
    solution = Problem(values, q=2, damping=0.01).solve(tolerance=1e-6)
    assert not bool(solution.converged.any())
    assert solution.certificate.upper.tolist() == [math.inf] * 2
    assert "not positive semi-definite" in solution.stats.events[-1]
    indefinite = Problem(-SPECTRA["geometric"], q=2, damping=0.01).solve()  # at the first product
    assert indefinite.value["x"].abs().max() == 0
    assert not bool(indefinite.converged.any())


def test_a_little_negative_curvature_leaves_the_plain_bound_and_is_said() -> None:
    values = SPECTRA["rank-deficient"].clone()
    values[-5:] = -0.002
    problem = Problem(values, q=2, damping=0.01)
    solution = problem.solve(tolerance=1e-6, max_iterations=9)
    assert any("less curvature than λ" in event for event in solution.stats.events)
    assert bool((solution.residual > 1e-6).all())
    plain = solution.residual * problem.g["x"].norm(dim=1) / math.sqrt(problem.damping)
    torch.testing.assert_close(solution.certificate.upper, plain, rtol=1e-3, atol=0)


def test_a_wrong_smallest_is_noticed_and_its_bounds_withdrawn() -> None:
    values = SPECTRA["geometric"]
    problem = Problem(values, q=3, damping=0.01)
    right = top_eigenvectors(problem, values)
    wrong = top_eigenvectors(problem, values, smallest=3 * right.smallest)
    solution = problem.solve(tolerance=1e-5, preconditioner=wrong)
    assert any("below the preconditioner's smallest" in event for event in solution.stats.events)
    assert bool((problem.error(solution.value) <= solution.certificate.upper).all())
    assert problem.solve(tolerance=1e-5, preconditioner=right).stats.events == ()


def test_a_wrong_largest_is_noticed() -> None:
    problem = Problem(SPECTRA["geometric"], q=3, damping=0.01)
    solution = problem.solve(tolerance=1e-5, largest=0.3, verify=False)
    assert any("above largest = 0.3" in event for event in solution.stats.events)
    assert solution.certificate.lower.tolist() == [0.0] * 3


class Inexact(Dense):
    """Products with a relative error, as finite differences have it, the same for the same vector."""

    def matvec(self, vector: ParamVector) -> ParamVector:
        product = super().matvec(vector)
        seed = int(vector["x"].abs().sum() * 1e6) % 2**31
        noise = product.randn_like(generator(seed))
        return product.axpy_(3e-4 * product.norm() / noise.norm(), noise)


def test_verification_shows_the_errors_of_inexact_products() -> None:
    """Past the products' precision the recurrence's residual goes on falling; the measured one does not."""
    problem = Problem(SPECTRA["one huge"], q=3, damping=5.0)
    system = Damped(Inexact(problem.hessian), problem.damping)
    options = {"tolerance": 1e-4, "max_iterations": 20}
    blind = ConjugateGradient(verify=False, **options).solve(system, problem.g, generator=generator())
    seeing = ConjugateGradient(**options).solve(system, problem.g, generator=generator())
    error = problem.error(seeing.value)
    assert torch.equal(blind.value["x"], seeing.value["x"])
    assert bool((blind.residual < 0.3 * seeing.residual).all())
    assert not bool(seeing.converged.any())
    assert bool((error <= seeing.certificate.upper).all())


class Broken(Dense):
    """Returns NaN from the third product on."""

    products = 0

    def matvec(self, vector: ParamVector) -> ParamVector:
        self.products += 1
        return super().matvec(vector).scale_(math.nan if self.products >= 3 else 1.0)


def test_nan_in_a_product_is_an_error() -> None:
    problem = Problem(SPECTRA["geometric"], damping=0.001)
    with pytest.raises(SolverError, match="NaN or infinity"):
        ConjugateGradient().solve(Damped(Broken(problem.hessian), 0.001), problem.g, generator=generator())


def test_float32_says_when_rounding_is_all_that_is_left() -> None:
    problem = Problem(SPECTRA["one huge"], q=2, damping=0.01, dtype=torch.float32)
    solution = problem.solve(tolerance=1e-6, largest=1e3)
    assert not bool(solution.converged.any())
    assert any("precision" in event for event in solution.stats.events)
    assert bool((problem.error(solution.value) <= solution.certificate.upper).all())


# --- subsets, stopping, going on -------------------------------------------------------------------------------


def rank_ones(count: int = 80, n: int = 20) -> FiniteSum:
    x = torch.randn(count, n, generator=generator(1), dtype=DOUBLE) * torch.linspace(2, 0.1, n, dtype=DOUBLE)
    return FiniteSum(torch.einsum("ci,cj->cij", x, x))


def test_a_certificate_is_about_the_operator_that_was_solved_with() -> None:
    H = rank_ones()
    g = ParamVector({"x": torch.ones(20, dtype=DOUBLE)})
    part = H.subset(30, generator(3))
    solution = ConjugateGradient(tolerance=1e-8).solve(Damped(part, 0.05), g, generator=generator())
    exact = torch.linalg.solve(part.matrix + 0.05 * torch.eye(20, dtype=DOUBLE), g["x"])
    torch.testing.assert_close(solution.value["x"], exact, rtol=1e-6, atol=1e-7)
    assert solution.certificate.operator_terms == 30
    assert solution.num_term_products == 30 * solution.num_products


def test_the_caller_can_watch_and_stop() -> None:
    problem = Problem(SPECTRA["geometric"], q=2, damping=0.001)
    seen = []

    def watch(state: CGState) -> bool:
        seen.append((state.iteration, state.upper.max().item(), state.residual.max().item()))
        return state.iteration == 4

    solution = ConjugateGradient(tolerance=1e-8).solve(
        problem.system, problem.g, generator=generator(), on_step=watch
    )
    assert [number for number, _, _ in seen] == [1, 2, 3, 4]
    assert solution.num_products == 5
    assert "Stopped by the caller" in solution.stats.events[0]
    assert not bool(solution.converged.any())


@pytest.mark.parametrize("preconditioned", [False, True], ids=["plain", "preconditioned"])
def test_a_saved_state_goes_on_to_the_same_bits(preconditioned: bool) -> None:
    values = SPECTRA["geometric"]
    problem = Problem(values, q=3, damping=0.001, dtype=torch.float32)
    P = top_eigenvectors(problem, values) if preconditioned else None
    solver = ConjugateGradient(tolerance=1e-4, preconditioner=P, largest=1.0)
    saved: dict[int, CGState] = {}

    def save(state: CGState) -> None:
        saved[state.iteration] = copy.deepcopy(state)

    whole = solver.solve(problem.system, problem.g, generator=generator(), on_step=save)
    assert len(saved) >= 6
    for iteration in (1, 4):
        again = solver.solve(problem.system, problem.g, generator=generator(), state=saved[iteration])
        assert torch.equal(again.value["x"], whole.value["x"])
        assert torch.equal(again.certificate.upper, whole.certificate.upper)
        assert torch.equal(again.certificate.lower, whole.certificate.lower)
        assert torch.equal(again.stats.paths, whole.stats.paths)
        assert again.num_products == whole.num_products
    state = solver.begin(problem.system, problem.g, generator=generator())
    while not solver.done(state):
        solver.step(problem.system, problem.g, state)
    assert torch.equal(solver.finish(problem.system, problem.g, state).value["x"], whole.value["x"])


# --- a network -------------------------------------------------------------------------------------------------


def test_scores_of_real_images_are_as_right_as_promised() -> None:
    """Digits, a small network, float32 products: the exact error is within the bounds, the scores' within the rule."""
    train, test = digits.load()
    x, y = train.tensors[0][:200], train.tensors[1][:200]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    gnh = GaussNewton(model, Classification(), TensorDataset(x, y))
    hessian = digits.exact_hessian(model, x)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    damping = float(eigenvalues[-1]) / 200
    queries = gnh.gradients([test[i] for i in range(5)])
    matrix = hessian + damping * torch.eye(len(hessian), dtype=DOUBLE)
    exact = torch.linalg.solve(matrix, digits.flatten(queries).T).T
    solver = ConjugateGradient(tolerance=0.1, largest=1.01 * float(eigenvalues[-1]))
    solution = solver.solve(Damped(gnh, damping), queries, generator=generator())
    error = digits.flatten(solution.value) - exact
    energy = ((error @ matrix) * error).sum(1).sqrt()
    assert bool(solution.converged.all())
    assert bool((solution.certificate.lower <= energy).all())
    assert bool((energy <= solution.certificate.upper).all())
    assert bool((solution.certificate.upper <= 3 * solution.certificate.lower).all())
    of_scores = ((error @ hessian) * error).sum(1).sqrt()  # root mean square over labels that the model draws
    assert bool((of_scores <= 0.1 * ((exact @ hessian) * exact).sum(1).sqrt()).all())
    assert solution.num_products <= 15


# --- bad options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": math.nan}, "tolerance is nan"),
        ({"max_iterations": 0}, "max_iterations is 0"),
        ({"largest": -1.0}, "largest is -1.0"),
        ({"largest": math.inf}, "largest is inf"),
        ({"preconditioner": 3.0}, "preconditioner is 3.0; it must be a Preconditioner"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ConjugateGradient(**options)


def test_what_does_not_fit_is_named_before_any_product() -> None:
    values = SPECTRA["geometric"]
    problem, other = Problem(values, q=2, damping=0.01), Problem(values, q=2, damping=0.02)
    with pytest.raises(OptionError, match="wrap the operator"):
        ConjugateGradient().solve(problem.operator, problem.g, generator=generator())
    with pytest.raises(OptionError, match=r"made for 0\.02"):
        problem.solve(preconditioner=top_eigenvectors(other, values))
    with pytest.raises(OptionError, match=r"smallest is 0\.0"):
        problem.solve(preconditioner=top_eigenvectors(problem, values, smallest=0.0))
    with pytest.raises(VectorError, match="with the start"):
        problem.solve(start=problem.g.column(0))
    with pytest.raises(VectorError, match="start holds NaN"):
        problem.solve(start=problem.g.clone().scale_(math.nan))
    with pytest.raises(VectorError, match="right-hand side holds NaN"):
        ConjugateGradient().solve(problem.system, problem.g.clone().scale_(math.nan), generator=generator())
