"""What the tests of several processes run on each of them: ``torchrun … tests/on_ranks.py OUT NAME …``.

Every case returns numbers that do not depend on how many processes there are. The first process saves them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import whence
from whence import Classification, GaussNewton, LanguageModeling, ParamVector, Regression
from whence.attribution.strain import measure_strain
from whence.distributed import current, launched, shard
from whence.errors import DataError, WhenceError
from whence.model.importance import measure_importance
from whence.model.second_moment import root_second_moment
from whence.preconditioners import nystrom, sums
from whence.preconditioners.ekfac import ekfac
from whence.scoring import Scorer

#: The module, which the function has the name of.
ekfac_module = importlib.import_module("whence.preconditioners.ekfac")
DOUBLE = torch.float64
Found = dict[str, Any]


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Scaled(nn.Module):
    """A layer with a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def mlp(dtype: torch.dtype = DOUBLE) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(6, 9),
        nn.Tanh(),
        Scaled(),
        nn.LayerNorm(9),
        nn.Linear(9, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    ]
    return nn.Sequential(*layers).to(dtype).eval()


def plain(dtype: torch.dtype = DOUBLE) -> nn.Module:
    """One without parameters that ``fully_shard`` refuses."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype).eval()


def labelled(dtype: torch.dtype = DOUBLE, count: int = 37) -> list[Any]:
    g = random(1)
    return [
        (torch.randn(6, generator=g, dtype=dtype), int(torch.randint(3, (), generator=g)))
        for _ in range(count)
    ]


def operator(**options: Any) -> GaussNewton:
    return GaussNewton(mlp(), Classification(), labelled(), **options)


def attributed(model: nn.Module, train: Any, *, task: Any = None, queries: int = 3, **options: Any) -> Found:
    result = whence.attribute(model, train, train[:queries], task=task or Classification(), **options)
    return {"scores": result.scores, "stderr": result.stderr, "losses": result.query_losses}


def tokens(count: int = 9) -> list[dict[str, Tensor]]:
    g = random(3)
    rows = [
        torch.randint(1, 40, (int(torch.randint(4, 12, (), generator=g)),), generator=g) for _ in range(count)
    ]
    return [{"input_ids": row, "labels": row} for row in rows]


def llama(dtype: torch.dtype = DOUBLE) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype).eval()


def lora(dtype: torch.dtype = DOUBLE) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        llama(dtype), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=random(4))
    return model.eval()


def on_vectors() -> Found:
    H = operator()
    g = random()
    a, b = H.zeros(4).randn_like(g), H.zeros(4).rademacher_like(g)
    mixed = a.mix(torch.eye(4, dtype=DOUBLE)[:, :2] * 2).axpy_(
        torch.tensor([1.0, -2.0]).double(), b.part(0, 2)
    )
    return {
        "dot": a.dot(b),
        "gram": a.gram(b, exact=True),
        "norm": mixed.norm(),
        "whole": dict(mixed.whole()),
        "one": H.zeros().randn_like(g).whole()["2.scale"],
        "numel": H.zeros().numel,
        "nbytes": a.nbytes,
        "finite": [a.is_finite(), a.clone().scale_(float("inf")).is_finite()],
        "parted": dict(a.whole().parted(a.shards).whole()),
    }


def on_products() -> Found:
    found: Found = {}
    for product in ("exact", "finite-difference"):
        H, g = operator(product=product), random()
        v = H.zeros(2).randn_like(g)
        product_, slopes = H.matvec_with_slopes(v)
        half = H.over(torch.arange(5))  # fewer examples than some have processes
        out = v.clone()
        H.sample(20, g).add_matvec_(out, out, -0.1)
        found[product] = {
            "matvec": dict(product_.whole()),
            "slopes": slopes,
            "of few": dict(half.matvec_with_slopes(v.column(0))[0].whole()),
            "of one": dict(H.over(torch.tensor([3])).matvec(v).whole()),
            "sampled": dict(out.whole()),
            "form": H.quadratic_form(v),
            "drawn": dict(H.sample_factor(20, g).whole()),
            "gradient": dict(H.training_gradient(torch.arange(11)).whole()),
            "queries": dict(H.gradients(labelled()[:5]).whole()),
            "heaviest": H.subset(10, g).heaviest_term(v.column(1)),
            "importance": measure_importance(H).curvature,
            "metric": dict(root_second_moment(H, generator=g).whole()),
        }
    return found


def on_preconditioners() -> Found:
    H, g = operator(), random()
    rhs = H.gradients(labelled()[:3])
    drawn = ekfac(H, 0.1, generator=g)
    every = ekfac(H, 0.1, generator=g, curvature="exact")
    low = nystrom(H, 0.1, rank=6, generator=g)
    solved = whence.ConjugateGradient(preconditioner=drawn).solve(whence.Damped(H, 0.1), rhs, generator=g)
    real = GaussNewton(
        mlp(), Regression(), [(x, torch.randn(3, generator=g, dtype=DOUBLE)) for x, _ in labelled()]
    )
    return {
        "drawn": dict(drawn.solve(rhs).whole()),
        "exact": dict(every.solve(rhs).whole()),
        "low rank": dict(low.solve(rhs).whole()),
        "solution": dict(solved.value.whole()),
        "of regression": dict(ekfac(real, 0.1, generator=g).solve(rhs).whole()),
        "drawn of regression": dict(real.sample_factor(20, g).whole()),
    }


def on_spectrum() -> Found:
    H = operator()
    spectrum = whence.estimate_spectrum(H, generator=random(), terms=37)
    sketched = whence.sketch(H, dimension=8, seed=1, variant="concatenated")
    return {
        "trace": spectrum.trace.value,
        "frobenius": spectrum.frobenius.value,
        "top": spectrum.lambda_max.value,
        "sketch": sketched.eigenvalues[:4],  # of a zero, no vector is known
    }


def on_scores() -> Found:
    H = operator()
    u = H.gradients(labelled()[:2])
    ways = {}
    for method in ("directional", "layers", "gradients"):
        scorer = Scorer(H, u, method=method, norms=True)  # type: ignore[arg-type]
        ways[method] = scorer.score_with_norms(torch.arange(30))
        ways[f"{method}, one"] = scorer.score_with_norms(torch.tensor([7]))
    inexact = Scorer(operator(product="finite-difference"), u, method="directional")
    return ways | {
        "differences": inexact.score(torch.arange(37)),
        "terms": inexact.term_shares(torch.tensor([2, 0])),
    }


def refused() -> Found:
    """What every process is told is refused."""
    H = operator()
    whole = {name: torch.zeros_like(p) for name, p in H.network.parameters.items()}

    def other() -> None:
        torch.manual_seed(int(os.environ["RANK"]))
        GaussNewton(nn.Linear(6, 3).double().eval(), Classification(), labelled())

    tries: dict[str, Callable[[], Any]] = {
        "a vector that is whole": lambda: H.matvec(ParamVector(whole)),
        "other weights": other,
        "other options": lambda: attributed(mlp(), labelled(), seed=int(os.environ["RANK"])),
        "clean": lambda: whence.clean(mlp(), labelled(), task=Classification()),
        "validate": lambda: whence.validate(
            mlp(),
            labelled(),
            labelled()[:1],
            whence.Attribution.__new__(whence.Attribution),  # which is not looked into
            task=Classification(),
        ),
        "an example that is not finite": lambda: attributed(
            mlp(), [*labelled(), (torch.full((6,), float("nan"), dtype=DOUBLE), 0)]
        ),
    }
    tries |= {
        "in bfloat16": lambda: GaussNewton(shard(plain(torch.bfloat16)), Classification(), labelled()),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except WhenceError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found | {"told": [told_of(error) for error in (DataError("no"), KeyError("no"))]}


def told_of(error: Exception) -> list[str]:
    """What every process raises where the first does."""

    def fail() -> None:
        raise error

    said: list[Any] = [None] * current().size
    try:
        current().told(fail)
    except Exception as raised:
        torch.distributed.all_gather_object(said, f"{type(raised).__name__}: {raised}")
    return said


def sharded(model: nn.Module) -> nn.Module:
    """Over the processes, where there are several: finite differences, in either case."""
    return shard(model) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else model


def on_a_sharded_model(product: Any, model: nn.Module, data: Any, task: Any) -> Found:
    model = sharded(model)
    H = GaussNewton(model, task, data, product=product, micro_batch=16)
    v = H.zeros(2).randn_like(random())
    kept = [p.detach().clone() for p in model.parameters()]
    product_, slopes = H.matvec_with_slopes(v)
    scorer = Scorer(H, v, method="gradients", norms=True)
    along = Scorer(H, v, method="directional", norms=True)
    few = H.over(torch.tensor([1, 3]))
    out = v.clone()
    count = min(20, H.num_terms)
    H.sample(count, random()).add_matvec_(out, out, -0.1)
    return {
        "scores": scorer.score_with_norms(torch.arange(7)),
        "scores along": along.score_with_norms(torch.arange(7)),
        "strain": measure_strain(H, 0.1, generator=random()),
        "matvec": dict(product_.whole()),
        "of one": dict(H.matvec(v.column(1)).whole()),
        "of few": few.matvec_with_slopes(v)[1],
        "sampled": dict(out.whole()),
        "form": H.quadratic_form(v),
        "slopes": slopes,
        "queries": dict(H.gradients(data[:3]).whole()),
        "gradient": dict(H.training_gradient(torch.arange(7)).whole()),
        "drawn": dict(H.sample_factor(count, random()).whole()),
        "untouched": [bool((a == b).all()) for a, b in zip(kept, model.parameters(), strict=True)],
        "no gradients left": [p.grad is None for p in model.parameters()],
    }


class Mixed(nn.Module):
    """Layers of many kinds: an embedding, convolutions, a norm, a layer that GPT-2 keeps the other way round."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.words = nn.Embedding(11, 5, padding_idx=0)
        self.blocks = nn.ModuleList(
            [nn.Conv1d(5, 6, 3, padding=1), nn.Linear(6, 7), nn.LayerNorm(7), Conv1D(3, 7)]
        )
        self.stack = nn.Parameter(torch.randn(2, 3, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        convolve, linear, norm, last = self.blocks
        x = torch.tanh(convolve(self.words(x).mT).mT)
        x = last(norm(torch.tanh(linear(x)))).mean(1)
        return torch.tanh(torch.einsum("ni,kij->nj", x, self.stack)) + self.bias


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed().double().eval()


def spelled(count: int = 13) -> list[Any]:
    g = random(5)
    return [
        (torch.randint(11, (6,), generator=g), int(torch.randint(3, (), generator=g))) for _ in range(count)
    ]


def sharded_factors(model: nn.Module, data: Any, task: Any, *curvatures: Any) -> Found:
    """EK-FAC of a sharded model, with and without a metric, and scores by layers."""
    H = GaussNewton(sharded(model), task, data, product="finite-difference", micro_batch=6)
    found: Found = {"missing": sorted(H.example_gradients().missing)}
    rhs = H.gradients(data[:2])
    ones = H.zeros().randn_like(random()).power(2).axpy_(1.0, H.zeros().power(0))
    for name, operator_ in (("plain", H), ("in a metric", H.in_metric(ones))):
        for curvature in curvatures or ("exact", "sampled"):
            P = ekfac(operator_, 0.1, generator=random(), curvature=curvature)
            found[f"{name}, {curvature}"] = {
                "solve": dict(P.solve(rhs).whole()),
                "root": dict(P.root_solve(rhs.column(0)).whole()),
                "numbers": [P.trace, P.largest, P.frobenius],
            }
    if not found["missing"]:
        for norms in (False, True):
            scorer = Scorer(H, rhs, method="layers", norms=norms)
            found[f"layers, {norms}"] = [scorer.score(torch.arange(5)), scorer.score(torch.tensor([3]))]
        found["norms"] = scorer.score_with_norms(torch.arange(7))
    return found


def parted_factors() -> Found:
    """The same where nothing is small enough to be whole."""
    with mock.patch.object(sums, "TOGETHER", 0), mock.patch.object(ekfac_module, "TOGETHER", 0):
        return sharded_factors(plain(), labelled(), Classification(), "exact")


def sharded_attribution(solver: str, **options: Any) -> Found:
    settings: dict[str, Any] = {"product": "finite-difference", "micro_batch": 16, "method": "directional"}
    return attributed(sharded(plain()), labelled(), solver=solver, **settings, **options)


CASES: dict[str, Callable[[], Found]] = {
    "vectors": on_vectors,
    "products": on_products,
    "preconditioners": on_preconditioners,
    "spectrum": on_spectrum,
    "scores": on_scores,
    "attribute": lambda: attributed(mlp(), labelled()),
    "quick": lambda: attributed(mlp(), labelled(), accuracy="quick"),
    "lissa": lambda: attributed(mlp(), labelled(), solver="lissa", damping=0.5),
    "float32": lambda: attributed(mlp(torch.float32), labelled(torch.float32)),
    "llama": lambda: attributed(llama(), tokens(), task=LanguageModeling(), queries=2),
    "llama, quick": lambda: attributed(
        llama(), tokens(), task=LanguageModeling(), queries=2, accuracy="quick"
    ),
    "lora": lambda: attributed(lora(), tokens(), task=LanguageModeling(), queries=2),
    "sharded": lambda: on_a_sharded_model("finite-difference", plain(), labelled(), Classification()),
    "sharded, exact": lambda: on_a_sharded_model("exact", plain(), labelled(), Classification()),
    "sharded, exact, mixed": lambda: on_a_sharded_model("exact", mixed(), spelled(), Classification()),
    "sharded, exact, lora": lambda: on_a_sharded_model("exact", lora(), tokens(), LanguageModeling()),
    "sharded, float32": lambda: attributed(sharded(plain(torch.float32)), labelled(torch.float32)),
    "sharded factors": lambda: sharded_factors(plain(), labelled(), Classification()),
    "sharded factors, parted": parted_factors,
    "sharded factors, mixed": lambda: sharded_factors(mixed(), spelled(), Classification()),
    "sharded factors, llama": lambda: sharded_factors(llama(), tokens(7), LanguageModeling(), "sampled"),
    "sharded quick": lambda: attributed(
        sharded(plain()), labelled(), accuracy="quick", product="finite-difference"
    ),
    "sharded cg": lambda: sharded_attribution("cg"),
    "sharded lissa": lambda: sharded_attribution("lissa", damping=0.5),
    "refused": refused,
}


def in_directory(path: str, solver: str) -> Found:
    """With a run directory; ``checkpoint_seconds=0`` writes the solve down after every step."""
    return attributed(mlp(), labelled(), run_dir=path, solver=solver, damping=0.5, checkpoint_seconds=1e-9)


def main() -> None:
    torch.set_num_threads(1)
    out, names = sys.argv[1], sys.argv[2:]
    with launched() as ranks:
        found = {}
        for name in names:
            solver, _, path = name.partition("@")  # cg@directory
            found[name] = in_directory(path, solver) if path else CASES[name]()
        if ranks.rank == 0:
            torch.save(found, Path(out))


if __name__ == "__main__":
    main()
