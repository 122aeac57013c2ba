"""`ParamVector` against plain flattened float64 tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from whence import ParamVector
from whence.errors import VectorError

SHAPES = {"weight": (3, 4), "bias": (4,), "kernel": (2, 1, 3)}
SIZE = 22
EXACT = {"rtol": 1e-13, "atol": 1e-13}


def vector(seed: int, columns: int | None = None, shapes: dict[str, tuple[int, ...]] = SHAPES) -> ParamVector:
    generator = torch.Generator().manual_seed(seed)
    lead = () if columns is None else (columns,)
    return ParamVector(
        {n: torch.randn(lead + s, generator=generator, dtype=torch.float64) for n, s in shapes.items()},
        columns=columns,
    )


def flat(v: ParamVector) -> Tensor:
    """``[N]``, or ``[k, N]`` for a block, as a copy."""
    lead = () if v.columns is None else (v.columns,)
    return torch.cat([tensor.reshape(*lead, -1) for tensor in v.values()], dim=-1)


@pytest.fixture(params=[None, 1, 5], ids=["single", "block of 1", "block of 5"])
def columns(request: pytest.FixtureRequest) -> int | None:
    return request.param


# --- algebra ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1.0, -2.5, torch.tensor(0.3, dtype=torch.float64)])
def test_axpy_with_a_scalar(columns: int | None, alpha: float | Tensor) -> None:
    x, y = vector(0, columns), vector(1, columns)
    expected = flat(x) + float(alpha) * flat(y)
    assert x.axpy_(alpha, y) is x
    torch.testing.assert_close(flat(x), expected, **EXACT)


def test_axpy_with_one_number_per_column() -> None:
    x, y = vector(0, 5), vector(1, 5)
    alpha = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    expected = flat(x) + alpha[:, None] * flat(y)
    torch.testing.assert_close(flat(x.axpy_(alpha, y)), expected, **EXACT)


def test_axpy_leaves_the_other_vector_alone(columns: int | None) -> None:
    x, y = vector(0, columns), vector(1, columns)
    before = flat(y)
    x.axpy_(2.0, y)
    assert torch.equal(flat(y), before)


def test_axpy_onto_itself(columns: int | None) -> None:
    x = vector(0, columns)
    expected = 3.0 * flat(x)
    torch.testing.assert_close(flat(x.axpy_(2.0, x)), expected, **EXACT)


def test_axpy_onto_itself_with_one_number_per_column() -> None:
    x = vector(0, 3)
    alpha = torch.tensor([1.0, -1.0, 4.0], dtype=torch.float64)
    expected = (1 + alpha)[:, None] * flat(x)
    torch.testing.assert_close(flat(x.axpy_(alpha, x)), expected, **EXACT)


def test_axpy_keeps_the_dtype_of_the_left_side() -> None:
    x = ParamVector({"a": torch.ones(3)})
    x.axpy_(1e-3, ParamVector({"a": torch.ones(3, dtype=torch.float64)}))
    assert x["a"].dtype == torch.float32
    torch.testing.assert_close(x["a"], torch.full((3,), 1.001))


@pytest.mark.parametrize("alpha", [0.0, -2.5, torch.tensor(0.3, dtype=torch.float64)])
def test_scale_with_a_scalar(columns: int | None, alpha: float | Tensor) -> None:
    x = vector(0, columns)
    expected = float(alpha) * flat(x)
    assert x.scale_(alpha) is x
    torch.testing.assert_close(flat(x), expected, **EXACT)


def test_scale_with_one_number_per_column() -> None:
    x = vector(0, 5)
    alpha = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    expected = alpha[:, None] * flat(x)
    torch.testing.assert_close(flat(x.scale_(alpha)), expected, **EXACT)


def test_per_column_numbers_of_another_dtype_do_not_change_the_vectors() -> None:
    x = ParamVector({"a": torch.ones(2, 3)}, columns=2)
    x.scale_(torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert x["a"].dtype == torch.float32
    assert x["a"].tolist() == [[0.5] * 3, [2.0] * 3]


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.9, 1.0])
def test_lerp(columns: int | None, weight: float) -> None:
    x, y = vector(0, columns), vector(1, columns)
    expected = (1 - weight) * flat(x) + weight * flat(y)
    assert x.lerp_(y, weight) is x
    torch.testing.assert_close(flat(x), expected, **EXACT)


def test_lerp_with_weights_one_over_t_is_the_running_mean(columns: int | None) -> None:
    points = [vector(seed, columns) for seed in range(6)]
    mean = points[0].zeros_like()
    for count, point in enumerate(points, start=1):
        mean.lerp_(point, 1 / count)
    torch.testing.assert_close(flat(mean), torch.stack([flat(p) for p in points]).mean(0), **EXACT)


def test_copy_takes_values_without_sharing_storage(columns: int | None) -> None:
    x, y = vector(0, columns), vector(1, columns)
    expected = flat(y)
    assert x.copy_(y) is x
    y.zero_()
    assert torch.equal(flat(x), expected)


def test_zero(columns: int | None) -> None:
    x = vector(0, columns)
    assert x.zero_() is x
    assert torch.equal(flat(x), torch.zeros_like(flat(x)))


# --- inner products --------------------------------------------------------------------------------------


def test_dot_of_single_vectors() -> None:
    x, y = vector(0), vector(1)
    result = x.dot(y)
    assert result.shape == ()
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, torch.dot(flat(x), flat(y)), **EXACT)


def test_dot_of_blocks_is_per_column() -> None:
    x, y = vector(0, 5), vector(1, 5)
    result = x.dot(y)
    assert result.shape == (5,)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, (flat(x) * flat(y)).sum(1), **EXACT)


def test_norm(columns: int | None) -> None:
    x = vector(0, columns)
    torch.testing.assert_close(x.norm(), flat(x).norm(dim=-1), **EXACT)


@pytest.mark.parametrize(("left", "right"), [(3, 5), (1, 4), (None, 4), (4, None), (None, None)])
def test_gram_holds_all_inner_products(left: int | None, right: int | None) -> None:
    x, y = vector(0, left), vector(1, right)
    expected = flat(x).reshape(-1, SIZE) @ flat(y).reshape(-1, SIZE).T
    result = x.gram(y)
    assert result.dtype == torch.float64
    assert result.shape == (left or 1, right or 1)
    torch.testing.assert_close(result, expected, **EXACT)


def test_inner_products_do_not_depend_on_memory_layout() -> None:
    x = ParamVector({"a": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T})
    y = ParamVector({"a": torch.ones(3, 1, dtype=torch.float64).expand(3, 2)})
    assert float(x.dot(y)) == 15.0
    assert float(x.gram(y)) == 15.0
    assert float(y.norm()) == pytest.approx(6**0.5, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "product",
    [ParamVector.dot, ParamVector.gram, lambda x, y: x.norm() * y.norm()],
    ids=["dot", "gram", "norm"],
)
def test_inner_products_of_half_precision_vectors_accumulate_in_more_bits(
    dtype: torch.dtype, product: Callable[[ParamVector, ParamVector], Tensor]
) -> None:
    x = ParamVector({"a": torch.rand(1003, generator=torch.Generator().manual_seed(0)).to(dtype)})
    expected = float(x["a"].double() @ x["a"].double())
    assert float(product(x, x)) == pytest.approx(expected, rel=1e-5)


SCALAR = {"weight": (3, 4), "temperature": ()}


@pytest.mark.parametrize("columns", [None, 4])
def test_inner_products_with_a_scalar_parameter(columns: int | None) -> None:
    x, y = vector(0, columns, SCALAR), vector(1, columns, SCALAR)
    torch.testing.assert_close(x.dot(y), (flat(x) * flat(y)).sum(-1), **EXACT)
    torch.testing.assert_close(
        x.gram(y), flat(x).reshape(-1, 13) @ flat(y).reshape(-1, 13).T, rtol=1e-13, atol=1e-13
    )


def test_algebra_with_a_scalar_parameter() -> None:
    x, y = vector(0, 4, SCALAR), vector(1, 4, SCALAR)
    alpha = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    expected = flat(x) + alpha[:, None] * flat(y)
    torch.testing.assert_close(flat(x.axpy_(alpha, y)), expected, **EXACT)
    x.column(2).scale_(0.0)
    assert torch.equal(flat(x)[2], torch.zeros(13, dtype=torch.float64))


# --- form ------------------------------------------------------------------------------------------------


def test_it_is_a_mapping_in_the_given_order() -> None:
    x = vector(0)
    assert list(x) == list(SHAPES)
    assert len(x) == 3
    assert {name: tuple(x[name].shape) for name in x} == SHAPES


def test_sizes(columns: int | None) -> None:
    x = vector(0, columns)
    assert x.columns == columns
    assert x.numel == SIZE
    assert x.nbytes == 8 * SIZE * (columns or 1)
    assert {name: tuple(x.shape_of(name)) for name in x} == SHAPES


def test_repr_says_how_large_it_is() -> None:
    assert repr(vector(0)) == "ParamVector(3 tensors, 22 numbers)"
    assert repr(vector(0, 5)) == "ParamVector(3 tensors, 22 numbers, columns=5)"


def test_zeros_of_a_block_can_be_single_and_the_other_way_round() -> None:
    single, block = vector(0, 5).zeros(), vector(0).zeros(4)
    assert (single.columns, tuple(single["weight"].shape)) == (None, (3, 4))
    assert (block.columns, tuple(block["weight"].shape)) == (4, (4, 3, 4))
    assert not flat(single).any()
    assert not flat(block).any()
    assert single["weight"].dtype == torch.float64


def test_zeros_like_keeps_the_columns(columns: int | None) -> None:
    zeros = vector(0, columns).zeros_like()
    assert zeros.columns == columns
    assert torch.equal(flat(zeros), torch.zeros_like(flat(vector(0, columns))))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_is_finite(columns: int | None, bad: float) -> None:
    x = vector(0, columns)
    assert x.is_finite()
    x["kernel"].view(-1)[-1] = bad
    assert not x.is_finite()


# --- aliasing --------------------------------------------------------------------------------------------


def test_the_given_tensors_are_kept_and_the_given_mapping_is_not() -> None:
    tensors = {"a": torch.zeros(3)}
    x = ParamVector(tensors)
    tensors["a"].fill_(7.0)
    assert x["a"].tolist() == [7.0, 7.0, 7.0]
    tensors["b"] = torch.zeros(1)
    assert list(x) == ["a"]


@pytest.mark.parametrize("make", [ParamVector.clone, ParamVector.zeros_like, ParamVector.zeros])
def test_new_vectors_have_storage_of_their_own(make: Callable[[ParamVector], ParamVector]) -> None:
    x = vector(0)
    before = flat(x)
    for tensor in make(x).values():
        tensor.fill_(9.0)
    assert torch.equal(flat(x), before)


def test_clone_copies_values_and_leaves_the_graph_behind() -> None:
    tensor = torch.ones(3, requires_grad=True)
    clone = ParamVector({"a": 2 * tensor}).clone()
    assert not clone["a"].requires_grad
    assert clone["a"].tolist() == [2.0, 2.0, 2.0]


def test_clone_of_an_expanded_tensor_can_be_written_to() -> None:
    clone = ParamVector({"a": torch.ones(1).expand(3)}).clone()
    clone["a"][0] = 5.0
    assert clone["a"].tolist() == [5.0, 1.0, 1.0]


def test_stack_copies() -> None:
    singles = [vector(seed) for seed in range(3)]
    block = ParamVector.stack(singles)
    assert block.columns == 3
    assert torch.equal(flat(block), torch.stack([flat(single) for single in singles]))
    block.zero_()
    assert all(flat(single).any() for single in singles)


def test_writing_to_a_column_writes_to_that_column_of_the_block_only() -> None:
    block, other = vector(0, 5), vector(1)
    expected = flat(block)
    expected[3] += 2 * flat(other)
    block.column(3).axpy_(2.0, other)
    torch.testing.assert_close(flat(block), expected, **EXACT)


def test_column_counts_from_the_end_too() -> None:
    block = vector(0, 5)
    assert torch.equal(flat(block.column(-1)), flat(block)[4])


def test_unstack_gives_views_in_order() -> None:
    block = vector(0, 3)
    columns = block.unstack()
    assert [c.columns for c in columns] == [None] * 3
    assert torch.equal(torch.stack([flat(c) for c in columns]), flat(block))
    for k, column in enumerate(columns):
        column.scale_(float(k))
    assert not flat(block)[0].any()
    torch.testing.assert_close(flat(block)[2], 2 * flat(vector(0, 3))[2], **EXACT)


def test_unstack_of_a_single_vector_is_itself() -> None:
    x = vector(0)
    (only,) = x.unstack()
    assert only is x


def test_stack_undoes_unstack() -> None:
    block = vector(0, 4)
    assert torch.equal(flat(ParamVector.stack(block.unstack())), flat(block))


# --- random vectors --------------------------------------------------------------------------------------

DRAWS = [ParamVector.randn_like, ParamVector.rademacher_like]
LARGE = {"a": (100, 50), "b": (100, 50), "c": (10_000,)}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_vectors_are_reproducible_from_their_generator(
    draw: Callable[[ParamVector, torch.Generator], ParamVector], columns: int | None
) -> None:
    space = vector(0, columns)
    first, again, other = (draw(space, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8))
    assert torch.equal(flat(first), flat(again))
    assert not torch.equal(flat(first), flat(other))


@pytest.mark.parametrize("draw", DRAWS)
def test_random_vectors_use_only_their_generator(
    draw: Callable[[ParamVector, torch.Generator], ParamVector],
) -> None:
    state = torch.get_rng_state()
    draw(vector(0), torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", DRAWS)
def test_random_vectors_advance_their_generator(
    draw: Callable[[ParamVector, torch.Generator], ParamVector],
) -> None:
    generator = torch.Generator().manual_seed(7)
    assert not torch.equal(flat(draw(vector(0), generator)), flat(draw(vector(0), generator)))


@pytest.mark.parametrize("draw", DRAWS)
def test_random_vectors_keep_form_and_dtype(
    draw: Callable[[ParamVector, torch.Generator], ParamVector], columns: int | None
) -> None:
    drawn = draw(vector(0, columns), torch.Generator())
    assert drawn.columns == columns
    assert {name: tuple(drawn.shape_of(name)) for name in drawn} == SHAPES
    assert all(tensor.dtype == torch.float64 for tensor in drawn.values())


@pytest.mark.parametrize("draw", DRAWS)
def test_random_entries_have_mean_zero_and_are_independent(
    draw: Callable[[ParamVector, torch.Generator], ParamVector],
) -> None:
    block = draw(vector(0, 2, LARGE), torch.Generator().manual_seed(3))
    rows = flat(block)
    count = rows.shape[1]
    assert float(rows.mean().abs()) < 4 / (2 * count) ** 0.5
    assert float(rows[0] @ rows[1]) / count == pytest.approx(0.0, abs=4 / count**0.5)
    assert float((block["a"] * block["b"]).mean()) == pytest.approx(0.0, abs=4 / 10_000**0.5)
    assert float((rows[0, 1:] * rows[0, :-1]).mean()) == pytest.approx(0.0, abs=4 / count**0.5)


def test_normal_entries_have_variance_one_and_a_normal_fourth_moment() -> None:
    entries = flat(vector(0, None, LARGE).randn_like(torch.Generator().manual_seed(3)))
    count = len(entries)
    assert float(entries.square().mean()) == pytest.approx(1.0, abs=4 * (2 / count) ** 0.5)
    assert float((entries**4).mean()) == pytest.approx(3.0, abs=4 * (96 / count) ** 0.5)


def test_rademacher_entries_are_signs() -> None:
    entries = flat(vector(0, None, LARGE).rademacher_like(torch.Generator().manual_seed(3)))
    assert entries.unique().tolist() == [-1.0, 1.0]


# --- refusals --------------------------------------------------------------------------------------------


def test_an_empty_mapping_is_refused() -> None:
    with pytest.raises(VectorError, match="at least one tensor; got an empty mapping"):
        ParamVector({})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.zeros(3, dtype=torch.long), "torch.int64"),
        (torch.zeros(3, dtype=torch.bool), "torch.bool"),
        (torch.zeros(3, dtype=torch.complex64), "torch.complex64"),
        ([1.0, 2.0], "list"),
        (None, "NoneType"),
    ],
    ids=["int", "bool", "complex", "list", "None"],
)
def test_anything_but_a_floating_point_tensor_is_refused(value: object, kind: str) -> None:
    with pytest.raises(VectorError, match=rf"'head\.bias' must be a floating-point tensor, got {kind}"):
        ParamVector({"weight": torch.zeros(2), "head.bias": value})  # type: ignore[dict-item]


@pytest.mark.parametrize("shape", [(3, 4), (), (1, 5)])
def test_a_block_needs_its_columns_as_leading_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(VectorError) as caught:
        ParamVector({"weight": torch.zeros(5, 2), "bias": torch.zeros(shape)}, columns=5)
    message = str(caught.value)
    assert "'bias'" in message
    assert str(shape) in message
    assert "5" in message


def test_a_space_with_other_names_is_refused_naming_them() -> None:
    other = vector(1, shapes={"weight": (3, 4), "kernel": (2, 1, 3), "scale": (4,)})
    with pytest.raises(VectorError, match=r"missing 'bias', unexpected 'scale'.*same `params` filter"):
        vector(0).check_same_space(other)


def test_a_long_list_of_names_is_cut() -> None:
    many = ParamVector({f"layer{i}": torch.zeros(1) for i in range(9)})
    with pytest.raises(VectorError, match="missing 'layer0', 'layer1', 'layer2' and 6 more"):
        many.check_same_space(ParamVector({"x": torch.zeros(1)}))


def test_a_space_with_other_shapes_is_refused_naming_both() -> None:
    other = vector(1, shapes={**SHAPES, "weight": (4, 3)})
    with pytest.raises(VectorError, match=r"gradient's 'weight' has shape \(4, 3\), expected \(3, 4\)"):
        vector(0).check_same_space(other, "gradient")


def test_a_block_lies_in_the_space_of_its_columns() -> None:
    vector(0).check_same_space(vector(1, 5))
    vector(0, 2).check_same_space(vector(1))


COMBINATIONS = [
    pytest.param(lambda x, y: x.axpy_(1.0, y), id="axpy_"),
    pytest.param(lambda x, y: x.lerp_(y, 0.5), id="lerp_"),
    pytest.param(lambda x, y: x.copy_(y), id="copy_"),
    pytest.param(lambda x, y: x.dot(y), id="dot"),
]
Combine = Callable[[ParamVector, ParamVector], object]


def refuse_unchanged(combine: Combine, x: ParamVector, y: ParamVector, match: str) -> None:
    before = flat(x)
    with pytest.raises(VectorError, match=match):
        combine(x, y)
    assert torch.equal(flat(x), before)


@pytest.mark.parametrize("combine", COMBINATIONS)
@pytest.mark.parametrize(("left", "right"), [(None, 3), (3, None), (3, 2), (3, 1)])
def test_different_numbers_of_columns_are_refused(
    combine: Combine, left: int | None, right: int | None
) -> None:
    shown = next(k for k in (left, right) if k is not None)
    refuse_unchanged(combine, vector(0, left), vector(1, right), f"columns={shown}.*numbers of columns")


@pytest.mark.parametrize("combine", [*COMBINATIONS, pytest.param(lambda x, y: x.gram(y), id="gram")])
def test_other_names_are_refused(combine: Combine) -> None:
    other = vector(1, shapes={"weight": (3, 4), "bias": (4,), "extra": (2, 1, 3)})
    refuse_unchanged(combine, vector(0), other, "missing 'kernel', unexpected 'extra'")


@pytest.mark.parametrize("combine", [*COMBINATIONS, pytest.param(lambda x, y: x.gram(y), id="gram")])
@pytest.mark.parametrize(
    "shape", [(4,), (1, 4), (12,), (4, 3)], ids=["broadcasts", "broadcasts too", "same size", "transposed"]
)
def test_other_shapes_are_refused(combine: Combine, shape: tuple[int, ...]) -> None:
    other = vector(1, shapes={**SHAPES, "weight": shape})
    refuse_unchanged(combine, vector(0), other, r"'weight' has shape \(.*expected \(3, 4\)")


@pytest.mark.parametrize(
    "use", [lambda x, a: x.scale_(a), lambda x, a: x.axpy_(a, x.clone())], ids=["scale_", "axpy_"]
)
@pytest.mark.parametrize(("columns", "count"), [(None, 3), (5, 3), (5, 6)])
def test_numbers_per_column_must_be_as_many_as_the_columns(
    use: Callable[[ParamVector, Tensor], object], columns: int | None, count: int
) -> None:
    x = vector(0, columns, {"weight": (3, 4), "bias": (3,)})
    before = flat(x)
    with pytest.raises(VectorError, match=str(count)):
        use(x, torch.full((count,), 2.0, dtype=torch.float64))
    assert torch.equal(flat(x), before)


def test_stacking_nothing_is_refused() -> None:
    with pytest.raises(VectorError, match="cannot stack an empty list of vectors"):
        ParamVector.stack([])


def test_stacking_blocks_is_refused() -> None:
    with pytest.raises(VectorError, match="single vectors, not blocks"):
        ParamVector.stack([vector(0), vector(1, 2)])


def test_stacking_vectors_of_different_spaces_is_refused() -> None:
    with pytest.raises(VectorError, match=r"'bias' has shape \(5,\), expected \(4,\)"):
        ParamVector.stack([vector(0), vector(1, shapes={**SHAPES, "bias": (5,)})])


def test_a_single_vector_has_no_column() -> None:
    with pytest.raises(VectorError, match="single vector; it has no columns"):
        vector(0).column(0)


def test_mean_of_vectors() -> None:
    vectors = [ParamVector({"x": torch.tensor([float(k), 1.0])}) for k in (1, 2, 6)]
    assert torch.allclose(ParamVector.mean(vectors)["x"], torch.tensor([3.0, 1.0]))
    assert float(vectors[0]["x"][0]) == 1.0  # a copy
    with pytest.raises(VectorError, match="empty"):
        ParamVector.mean([])


def test_a_part_of_a_block_is_a_view() -> None:
    block = ParamVector({"x": torch.arange(8.0).reshape(4, 2)}, columns=4)
    part = block.part(1, 3)
    assert part.columns == 2
    part.scale_(0.0)
    assert block["x"].tolist() == [[0, 1], [0, 0], [0, 0], [6, 7]]
    assert block.part(3, 9).columns == 1
    with pytest.raises(VectorError, match="no columns"):
        block.column(0).part(0, 1)
