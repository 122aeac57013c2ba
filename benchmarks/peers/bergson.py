"""Bergson's EK-FAC influence functions, as its `bergson ekfac` does them; of language models alone.

    python -m benchmarks.peers.bergson [--check] [NAME …]

Settings of its own: "default" is `InversionConfig()`, a tenth of the mean eigenvalue of each layer. The grid gives all
layers one damping (`absolute_damped_inverse`), a multiple of the mean eigenvalue over all of them.

`HessianConfig(method="kfac", ev_correction=True)`, queries not aggregated, and all else at its defaults, as in its
example that compares LDS: batches of 2,048 tokens, losses summed over tokens, factors from labels drawn from the model.
It follows the linear layers of a Hugging Face model's body without their biases. Embeddings, norms and the head it does
not cover.

Its LiSSA is left out. It takes one query after the other and at its defaults 5 × 5,000 products of 16 passages for
each: half a million for a work of 20 queries.

It reads model and data from disk, and refuses batches of more tokens than the model has positions. So that it need not
go passage by passage, the saved model is given positions that nothing ever uses.

`--check` compares, on a tiny Llama, with EK-FAC of the same layers written out densely, for labels of the data, since
sampled ones are random.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks the hub whether a path on disk is an adapter there
os.environ["TQDM_DISABLE"] = "1"

import torch
from bergson.config.config import (
    DataConfig,
    HessianConfig,
    HessianPipelineConfig,
    IndexConfig,
    InversionConfig,
    PreprocessConfig,
    QuerySetConfig,
    ScoreConfig,
)
from bergson.data import load_scores
from bergson.hessians.hessian_approximations import approximate_hessians
from bergson.hessians.pipeline import hessian_pipeline
from datasets import Dataset, disable_progress_bars
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from benchmarks.peers import tiny
from benchmarks.peers.asking import Peer, main
from whence import LanguageModeling
from whence.tasks import Task


class Factors:
    """Bergson with the factors of a model fitted.

    Attributes:
        scale: the mean eigenvalue over all layers.
    """

    def __init__(
        self, model: nn.Module, task: Task, train: Sequence[Tensor], arguments: HessianConfig | None = None
    ) -> None:
        assert isinstance(task, LanguageModeling)
        disable_progress_bars()
        logging.disable(logging.INFO)
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name)
        self.arguments = arguments or HessianConfig(method="kfac", ev_correction=True)
        self.index = IndexConfig(
            str(self.root / "run"),
            model=str(keep_model(model, self.root / "model", IndexConfig("").token_batch_size)),
            data=DataConfig(dataset=str(keep_rows(train[0], self.root / "train"))),
        )
        fitted = Path(self.index.run_path) / "hessian" / self.arguments.method
        torch.manual_seed(0)  # labels are drawn from the model
        with contextlib.redirect_stdout(io.StringIO()):
            approximate_hessians(
                IndexConfig(str(fitted), model=self.index.model, data=self.index.data), self.arguments
            )
        eigenvalues = load_file(fitted / "eigenvalue_correction_sharded" / "shard_0.safetensors")
        self.scale = float(torch.cat([grid.flatten() for grid in eigenvalues.values()]).double().mean())

    def scores(self, queries: Sequence[Tensor], damping: float | None) -> Tensor:
        inversion = InversionConfig()
        if damping is not None:
            inversion = InversionConfig("absolute_damped_inverse", damping_factor=damping)
        run = Path(self.index.run_path)
        for step in ("query", f"{self.arguments.method}_query", "scores"):  # of another damping
            shutil.rmtree(run / step, ignore_errors=True)
        asked = keep_rows(queries[0], self.root / "queries")
        with contextlib.redirect_stdout(io.StringIO()):
            hessian_pipeline(
                self.index,
                self.arguments,
                ScoreConfig(),
                PreprocessConfig(),
                HessianPipelineConfig(
                    query=QuerySetConfig(dataset=str(asked)), inversion_cfg=inversion, resume=True
                ),
            )
        return torch.tensor(load_scores(run / "scores")[:]).T.contiguous()


def keep_model(model: nn.Module, path: Path, positions: int) -> Path:
    """Save a model with a tokenizer, which Bergson loads and does not use, and with unused positions at its end."""
    model.save_pretrained(path)  # type: ignore[operator]
    if isinstance(model, GPT2LMHeadModel):
        table = model.transformer.wpe.weight
        state = model.state_dict()
        state["transformer.wpe.weight"] = torch.cat(
            [table, table.new_zeros(positions - len(table), table.shape[1])]
        )
        model.save_pretrained(path, state_dict=state)
    config = model.config
    assert hasattr(config, "to_dict")
    roomy = type(config)(**{**config.to_dict(), "max_position_embeddings": positions})
    roomy.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(path)
    return path


def keep_rows(rows: Tensor, path: Path) -> Path:
    """Save rows of tokens as a dataset that needs no tokenizer."""
    Dataset.from_dict({"input_ids": rows.tolist()}).save_to_disk(path)
    return path


_EKFAC = Peer(
    "bergson",
    "bergson",
    unit="mean eigenvalue of EK-FAC over all layers",
    settings={"default": None},
    multiples=tuple(10 ** (2 * i / 3 - 2) for i in range(10)),
    prepare=Factors,
)
PEERS = (_EKFAC,)


def check() -> None:
    arguments = HessianConfig(method="kfac", ev_correction=True, use_dataset_labels=True)
    model, train, queries = tiny.language_model()
    factors = Factors(model, LanguageModeling(), train, arguments)
    for damping in (1e-3, 1e-1, 1e6):
        expected = tiny.dense_ekfac(model, train, queries, damping)
        found = factors.scores(queries, damping)
        tiny.agree(f"language model, damping {damping:g}, dense EK-FAC", found, expected)


if __name__ == "__main__":
    main(PEERS, check)
