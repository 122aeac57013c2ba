"""The digits problem: real images, 5% of labels flipped, an MLP trained here, dense truth in float64."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dense import gram, widen
from whence import Classification, GaussNewton, ParamVector, Plan, estimate_spectrum

TRAIN = 1400


@dataclass
class Digits:
    model: nn.Module
    train: TensorDataset
    gnh: GaussNewton
    queries: ParamVector  # gradients of 20 test losses
    hessian: Tensor  # dense, float64
    flat_queries: Tensor  # [20, N] float64
    flat_train: Tensor  # [1400, N] float64: per-example training gradients
    known_scores: dict[float, Tensor] = field(default_factory=dict)  # damping -> exact scores

    @functools.cached_property
    def lambda_max(self) -> float:
        from scipy.sparse.linalg import eigsh

        return float(eigsh(self.hessian.numpy(), k=1, return_eigenvectors=False, tol=1e-10)[0])

    def exact_scores(self, damping: float) -> Tensor:
        if damping not in self.known_scores:
            self.known_scores[damping] = self.solve(damping, self.flat_queries) @ self.flat_train.T
        return self.known_scores[damping]

    def solve(self, damping: float, rows: Tensor) -> Tensor:
        """``(H + λ)⁻¹`` times each row, by Cholesky's factorisation in float64."""
        system = self.hessian + damping * torch.eye(len(self.hessian), dtype=torch.float64)
        return torch.cholesky_solve(rows.T, torch.linalg.cholesky(system)).T

    def train_block(self) -> ParamVector:
        return unflatten(self.flat_train.float(), self.gnh)


def unflatten(rows: Tensor, gnh: GaussNewton) -> ParamVector:
    space = gnh.zeros()
    pieces = rows.split([space[n].numel() for n in space], dim=1)
    return ParamVector(
        {n: p.reshape(len(rows), *space[n].shape) for n, p in zip(space, pieces, strict=True)},
        columns=len(rows),
    )


def flatten(block: ParamVector) -> Tensor:
    return torch.cat([t.flatten(1) for t in widen(block).values()], dim=1)


def load(flip: float = 0.05) -> tuple[TensorDataset, TensorDataset]:
    """Train (some labels flipped) and test set."""
    bunch = load_digits()
    x = torch.tensor(bunch.data, dtype=torch.float32) / 16
    y = torch.tensor(bunch.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    wrong = torch.rand(TRAIN, generator=generator) < flip
    y[:TRAIN][wrong] = (
        y[:TRAIN][wrong] + torch.randint(1, 10, (int(wrong.sum()),), generator=generator)
    ) % 10
    return TensorDataset(x[:TRAIN], y[:TRAIN]), TensorDataset(x[TRAIN:], y[TRAIN:])


def train_mlp(data: TensorDataset, epochs: int = 30) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    x, y = data.tensors
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model.eval()


def exact_hessian(model: nn.Module, x: Tensor) -> Tensor:
    """``(1/n) Σ J S Jᵀ`` through per-example Jacobians in float64."""
    model = copy.deepcopy(model).double()
    params = {n: p.detach() for n, p in model.named_parameters()}

    def outputs(p: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (row.unsqueeze(0),)).squeeze(0)

    def roots(rows: Tensor) -> Tensor:
        jac = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 0))(params, rows)
        flat = torch.cat([j.flatten(2) for j in jac.values()], dim=2)  # [n, K, N]
        p = torch.func.vmap(lambda r: outputs(params, r).softmax(-1))(rows)
        root = p.sqrt().unsqueeze(2) * (flat - (p.unsqueeze(1) @ flat))  # S = R Rᵀ, R = (I - 1pᵀ)ᵀ√p
        return root.flatten(0, 1)

    return gram(roots(rows) for rows in x.double().split(100)) / len(x)


@functools.cache
def problem() -> Digits:
    train, test = load()
    model = train_mlp(train)
    gnh = GaussNewton(model, Classification(), train)
    queries = gnh.gradients([test[i] for i in range(20)])
    wide_train = TensorDataset(train.tensors[0].double(), train.tensors[1])
    wide = GaussNewton(copy.deepcopy(model).double(), Classification(), wide_train)
    gradients = flatten(wide.gradients(wide.terms.data))
    return Digits(
        model, train, gnh, queries, exact_hessian(model, train.tensors[0]), flatten(queries), gradients
    )


def correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


@dataclass
class Images:
    gnh: GaussNewton
    queries: ParamVector
    train: ParamVector
    damping: float
    exact: Tensor
    plan: Plan


@functools.cache
def images(kappa: float) -> Images:
    """Softmax regression on the digits, some labels wrong; exact scores from its dense Hessian."""
    train, test = load()
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train.tensors[0]), train.tensors[1]).backward()
        optimizer.step()
    gnh = GaussNewton(model.eval(), Classification(), train)
    queries = gnh.gradients([test[i] for i in range(6)])
    gradients = flatten(gnh.gradients(train))
    H = exact_hessian(model, train.tensors[0])
    damping = float(torch.linalg.eigvalsh(H)[-1]) / kappa
    inverse = torch.linalg.solve(H + damping * torch.eye(len(H), dtype=torch.float64), gradients.T)
    spectrum = estimate_spectrum(gnh, generator=torch.Generator().manual_seed(0), probes=100)
    plan = Plan.from_spectrum(spectrum, damping, C=spectrum.safe_constant)
    block = unflatten(gradients.float(), gnh)
    return Images(gnh, queries, block, damping, flatten(queries) @ inverse, plan)
