"""How good a language model is on held-out text: loss, distance to another model, two tasks.

The tasks are made of the text alone. Cloze: the next piece, at every place. Choice: which of four
pieces of text goes on where a context ends; the true one, or one of three from elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from neox import NeoX, Shape
from torch import Tensor
from torch.nn import functional as F

SEQUENCES = 64  # as many contexts
QUESTIONS, CHOICES, ASKED = 128, 4, 16  # ASKED: pieces of an answer
BATCH = 8


@dataclass(frozen=True, slots=True)
class Test:
    """Held-out text.

    Attributes:
        text: (sequences, context + 1).
        questions: (questions, choices, context + 1); the first choice is the true one.
    """

    text: Tensor
    questions: Tensor


@dataclass(frozen=True, slots=True)
class Grades:
    """What a model does on a test.

    Attributes:
        losses: mean cross entropy of each sequence.
        divergence: mean Kullback-Leibler divergence of the next piece from the exact model, nats.
        cloze, choice: share of right answers.
    """

    losses: list[float]
    divergence: float
    cloze: float
    choice: float


def make_test(tokens: Tensor, shape: Shape) -> Test:
    """Make a test of text that no training has seen."""
    size = shape.context + 1
    places = torch.linspace(0, len(tokens) - size, SEQUENCES).long().tolist()
    text = torch.stack([tokens[at : at + size] for at in places])
    places = torch.linspace(0, len(tokens) - size, QUESTIONS).long().tolist()
    asked = torch.stack([tokens[at : at + size] for at in places])
    draw = torch.Generator().manual_seed(0)
    ends = [asked[:, -ASKED:]]
    for _ in range(1, CHOICES):
        ends.append(asked[torch.randperm(QUESTIONS, generator=draw), -ASKED:])
    questions = [torch.cat((asked[:, :-ASKED], end), dim=1) for end in ends]
    return Test(text, torch.stack(questions, dim=1))


@torch.no_grad()
def grade(model: NeoX, test: Test, exact: NeoX | None = None) -> Grades:
    """Return what a model does on a test, in f32.

    Args:
        exact: what it is to be like; default: itself.
    """
    losses: list[float] = []
    divergence, right = 0.0, 0
    for batch in test.text.split(BATCH):
        scores = _scores(model, batch)
        target = batch[:, 1:].to(scores.device)
        losses += F.nll_loss(scores.transpose(1, 2), target, reduction="none").mean(dim=1).tolist()
        right += int((scores.argmax(dim=-1) == target).sum())
        if exact is not None:
            good = _scores(exact, batch)
            divergence += float((good.exp() * (good - scores)).sum())
    count = test.text[:, 1:].numel()
    chosen = torch.tensor(list(_chosen(model, test)))
    choice = float((chosen == 0).double().mean())
    return Grades(losses, divergence / count, right / count, choice)


def _scores(model: NeoX, batch: Tensor) -> Tensor:
    """Return the logarithms of the probabilities of the next piece, (batch, tokens, vocabulary)."""
    batch = batch.to(model.embed_in.weight.device)
    return F.log_softmax(model(batch[:, :-1]).float(), dim=-1)


def _chosen(model: NeoX, test: Test) -> Iterator[int]:
    for batch in test.questions.split(BATCH // 2):
        flat = batch.flatten(0, 1)
        scores = _scores(model, flat)[:, -ASKED:]
        found = scores.gather(2, flat[:, -ASKED:, None].to(scores.device)).sum(dim=(1, 2))
        yield from found.view(-1, CHOICES).argmax(dim=1).tolist()
