"""`whence.index`: against dense references; resumed, grown and damaged; and from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import whence
from tiny_hf import gpt2_directory
from whence import Classification, Index, index
from whence.cli import app
from whence.errors import OptionError, RunDirectoryError
from whence.index.signs import Rotation, Signs, estimates
from whence.preconditioners.ekfac import Ekfac
from whence.runs import opened


def small(seed: int = 0, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype).eval()


def data(n: int = 60) -> list[Any]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(100, 6, generator=random, dtype=torch.float64)[:n]
    return [(row, int(row[:4].argmax())) for row in x]


def made(directory: Path, train: Any = None, **given: Any) -> Index:
    options = {"bytes": 512, "part_size": 16, **given}
    train = data() if train is None else train
    return index(small(), train, task=Classification(), directory=directory, **options)


def gradient(example: Any) -> dict[str, Tensor]:
    model = small()
    x, y = example
    loss = nn.functional.cross_entropy(model(x.unsqueeze(0)), torch.tensor([y]))
    found = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True))


def dense_scores(found: Index, queries: list[Any], train: list[Any]) -> Tensor:
    """``a ∇ᵀ P⁻¹ ∇`` by dense matrices of every layer, from the factors in the directory."""
    kept = opened(found.directory)
    metric = found.gnh.network.metric
    factors = kept.value("factors", Ekfac)
    result = torch.zeros(len(queries), len(train), dtype=torch.float64)

    def vectors(examples: list[Any], block: Any) -> Tensor:
        rows = []
        for example in examples:
            found = {
                name: g if metric is None else g / metric[name].sqrt()
                for name, g in gradient(example).items()
            }
            rows.append(block.matrix.pack(found).reshape(-1))
        return torch.stack(rows)

    for block in factors.blocks:
        rows, columns = block.matrix.shape
        left = torch.eye(rows, dtype=torch.float64) if block.left is None else block.left
        right = torch.eye(columns, dtype=torch.float64) if block.right is None else block.right
        Q = torch.kron(left, right)
        P = Q @ torch.diag(10 * block.eigenvalues.reshape(-1)) @ Q.T
        P = P + found.weighed.damping * torch.eye(rows * columns, dtype=torch.float64)
        result += vectors(queries, block) @ torch.linalg.solve(P, vectors(train, block).T)
    return found.fit.scale * result


class TestSigns:
    @pytest.mark.parametrize(("numbers", "places"), [(40, 64), (64, 64), (700, 64), (5000, 1024), (3, 8)])
    def test_rotated_inner_products_are_right_on_average(self, numbers: int, places: int) -> None:
        random = torch.Generator().manual_seed(0)
        x, q = torch.randn(2, numbers, generator=random, dtype=torch.float64)
        exact, found = float(x @ q), []
        for seed in range(300):
            rotation = Rotation(
                [numbers // 3, numbers - numbers // 3], places, torch.Generator().manual_seed(seed)
            )
            y = rotation(
                [
                    part.clone()
                    for part in torch.stack([x, q]).split([numbers // 3, numbers - numbers // 3], 1)
                ]
            )
            found.append(float(y[0] @ y[1]))
        spread = torch.tensor(found, dtype=torch.float64).std().item()
        expected = float(x.norm() * q.norm()) / math.sqrt(places) if numbers > places else 0.0
        assert abs(sum(found) / 300 - exact) < 4 * spread / math.sqrt(300) + 1e-9
        assert spread < 1.3 * expected + 1e-9

    def test_errors_of_estimates_are_as_large_as_the_formula_says(self) -> None:
        random = torch.Generator().manual_seed(0)
        x, q = torch.randn(200, 6000, generator=random), torch.randn(20, 6000, generator=random)
        x[:, :50] *= 10
        x = x + 0.5 * q[0]
        rotation = Rotation([6000], 2048, random)
        signs = Signs.of(rotation([x]))
        rotated = rotation([q])
        error = estimates(signs, rotated) - q @ x.T
        lengths = q.norm(dim=1, keepdim=True) * x.norm(dim=1)
        relative = (error / lengths)[1:]
        expected = math.sqrt((math.pi / 2 - 2048 / 6000) / 2048)
        assert float(relative.square().mean().sqrt()) == pytest.approx(expected, rel=0.05)
        assert abs(float(relative.mean())) < 4 * float(relative.std()) / math.sqrt(200)
        assert torch.allclose(signs.sizes, x.norm(dim=1) * math.sqrt(math.pi / 2 / 2048), rtol=0.1)

    def test_estimates_are_sums_with_signs(self) -> None:
        random = torch.Generator().manual_seed(0)
        y, q = torch.randn(37, 64, generator=random), torch.randn(3, 64, generator=random)
        signs = Signs.of(y)
        by_hand = (q @ torch.where(y > 0, 1.0, -1.0).T) * (y.square().sum(1) / y.abs().sum(1))
        torch.testing.assert_close(estimates(signs, q), by_hand)


class TestAnswers:
    def test_all_examples_scored_again_have_the_dense_scores(self, tmp_path: Path) -> None:
        found, queries = made(tmp_path / "index"), data(70)[60:]
        answer = found.ask(queries, rescored=60)
        torch.testing.assert_close(
            answer.result.scores, dense_scores(found, queries, data()), rtol=1e-6, atol=1e-9
        )

    def test_estimates_are_as_near_as_their_errors_say(self, tmp_path: Path) -> None:
        found, queries = made(tmp_path / "index"), data(100)[60:]
        answer = found.ask(queries, rescored=10)
        exact = dense_scores(found, queries, data())
        low, high = answer.interval(0.95)
        inside = float(((low <= exact) & (exact <= high)).double().mean())
        assert 0.9 < inside < 0.99
        error = (answer.estimates - exact) / answer.stderr
        assert 0.8 < float(error.square().mean().sqrt()) < 1.2

    def test_what_is_scored_again_are_the_ends(self, tmp_path: Path) -> None:
        found, queries = made(tmp_path / "index"), data(62)[60:61]
        answer = found.ask(queries, rescored=9)
        order = answer.estimates[0].argsort(descending=True)
        assert set(answer.result.indices.tolist()) == set(order[:6].tolist()) | set(order[-3:].tolist())
        assert "9 of 60" in answer.result.not_scored

    def test_it_is_the_quick_answer(self, tmp_path: Path) -> None:
        """From the same data, so with the same factors; but for the answers' size."""
        found, queries = made(tmp_path / "index"), data(63)[60:]
        answer = found.ask(queries, rescored=60)
        quick = whence.attribute(small(), data(), queries, task=Classification(), accuracy="quick")
        assert answer.result.solve.plan.damping == pytest.approx(quick.solve.plan.damping)
        for ours, its in zip(answer.result.scores, quick.scores, strict=True):
            assert float(torch.corrcoef(torch.stack([ours, its]))[0, 1]) > 0.9999


