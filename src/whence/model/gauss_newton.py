"""`GaussNewton`: the Gauss-Newton Hessian of any PyTorch model, as a linear operator.

    H = (1/N) Σ_i J_i S_i J_iᵀ,      J_i = ∂h_i/∂θ,   S_i = ∇²ℓ_i(h_i),   N terms

A product ``H u`` is a forward sweep ``t = J u``, the task's ``S t``, and a backward sweep ``Jᵀ(S t)``, one
micro-batch at a time; memory does not grow with the number of terms. Nothing of the size of the Jacobian, of
``S``, or of a batch of gradients is ever built.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from whence.arguments import checked
from whence.distributed import current
from whence.errors import DataError, OptionError
from whence.model.choice import Product, choose_product
from whence.model.data import TermSet
from whence.model.exact import block_tangents, dual_forward, tangent_only
from whence.model.finite_difference import FiniteDifferences, StepMemory
from whence.model.fully_sharded import make_network
from whence.model.inspection import (
    check_alike,
    check_convexity,
    check_determinism,
    check_finite,
    check_independence,
    check_mode,
    check_outputs,
    fitting_micro_batch,
)
from whence.model.layers import ExampleGradients
from whence.model.network import Receiver, adding_to
from whence.model.sampled import SampledGaussNewton
from whence.model.selection import ParameterFilter, select_parameters
from whence.model.slopes import Slopes
from whence.operators import LinearOperator
from whence.tasks import Batch, Questions, Task
from whence.threads import one_at_a_time
from whence.vectors import ParamVector

__all__ = ["GaussNewton", "SampledGaussNewton"]

#: Activations kept for the backward pass, and tangents of a block, may take about this much memory each.
ACTIVATION_BUDGET = 512 * 2**20
_EXAMPLES_CHECKED = 512
_CURVATURES_CHECKED = 64
#: More columns than this go over fewer examples at once.
_WIDE = 8


class GaussNewton(LinearOperator):
    """The Gauss-Newton Hessian ``H`` of a model's loss over a data set.

    Construction runs the model on a few examples and refuses, with the reason, what could not work: training
    mode, random outputs, NaN losses, labels out of range, outputs the task cannot read.

    Args:
        model: any module in evaluation mode; it is not modified.
        task: what its outputs mean.
        data: a map-style data set of ``(x, y)`` or dicts (``input_ids``, ``attention_mask``, ``labels``).
        params: which parameters: a predicate on names or glob patterns; all trainable ones by default.
        product: ``"exact"`` (dual numbers), ``"finite-difference"`` (forwards only), or ``"auto"``: exact
            where the model supports forward-mode differentiation, found out by trying. `product` and
            `product_reason` say which it is and why. Either is compared with the backward pass on the
            longest examples, and refused where they disagree.
        micro_batch: examples per pass; by default as many as keep activations near half a gibibyte.
        metric: the diagonal of D, where damping is to be λD: vectors are then in the coordinates ``D^(1/2)u``, in which
            ``H + λ`` stands for ``H + λD``; see `whence.model.network`.

    Example:
        >>> model = nn.Linear(2, 3).eval()
        >>> data = [(torch.tensor([1.0, 2.0]), 0), (torch.tensor([0.0, 1.0]), 2)]
        >>> from whence.tasks import Classification
        >>> H = GaussNewton(model, Classification(), data)
        >>> H.matvec(H.zeros())["weight"].shape
        torch.Size([3, 2])
        >>> H.product
        'exact'
    """

    @one_at_a_time
    @checked("model", "task", "params", "product")
    def __init__(
        self,
        model: nn.Module,
        task: Task,
        data: Any,
        *,
        params: ParameterFilter | None = None,
        product: Product = "auto",
        micro_batch: int | None = None,
        metric: ParamVector | None = None,
    ) -> None:
        if product not in ("auto", "exact", "finite-difference"):
            raise OptionError(f"product is {product!r}; it must be 'auto', 'exact' or 'finite-difference'")
        if micro_batch is not None and micro_batch < 1:
            raise OptionError(f"micro_batch is {micro_batch}; it must be at least 1")
        if not isinstance(task, Task):
            raise OptionError(f"task must be a Task such as Classification(), got {task!r}")
        check_mode(model)
        ranks = current()
        self.network = make_network(model, task, select_parameters(model, params), metric, ranks)
        self.task = task
        self.terms = TermSet(data, task, self.network.device)
        check_alike(self.network, self.terms)
        pilot = self.terms.fetch(self.terms.longest(2))
        self.terms.expect(check_outputs(self.network, pilot))
        self.terms.look_through(_EXAMPLES_CHECKED)
        self.terms.check_repeatable()
        check_determinism(self.network, pilot)
        if not task.known_convex:
            check_convexity(self.network, self.terms.batches(self.terms.spread(_CURVATURES_CHECKED), 2))
        check_independence(self.network, self.terms)
        fitting = micro_batch or fitting_micro_batch(self.network, pilot, memory=ACTIVATION_BUDGET)
        #: Examples per pass, of all processes together; at least one for each.
        self.micro_batch = fitting if micro_batch else int(ranks.same(torch.tensor(max(fitting, ranks.size))))
        self._differences: FiniteDifferences | None = None
        self._example_gradients: ExampleGradients | None = None
        self._vectorised: bool | None = None  # whether columns can be vectorised: found out by trying
        #: Why the columns of a block are looped over, where they are.
        self.loop_reason: str | None = None
        self.product, self.product_reason = choose_product(self.network, pilot, product)
        ranks.agree("how products are computed", self.product)

    def __repr__(self) -> str:
        return (
            f"GaussNewton({type(self.network.model).__name__}, {type(self.task).__name__}, "
            f"{self.num_parameters:,} parameters, {self.num_terms:,} terms, "
            f"product={self.product!r}: {self.product_reason})"
        )

    # --- the operator ------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Dimension of parameter space."""
        return sum(p.numel() for p in self.network.parameters.values())

    @property
    def rounding(self) -> float:
        """The rounding unit of vectors."""
        return max(
            torch.finfo(torch.promote_types(p.dtype, torch.float32)).eps
            for p in self.network.parameters.values()
        )

    @property
    def num_terms(self) -> int:
        return self.terms.num_terms

    def zeros(self, columns: int | None = None) -> ParamVector:
        return self.network.zeros(columns)

    def matvec(self, vector: ParamVector) -> ParamVector:
        return self._of_all.matvec(vector)

    def matvec_with_slopes(self, vector: ParamVector) -> tuple[ParamVector, Tensor]:
        self.check_vector(vector)
        network, vector = self.network, self.network.opened(vector)
        result, slopes = network.blank(vector.columns), Slopes(self.terms, vector.columns or 1)
        positions, weight = torch.arange(len(self.terms)), self.terms.weight(len(self.terms))
        for batch in self.shares(positions, self.examples_at_once(vector)):
            self._product(batch, vector, result, weight, slopes=slopes)
        return network.closed(result), slopes.values(network.ranks)

    def quadratic_form(self, vector: ParamVector) -> Tensor:
        return self._of_all.quadratic_form(vector)

    @property
    def _of_all(self) -> SampledGaussNewton:
        return SampledGaussNewton(self, torch.arange(len(self.terms)))

    def sample(self, batch_size: int, generator: torch.Generator) -> SampledGaussNewton:
        """``H̃`` over examples drawn independently, about ``batch_size`` terms, with ``E[H̃] = H``.

        By finite differences, products with it are one-sided with a random sign: two forwards in place of
        three, and a bias of the same order, O(δ²).
        """
        self.check_batch_size(batch_size)
        drawn = self.terms.draw_weighted(batch_size, generator)
        sign = 1 if torch.rand((), generator=generator, device=generator.device) < 0.5 else -1
        return SampledGaussNewton(self, *drawn, sign)

    def over(self, positions: Tensor) -> SampledGaussNewton:
        """The Hessian over these examples alone; its slopes are still of all."""
        return SampledGaussNewton(self, positions)

    def in_metric(self, metric: ParamVector | None) -> GaussNewton:
        """The same operator in the coordinates ``D^(1/2)u``; see `whence.model.network`."""
        other = copy.copy(self)
        other.network = self.network.in_metric(metric)
        other._differences = None
        return other

    def subset(
        self, batch_size: int, generator: torch.Generator, *, distinct: bool = False
    ) -> SampledGaussNewton:
        """``H̃`` over drawn examples, for repeated use: by finite differences its products are central."""
        self.check_batch_size(batch_size)
        drawn = self.terms.draw_weighted(batch_size, generator, distinct=distinct)
        return SampledGaussNewton(self, *drawn)

    @property
    def has_factors(self) -> bool:
        return type(self.task).sample_residual is not Task.sample_residual

    def sample_factor(self, batch_size: int, generator: torch.Generator) -> ParamVector:
        """``g`` with ``E[g gᵀ] = H``: the gradient of a batch whose labels the model drew itself.

        With independent ``r_i``, ``E[r_i r_iᵀ] = S_i``: ``g = √w Σ_i J_iᵀ r_i``, one backward for a whole batch.
        """
        self.check_batch_size(batch_size)
        positions, weights = self.terms.draw_weighted(batch_size, generator)
        scale = math.sqrt(self.terms.weight(len(positions)))
        result = self.network.blank()
        receive = adding_to(result, scale)
        for batch, drawing in self.drawing_shares(positions, self.micro_batch, generator, weights):
            leaves = self.network.leaves()
            outputs = self.network.outputs(batch, leaves)
            residual = self.task.sample_residual(outputs.detach(), batch, drawing)
            if residual is None:
                raise OptionError(f"{type(self.task).__name__} cannot sample residuals")
            if batch.weights is not None:
                residual.mul_(_per_example(batch.weights.sqrt(), residual, outputs))
            self.network.pull_back(outputs, leaves, residual, receive)
        return self.network.closed(result)

    def state(self) -> dict[str, float | None]:
        """The finite differences' memory of their step, which the next product's rounding depends on."""
        return {} if self._differences is None else asdict(self._differences.memory)

    def restore_state(self, state: Mapping[str, float | None]) -> None:
        if state:
            epsilon = state["epsilon"]
            assert epsilon is not None
            memory = StepMemory(state["gain"], state["curvature"], epsilon)
            self.differences(self.terms.fetch(self.terms.longest(2))).memory = memory

    def gradients(self, queries: Any) -> ParamVector:
        """Gradients of what is asked, one column per question.

        A query's loss is its example's loss averaged over its terms: for `LanguageModeling`, minus the mean
        log-probability of the completion's tokens.

        Args:
            queries: a sequence of examples, as in the training data, or `Questions`.
        """
        parts = Questions.of(queries).parts(self.task)
        terms = TermSet(parts.examples, self.task, self.network.device)
        block, ranks = self.network.blank(parts.count), self.network.ranks
        for position in range(len(terms)):
            batch = terms.fetch(torch.tensor([position]))
            if int(self.task.num_terms(batch).sum()) == 0:
                raise DataError(
                    f"{parts.name(position)} asks for nothing: it has no predicted token. Give it a completion"
                )
            mine = position % ranks.size == ranks.rank
            if not mine and not self.network.together:
                continue
            leaves = self.network.leaves()
            outputs = self.network.outputs(batch, leaves)
            self.task.check(outputs.detach(), batch)
            worth = parts.worth(outputs, batch).sum()
            if not bool(torch.isfinite(worth)):
                raise DataError(
                    f"the {parts.measure} of {parts.name(position)} is {float(worth)}; check its inputs and label"
                )
            receive = adding_to(block.column(int(parts.question[position])), float(parts.weight[position]))
            self.network.pull_back(worth, leaves, torch.full_like(worth, float(mine)), receive)
        return self.network.closed(block)

    def training_gradient(self, positions: Tensor) -> ParamVector:
        """The gradient of the mean loss over the terms of these examples."""
        result, terms = self.network.blank(), torch.zeros((), dtype=torch.int64)
        for batch in self.shares(positions, self.micro_batch):
            leaves = self.network.leaves()
            outputs = self.network.outputs(batch, leaves)
            check_finite(outputs.detach())
            total = self.task.losses(outputs, batch).sum()
            counts = torch.full_like(total, float(batch.held > 0))
            self.network.pull_back(total, leaves, counts, adding_to(result, 1.0))
            terms += self.task.num_terms(batch)[: batch.held].sum().cpu()
        return self.network.closed(result).scale_(1 / max(int(self.network.ranks.sum(terms)), 1))

    # --- shares of a pass --------------------------------------------------------------------------------

    @property
    def lockstep(self) -> bool:
        """Whether all processes must go through every pass together, also those that have no example in it."""
        return self.network.ranks.size > 1 and (self.network.together or self.product != "exact")

    def shares(self, positions: Tensor, size: int, weights: Tensor | None = None) -> Iterator[Batch]:
        """This process's share of every micro-batch: what is summed over shares is summed over processes after."""
        for batch in self.terms.batches(positions, size, weights):
            share = batch.shared(self.network.ranks)
            if share.held or self.lockstep:
                yield share

    def drawing_shares(
        self,
        positions: Tensor,
        size: int,
        generator: torch.Generator,
        weights: Tensor | None = None,
        *,
        together: bool = False,
    ) -> Iterator[tuple[Batch, torch.Generator]]:
        """The same, each with a generator for what is drawn on the way, which is alike on all processes.

        What a task of a user's own draws for its share is another on each; see `whence.tasks.base.noise`. With
        ``together``, every process has all of each micro-batch.
        """
        ranks, device = self.network.ranks, generator.device
        own = 0 if together or type(self.task).__module__.startswith("whence.") else ranks.rank
        for batch in self.terms.batches(positions, size, weights):
            seed = int(torch.randint(2**62, (), generator=generator, device=device))
            share = batch if together else batch.shared(ranks)
            if share.held or self.lockstep:
                yield share, torch.Generator(device).manual_seed(seed + own)

    # --- products over a micro-batch ---------------------------------------------------------------------

    def _product(
        self,
        batch: Batch,
        vector: ParamVector,
        out: ParamVector,
        weight: float,
        *,
        sign: int | None = None,
        slopes: Slopes | None = None,
    ) -> None:
        """``out += weight · Jᵀ S J v`` of one micro-batch. The columns of a block share the pass at θ, if they can."""
        if vector.columns is None:
            self._column_product(batch, vector, sign, adding_to(out, weight), slopes)
        elif self.product != "exact" or self.network.together:
            self._products_from_one_pass(batch, vector, out, weight, sign, slopes)
        elif vector.columns == 1 or not self.vectorises(batch, vector):
            for k, column in enumerate(vector.unstack()):
                self._column_product(batch, column, sign, adding_to(out.column(k), weight), slopes, k)
        else:
            leaves = self.network.leaves()
            outputs = self.network.outputs(batch, leaves)
            check_finite(outputs)
            start = 0
            for tangents in self.tangents(outputs, batch, vector):
                cotangents = self._curved(outputs, tangents, batch, slopes, start)
                stop = start + len(tangents)
                del tangents
                receive, more = adding_to(out.part(start, stop), weight), stop < vector.columns
                self.network.pull_back(outputs, leaves, cotangents, receive, keep_graph=more)
                start = stop

    def _column_product(
        self,
        batch: Batch,
        vector: ParamVector,
        sign: int | None,
        receive: Receiver,
        slopes: Slopes | None,
        column: int = 0,
    ) -> None:
        """``Jᵀ S J v`` of one micro-batch, for one vector: the block's column of this number."""
        if self.product == "exact":
            outputs, leaves, tangent = dual_forward(self.network, batch, vector)
        else:
            base = self.differences(batch).base(batch, graph=True)
            outputs, leaves = base.outputs, base.leaves
            tangent = self.differences(batch).tangent(base, batch, vector, sign)
            del base
        check_finite(outputs)
        cotangent = self._curved(outputs, tangent, batch, slopes, column)
        del tangent
        self.network.pull_back(outputs, leaves, cotangent, receive)

    def _products_from_one_pass(
        self,
        batch: Batch,
        block: ParamVector,
        out: ParamVector,
        weight: float,
        sign: int | None,
        slopes: Slopes | None,
    ) -> None:
        """The same for several vectors, each with forward passes of its own, and one pass at θ for all."""
        columns, base = block.unstack(), None
        if self.product == "exact":
            leaves: Mapping[str, Tensor] = self.network.leaves()
            outputs = self.network.outputs(batch, leaves)
        else:
            base = self.differences(batch).base(batch, graph=True)
            outputs, leaves = base.outputs, base.leaves
        check_finite(outputs)
        for k, vector in enumerate(columns):
            if base is None:
                tangent = tangent_only(self.network, batch, vector)[1]
            else:
                tangent = self.differences(batch).tangent(base, batch, vector, sign)
            cotangent = self._curved(outputs, tangent, batch, slopes, k)
            del tangent
            receive, more = adding_to(out.column(k), weight), k < len(columns) - 1
            self.network.pull_back(outputs, leaves, cotangent, receive, keep_graph=more)

    def tangents(self, outputs: Tensor, batch: Batch, block: ParamVector) -> Iterator[Tensor]:
        """``J u`` for the columns of a block, ``[columns, *outputs]``, as many at a time as fit in memory."""
        chunk = self._columns_at_once(outputs, block)
        for start in range(0, block.columns or 1, chunk):
            yield block_tangents(self.network, batch, block.part(start, start + chunk))

    def examples_at_once(self, block: ParamVector) -> int:
        """Examples per pass: fewer for many columns, whose tangents are beyond a CPU's cache sooner."""
        columns = block.columns or 1
        if self.network.device.type != "cpu" or columns <= _WIDE:
            return self.micro_batch
        return max(1, self.micro_batch // 4, self.micro_batch * _WIDE // columns)

    def _columns_at_once(self, outputs: Tensor, block: ParamVector) -> int:
        """Columns whose tangents, gradients and activations' tangents fit in the budget."""
        columns = block.columns or 1
        per_column = outputs.numel() * outputs.element_size() * 4 + block.nbytes // columns
        return max(1, min(columns, ACTIVATION_BUDGET // max(per_column, 1)))

    def vectorises(self, batch: Batch, block: ParamVector) -> bool:
        """Whether the columns of a block can share one pass: found out by trying, once."""
        if self.network.together:
            self._vectorised, self.loop_reason = False, "the model is sharded"
        if self._vectorised is None:
            try:
                block_tangents(self.network, batch, block.part(0, 1))
                self._vectorised = True
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                # Some operation cannot be vectorised. Columns are looped over, which raises anything else again.
                self._vectorised, self.loop_reason = False, str(error).strip().partition("\n")[0]
        return self._vectorised

    def curved(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        """``S t``, weighted; tangents may have a leading dimension."""
        product = self.task.hessian_product(outputs.detach(), tangents, batch)
        if batch.weights is not None:
            product.mul_(_per_example(batch.weights, product, outputs))
        return product

    def _curved(
        self, outputs: Tensor, tangents: Tensor, batch: Batch, slopes: Slopes | None, first: int
    ) -> Tensor:
        """The same on the way of a product, which may note the examples' slopes along these columns."""
        product = self.curved(outputs, tangents, batch)
        if slopes is not None:
            slopes.note(outputs, tangents, product, batch, first)
        return product

    # --- helpers -----------------------------------------------------------------------------------------

    def differences(self, batch: Batch) -> FiniteDifferences:
        """The finite-difference engine, made on first use."""
        if self._differences is None:
            self._differences = FiniteDifferences(self.network, batch)
        return self._differences

    def example_gradients(self) -> ExampleGradients:
        """What reads every example's gradient off one backward pass, in the parameters' own coordinates."""
        if self._example_gradients is None:
            pilot = self.terms.fetch(self.terms.longest(2 if len(self.terms) > 1 else 1))
            self._example_gradients = ExampleGradients(self.network, pilot)
        return self._example_gradients

    def check_vector(self, vector: ParamVector) -> None:
        """Refuse a vector of another space, without making one of this to compare with."""
        for name, parameter in self.network.parameters.items():
            if name not in vector or vector.shape_of(name) != parameter.shape:
                self.zeros().check_same_space(vector)
        if len(vector) != len(self.network.parameters) or not vector.held_as(self.network.shards):
            self.zeros().check_same_space(vector)


def _per_example(weights: Tensor, product: Tensor, outputs: Tensor) -> Tensor:
    """Weights ``[examples]`` in a shape that multiplies outputs, or a stack of such."""
    return weights.to(product.dtype).reshape(-1, *(1,) * (outputs.ndim - 1))
