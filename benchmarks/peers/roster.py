"""Who is compared: every peer's name, where its adapter is, what it can be asked about, and what tables call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from whence.tasks import Classification, LanguageModeling, Regression, Task

__all__ = ["ROSTER", "Entry"]

_ALL = (Classification, Regression, LanguageModeling)


@dataclass(frozen=True)
class Entry:
    """One way of attributing.

    Attributes:
        module: below `benchmarks.peers`; its environment is ``.venv-module``.
        words: in tables.
        tasks: what its adapter does.
        better: what it does better than whence, in plain words.
        environment: whether it has an environment of its own; else it runs in ours.
    """

    module: str
    words: str
    tasks: tuple[type[Task], ...]
    better: str
    environment: bool = True


#: In the order of tables.
ROSTER: Mapping[str, Entry] = MappingProxyType(
    {
        "kronfluence": Entry(
            "kronfluence",
            "Kronfluence EK-FAC",
            _ALL,
            "One set of factors answers any number of queries. It has recipes for large models: partitions of data "
            "and modules, mixed precision, query gradients of low rank.",
        ),
        "bergson": Entry(
            "bergson",
            "Bergson EK-FAC",
            (LanguageModeling,),
            "Made for collections of text: gradients are kept in a store on disk that can be searched, steps are "
            "replayed from a file, models are sharded over nodes.",
        ),
        "dattri": Entry(
            "dattri",
            "dattri CG",
            (Classification, Regression),
            "Any loss that is a function of parameters and data, with the loss's own Hessian; at a damping found by "
            "retraining its ten iterations are as good as anything on small models.",
        ),
        "dattri-lissa": Entry("dattri", "dattri LiSSA", (Classification, Regression), "Constant memory."),
        "dattri-trak": Entry(
            "dattri", "dattri TRAK", (Classification,), "Projected gradients are small to keep; see TRAK."
        ),
        "traker": Entry(
            "traker",
            "TRAK",
            (Classification,),
            "No Hessian: a gradient per example, projected and kept, answers every later query. It is meant to be "
            "averaged over tens of models, which no other here asks for, and is compared with one.",
        ),
        "pydvl": Entry(
            "pydvl",
            "pyDVL Nyström",
            (Classification, Regression),
            "Beside influence it has Shapley values and other valuations of data, and many ways to invert a Hessian "
            "behind one interface; few products with the Hessian are enough for all queries.",
        ),
        "captum": Entry(
            "captum",
            "Captum TracInCP",
            (Classification, Regression),
            "Nothing to choose and no Hessian. It follows training through its checkpoints, where influence "
            "functions know its end alone.",
        ),
        "captum-fast": Entry(
            "captum",
            "Captum TracInCPFast",
            (Classification, Regression),
            "The last layer alone, so hardly any time.",
        ),
        "dot": Entry(
            "plain", "gradient dot product", _ALL, "Ten lines, a gradient per example.", environment=False
        ),
        "cosine": Entry(
            "plain",
            "gradient cosine",
            _ALL,
            "The same, and long gradients count no more than short.",
            environment=False,
        ),
        "bm25": Entry(
            "plain",
            "BM25",
            (LanguageModeling,),
            "It needs no model at all, and is immediate.",
            environment=False,
        ),
    }
)