class TestMaking:
    def test_an_interrupted_index_goes_on_to_the_same_bits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from whence.index import parts

        whole, count, fingerprint = made(tmp_path / "whole"), 0, parts.fingerprint

        def dies(example: Any) -> int:
            nonlocal count
            count += 1
            if count > 40:
                raise KeyboardInterrupt
            return fingerprint(example)

        monkeypatch.setattr(parts, "fingerprint", dies)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "parted")
        with pytest.raises(RunDirectoryError, match="unfinished"):
            Index.open(tmp_path / "parted", small(), data(), task=Classification())
        monkeypatch.setattr(parts, "fingerprint", fingerprint)
        again = made(tmp_path / "parted")
        assert len(again.parts) == len(whole.parts) == 4
        for one, other in zip(again.parts, whole.parts, strict=True):
            assert torch.equal(one.signs.bits, other.signs.bits)
            assert torch.equal(one.signs.sizes, other.signs.sizes)
        assert again.calibration == whole.calibration

    def test_what_is_added_is_as_if_it_had_been_there(self, tmp_path: Path) -> None:
        first = made(tmp_path / "index")
        before = first.ask(data()[:2]).estimates
        grown = made(tmp_path / "index", data(80))
        assert [part.first for part in grown.parts] == [0, 16, 32, 48, 60, 76]
        answer = grown.ask(data()[:2])
        torch.testing.assert_close(answer.estimates[:, :60], before, rtol=0, atol=0)
        exact = dense_scores(grown, data()[:2], data(80))
        torch.testing.assert_close(answer.result.scores, exact, rtol=1e-6, atol=1e-9)
        late = (answer.estimates - exact)[:, 60:] / answer.stderr[:, 60:]
        assert 0.6 < float(late.square().mean().sqrt()) < 1.4

    def test_a_parameter_without_examples_gradients_is_read_one_by_one(self, tmp_path: Path) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale, self.inner = nn.Parameter(torch.ones(6, dtype=torch.float64)), small()

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x * self.scale)

        found = index(
            Scaled().eval(),
            data(),
            task=Classification(),
            directory=tmp_path / "index",
            bytes=4096,
            part_size=16,
        )
        answer = found.ask(data(70)[60:], rescored=60)
        error = (answer.estimates - answer.result.scores) / answer.stderr
        assert found.gnh.example_gradients().missing
        assert float(error.square().mean().sqrt()) < 1.5

    @pytest.mark.parametrize("bytes", [0, 100, 4, 2**21])
    def test_bytes_are_a_power_of_two(self, tmp_path: Path, bytes: int) -> None:
        with pytest.raises(OptionError, match="power of two"):
            made(tmp_path / "index", bytes=bytes)


