"""A small Llama that read Python's language reference: where did this completion come from?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whence.attribution import Attribution, attribute
from whence.demo.corpus import START, VOCABULARY, Passage, corpus, passages, train_tokenizer
from whence.exhibit import Exhibit
from whence.progress import ticker
from whence.sources.examples import ListedExamples
from whence.tasks import LanguageModeling

__all__ = ["QUESTIONS", "Question", "TextDemo", "attribute_text", "train_model"]

EPOCHS = 13
BATCH = 8
LEARNING_RATE = 4e-3
WARM_UP = 50
WEIGHT_DECAY = 0.1

#: What the attribution is over: the last layer, without embeddings and head, to keep the demonstration short.
PARAMS = ["model.layers.1.*"]


@dataclass(frozen=True)
class Question:
    """A prompt, the completion that the reference gives, and the topics that state it."""

    prompt: str
    completion: str
    topics: frozenset[str]


#: Prompts in other words than the reference's. Of fourteen written before any result was seen, these are the five
#: to whose completions the trained model gave the lowest loss; right and wrong answers played no part. What `nonlocal`
#: does is said in two topics, in nearly the same words.
QUESTIONS = [
    Question(
        prompt="Cleanup code of a context manager runs even if the block fails, because",
        completion=' "__exit__()" will always be called.',
        topics=frozenset({"with", "context-managers"}),
    ),
    Question(
        prompt="To print a literal curly bracket with str.format, it has to be",
        completion=" escaped by doubling:",
        topics=frozenset({"formatstrings"}),
    ),
    Question(
        prompt="A placeholder statement does nothing: when it runs,",
        completion=" nothing happens.",
        topics=frozenset({"pass"}),
    ),
    Question(
        prompt="A list as default argument is shared between calls, because defaults are evaluated",
        completion=" when the function definition is executed.",
        topics=frozenset({"function"}),
    ),
    Question(
        prompt="To rebind a variable of the outer function from an inner one, its name must refer to",
        completion=" previously bound variables in the nearest enclosing scope",
        topics=frozenset({"nonlocal", "naming"}),
    ),
]


@dataclass(frozen=True)
class TextDemo:
    """What the demonstration found: the passages are the training data, the parameters those of the model."""

    result: Attribution
    questions: Sequence[Question]
    passages: Sequence[Passage]
    num_parameters: int

    @property
    def num_topics(self) -> int:
        """Documents that the passages are from."""
        return len({passage.topic for passage in self.passages})

    @cached_property
    def right(self) -> list[bool]:
        """For each question, whether the top passage by influence is of its topic."""
        return self._of_topic(self.result.scores)

    @cached_property
    def right_by_dot_product(self) -> list[bool]:
        """The same for the plain gradient dot product."""
        return self._of_topic(self.result.gradient_dot_products)

    def _of_topic(self, scores: Tensor) -> list[bool]:
        best = scores.argmax(1).tolist()
        return [
            self.passages[index].topic in question.topics
            for index, question in zip(best, self.questions, strict=True)
        ]


def attribute_text(run_dir: Path | None = None) -> TextDemo:
    """Train, ask, and find the passages behind the completions."""
    documents = corpus()
    tokenizer = train_tokenizer(documents)
    data = passages(documents, tokenizer)
    model = train_model(data)
    task = LanguageModeling()
    start = tokenizer.token_to_id(START)
    queries = []
    for question in QUESTIONS:
        prompt = [start, *tokenizer.encode(question.prompt).ids]
        queries.append(task.query(prompt, tokenizer.encode(question.completion).ids))
    result = attribute(
        model,
        [{"input_ids": passage.input_ids} for passage in data],
        ListedExamples(queries, name="questions", exhibits=[_question(question) for question in QUESTIONS]),
        task=task,
        params=PARAMS,
        describe=lambda _, index: _passage(data[index], tokenizer),
        title="Where did these completions come from?",
        run_dir=run_dir,
        damping="lambda_max/50",
        # The default, the quick answer, finds the same passages in less time, with bars that reach zero. This is half
        # of the passes of conjugate gradients here, and the paper's own.
        solver="lissa",
        refine=1.0,
    )
    return TextDemo(result, QUESTIONS, data, sum(p.numel() for p in model.parameters()))


def _passage(passage: Passage, tokenizer: Any) -> Exhibit:
    tokens = tuple("" if i == 0 else tokenizer.decode([i]) for i in passage.input_ids.tolist())
    return Exhibit(id=passage.name, text=passage.text, tokens=tokens, label=passage.topic)


def _question(question: Question) -> Exhibit:
    expected = " or ".join(sorted(question.topics))
    return Exhibit(id=f"about {expected}", prompt=question.prompt, text=question.completion)


def train_model(data: Sequence[Passage], *, seed: int = 0, epochs: int = EPOCHS) -> nn.Module:
    """A two-layer Llama, trained on the passages and returned in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=128,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    order = torch.Generator().manual_seed(seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    scales = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    batches_per_epoch = len(data) // BATCH
    steps = epochs * batches_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / WARM_UP, 1 - t / steps))
    model.train()
    with ticker("training a language model on Python's manual", steps) as tick:
        for _ in range(epochs):
            shuffled = torch.randperm(len(data), generator=order)[: batches_per_epoch * BATCH]
            for positions in shuffled.split(BATCH):
                loss = _loss(model, [data[i].input_ids for i in positions.tolist()])
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                tick()
    return model.eval()


def _loss(model: nn.Module, sequences: list[Tensor]) -> Tensor:
    """Mean loss per token. Padding is on the right, where a causal model never looks: no mask is needed."""
    inputs = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=0)
    targets = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100)
    logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
