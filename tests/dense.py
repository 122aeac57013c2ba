"""Dense float64 references, written from the definitions and sharing no code with the library's products."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from scipy.linalg.blas import dsyrk
from torch import Tensor
from torch.func import functional_call

from whence import Dense, GaussNewton, ParamVector


def widen(vector: ParamVector) -> ParamVector:
    return ParamVector({n: t.double().clone() for n, t in vector.items()}, columns=vector.columns)


def relative_error(actual: ParamVector, expected: ParamVector) -> float:
    difference = widen(actual).axpy_(-1.0, widen(expected))
    return float((difference.norm() / widen(expected).norm()).max())


def gram(blocks: Iterable[Tensor]) -> Tensor:
    """``Σ RᵀR`` over blocks R of rows in float64. Half of it is computed: it is symmetric."""
    total: Tensor | None = None
    for rows in blocks:
        if total is None:
            total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
        dsyrk(1.0, rows.numpy().T, 1.0, total.numpy().T, overwrite_c=True)  # in place: what numpy shares
    assert total is not None
    return total.tril() + total.tril(-1).T


def jacobian(gnh: GaussNewton, example: object) -> tuple[Tensor, Tensor, object]:
    """``∂h/∂θ`` of one example by backward passes, its outputs, and its batch."""
    task, model = gnh.task, gnh.network.model
    batch = task.collate([example])
    leaves = {name: p.detach().clone().requires_grad_() for name, p in gnh.network.parameters.items()}

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self) -> Tensor:
            return task.outputs(self.inner, batch)

    wrapped = Wrapped()
    wrapped.training = False
    outputs = functional_call(wrapped, {f"inner.{n}": t for n, t in leaves.items()}, ())
    flat = outputs.reshape(-1)
    grads = torch.autograd.grad(
        flat, list(leaves.values()), torch.eye(len(flat), dtype=flat.dtype), is_grads_batched=True, allow_unused=True
    )  # fmt: skip
    rows = [
        torch.zeros(len(flat), leaf.numel(), dtype=leaf.dtype) if g is None else g.flatten(1)
        for g, leaf in zip(grads, leaves.values(), strict=True)
    ]
    return torch.cat(rows, dim=1), outputs.detach(), batch


def softmax_hessian(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return torch.diag(p) - torch.outer(p, p)


def dense_gauss_newton(gnh: GaussNewton) -> Dense:
    """``(1/N) Σ J S Jᵀ`` for cross-entropy tasks, one example at a time, as in the paper's equation."""
    total, terms = None, 0
    for example in gnh.terms.data:
        rows, outputs, batch = jacobian(gnh, example)
        logits = outputs.reshape(-1, outputs.shape[-1]).to(rows.dtype)
        targets = batch.targets.reshape(-1)
        rows = rows.reshape(*logits.shape, -1)
        for position in range(len(logits)):
            if targets[position] == -100:
                continue
            J = rows[position]  # [K, N]
            part = J.T @ softmax_hessian(logits[position]) @ J
            total = part if total is None else total + part
            terms += 1
    return Dense(total / terms, gnh.zeros())


def per_example_matrices(gnh: GaussNewton) -> Tensor:
    """``Σ_{i in s} J_i S_i J_iᵀ`` for every example s, unnormalised."""
    matrices = []
    for example in gnh.terms.data:
        rows, outputs, batch = jacobian(gnh, example)
        logits = outputs.reshape(-1, outputs.shape[-1])
        rows = rows.reshape(*logits.shape, -1)
        kept = (batch.targets.reshape(-1) != -100).nonzero().flatten().tolist()
        matrices.append(sum(rows[i].T @ softmax_hessian(logits[i]) @ rows[i] for i in kept))
    return torch.stack(matrices)