class TestRefusing:
    def test_a_damaged_part_is_named(self, tmp_path: Path) -> None:
        made(tmp_path / "index")
        part = next(tmp_path.glob("index/part-00002.*"))
        content = bytearray(part.read_bytes())
        content[-7] ^= 1
        part.write_bytes(content)
        with pytest.raises(RunDirectoryError, match="part-00002"):
            Index.open(tmp_path / "index", small(), data(), task=Classification())

    def test_another_model(self, tmp_path: Path) -> None:
        made(tmp_path / "index")
        with pytest.raises(RunDirectoryError, match="model"):
            Index.open(tmp_path / "index", small(1), data(), task=Classification())

    def test_the_same_weights_in_another_model(self, tmp_path: Path) -> None:
        made(tmp_path / "index")
        other = small()
        other[1] = nn.ReLU()
        with pytest.raises(RunDirectoryError, match="another model"):
            Index.open(tmp_path / "index", other, data(), task=Classification())

    def test_other_data(self, tmp_path: Path) -> None:
        made(tmp_path / "index")
        other = data()
        other[33] = (other[33][0] + 1, other[33][1])
        with pytest.raises(RunDirectoryError, match="example 33"):
            made(tmp_path / "index", other)
        found = Index.open(tmp_path / "index", small(), other, task=Classification())
        with pytest.raises(RunDirectoryError, match="example 33"):
            found.ask(data()[:1])

    def test_fewer_or_more_data(self, tmp_path: Path) -> None:
        made(tmp_path / "index")
        with pytest.raises(RunDirectoryError, match=r"of 60 examples, the training data have 59"):
            Index.open(tmp_path / "index", small(), data(59), task=Classification())
        with pytest.raises(RunDirectoryError, match="with others behind them"):
            made(tmp_path / "index", data(59))

    def test_other_options(self, tmp_path: Path) -> None:
        made(tmp_path / "index")
        with pytest.raises(RunDirectoryError, match="bytes"):
            made(tmp_path / "index", bytes=1024)

    def test_what_is_no_index(self, tmp_path: Path) -> None:
        whence.attribute(
            small(), data(), data()[:1], task=Classification(), accuracy="quick", run_dir=tmp_path / "run"
        )
        with pytest.raises(RunDirectoryError, match="no index"):
            Index.open(tmp_path / "run", small(), data(), task=Classification())


class TestCommandLine:
    def test_from_model_and_text_to_an_answer(self, tmp_path: Path) -> None:
        model = gpt2_directory(tmp_path / "model")
        rows = [{"id": name, "text": topics[name][60:200]} for name in list(topics)[:12]]
        train = tmp_path / "train.jsonl"
        train.write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
        place = tmp_path / "index"
        make = (
            "index",
            model,
            "--train",
            train,
            "--max-length",
            24,
            "--truncate",
            "--index",
            place,
            "--bytes",
            256,
        )
        said = invoke(*make).stdout
        assert "59 examples of 268 bytes" in said
        question = ("--prompt", "The with statement", "--completion", " is used")
        refused = invoke("ask", place, *question, code=2)
        assert "--trust-run" in refused.stderr
        assert "model" in refused.stderr
        page = tmp_path / "page.html"
        said = invoke("ask", place, "--trust-run", *question, "--rescored", 6, "--json", "--report", page)
        (answer,) = json.loads(said.stdout)["queries"]
        assert {row["id"].split("[")[0] for row in answer["helpful"]} <= {row["id"] for row in rows[:10]}
        assert "scored again" in page.read_text()
        train.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert "71 examples" in invoke(*make).stdout
        asked = tmp_path / "queries.jsonl"
        asked.write_text(json.dumps({"prompt": question[1], "completion": question[3]}) + "\n")
        assert "rank" in invoke("ask", place, "--trust-run", "--queries", asked).stdout

    def test_a_question_is_not_asked_while_an_index_is_made(self, tmp_path: Path) -> None:
        said = invoke("index", tmp_path, "--index", tmp_path / "index", "--prompt", "a", code=2)
        assert "--prompt is of a question" in said.stderr

    def test_a_directory_without_an_index(self, tmp_path: Path) -> None:
        assert "no index" in invoke("ask", tmp_path, "--trust-run", "--prompt", "a", code=2).stderr


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result
