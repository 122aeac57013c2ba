"""A problem small enough for dense algebra, to check what peers' scores mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap
from torch.nn import functional as F

from benchmarks.works import mlp

__all__ = [
    "agree",
    "dense_ekfac",
    "dense_hessian",
    "dense_trak",
    "difference",
    "dot_products",
    "language_model",
    "linear",
    "network",
    "picture_network",
]

#: Of training examples and queries.
TRAIN, QUERIES = 40, 5


def network(*, bias: bool = True) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A small network with a tanh layer, its training data and queries; three classes."""
    torch.manual_seed(0)
    model = mlp(3, 4, 3, activation=nn.Tanh).eval()
    if not bias:
        for layer in model.modules():
            layer.register_parameter("bias", None) if isinstance(layer, nn.Linear) else None
    return model, _labelled(torch.randn(TRAIN, 3)), _labelled(torch.randn(QUERIES, 3))


def linear() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A linear classifier, whose Hessian is positive semidefinite wherever it is; three classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3)).eval(), *(_labelled(torch.randn(n, 3)) for n in (TRAIN, QUERIES))


def picture_network() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A convolution and a linear layer, their training data and queries; three classes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    ).eval()
    return model, _labelled(torch.randn(TRAIN, 1, 6, 6)), _labelled(torch.randn(QUERIES, 1, 6, 6))


def language_model() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A Llama of two layers, rows of tokens to train on and to ask about."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=6, tie_word_embeddings=True, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.eval(), [torch.randint(11, (TRAIN, 6))], [torch.randint(11, (QUERIES, 6))]


def _labelled(x: Tensor) -> list[Tensor]:
    return [x, x.flatten(1)[:, :3].argmax(1)]


def dot_products(
    model: nn.Module, train: list[Tensor], queries: list[Tensor], *, last: bool = False
) -> Tensor:
    """Of the gradients of queries' and examples' losses, ``[queries, train]``: positive where the example helps.

    Of all parameters, or of the weights of the last layer.
    """
    weight, bias = (parameter.numel() for parameter in list(model.parameters())[-2:])
    part = slice(-weight - bias, -bias) if last else slice(None)
    return _gradients(model, queries)[:, part] @ _gradients(model, train)[:, part].T


def dense_hessian(model: nn.Module, train: list[Tensor], queries: list[Tensor], damping: float) -> Tensor:
    """Scores with the Hessian of the mean loss of the training data."""
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        values = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return F.cross_entropy(functional_call(model, values, train[0]), train[1])

    curvature = hessian(loss)(torch.cat([p.detach().flatten() for p in parameters.values()])).double()
    damped = curvature + damping * torch.eye(len(curvature), dtype=torch.float64)
    solved = torch.linalg.solve(damped, _gradients(model, queries).T)
    return solved.T @ _gradients(model, train).T


def dense_trak(model: nn.Module, train: list[Tensor], queries: list[Tensor], damping: float) -> Tensor:
    """TRAK of one model without projection, by gradients of the right label's log-odds."""

    def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
        right = F.cross_entropy(logits, labels, reduction="none").neg().exp()
        return (right / (1 - right)).log().sum()

    rows, query_rows = _gradients(model, train, log_odds), _gradients(model, queries, log_odds)
    damped = rows.T @ rows + damping * torch.eye(rows.shape[1], dtype=torch.float64)
    with torch.no_grad():
        wrong = 1 - F.cross_entropy(model(train[0]), train[1], reduction="none").double().neg().exp()
    return query_rows @ torch.linalg.solve(damped, rows.T) * wrong


def dense_ekfac(model: nn.Module, train: list[Tensor], queries: list[Tensor], damping: float) -> Tensor:
    """Scores with EK-FAC of the empirical Fisher of linear layers, each layer's basis written out.

    Of a language model, the layers of its body; the head is left out.
    """
    total = torch.zeros(len(queries[0]), len(train[0]), dtype=torch.float64)
    body = getattr(model, "base_model", model)
    for layer in (module for module in body.modules() if isinstance(module, nn.Linear)):
        (a, g), (query_a, query_g) = _layer(model, layer, train), _layer(model, layer, queries)
        covariances = [torch.einsum("nti,ntj->ij", side, side) for side in (g, a)]
        basis = torch.kron(*(torch.linalg.eigh(each)[1] for each in covariances))
        rows = torch.einsum("nto,nti->noi", g, a).flatten(1) @ basis
        query_rows = torch.einsum("nto,nti->noi", query_g, query_a).flatten(1) @ basis
        total += query_rows / (rows.square().mean(0) + damping) @ rows.T
    return total


def _layer(model: nn.Module, layer: nn.Linear, data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A layer's inputs, with a one for the bias, and the gradients of its outputs: ``[examples, tokens, width]``."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        seen.extend((inputs[0], outputs))

    handle = layer.register_forward_hook(hook)
    loss = _summed_loss(model, data)
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, seen[1])
    inputs, gradient = seen[0].detach().double(), gradient.double()
    if layer.bias is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
    if inputs.dim() == 2:
        return inputs.unsqueeze(1), gradient.unsqueeze(1)
    return inputs[:, :-1], gradient[:, :-1]  # the last token predicts nothing


def _summed_loss(model: nn.Module, data: list[Tensor]) -> Tensor:
    if len(data) == 2:
        return F.cross_entropy(model(data[0]), data[1], reduction="sum")
    logits = model(input_ids=data[0], use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), data[0][:, 1:].flatten(), reduction="sum")


def _gradients(
    model: nn.Module, data: list[Tensor], measured: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
) -> Tensor:
    """Of each example's loss, or of something else ``measured``: ``[examples, parameters]``."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return measured(functional_call(model, values, x.unsqueeze(0)), y.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *data)
    return torch.cat([part.flatten(1) for part in gradients.values()], 1).double()


def difference(found: Tensor, expected: Tensor) -> float:
    """Of two matrices of scores, relative to the expected."""
    return float((found.double() - expected).norm() / expected.norm())


def agree(what: str, found: Tensor, expected: Tensor, *, tolerance: float = 1e-3) -> None:
    """Print the relative difference of two matrices of scores; end the program where it is too large."""
    off = difference(found, expected)
    print(f"{what}: relative difference {off:.1e}")
    if not off < tolerance:
        raise SystemExit(f"{what}: the scores are not what they should be")
