"""A GPT-NeoX language model and its training on real text: what codecs are measured on.

Parallel residuals, rotary embeddings over a quarter of each head, an untied head (Black et al.,
arXiv:2204.06745), AdamW, bf16 autocast. Text: the English of the documentation strings of Python's
library, and of what torch needs; cut into pieces by a byte-pair tokenizer that is trained on it.
"""

import ast
import itertools
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PACKAGES = ("torch", "numpy", "sympy", "networkx")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; the default has 17 million parameters."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    vocabulary: int = 8192
    context: int = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """How it is trained."""

    steps: int = 2000
    warm_up: int = 100
    rate: float = 1e-3
    batch: int = 8
    beta2: float = 0.95
    decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Return the learning rate: a linear warm-up, then half a cosine to a tenth."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


class Layer(nn.Module):
    """Attention and a perceptron, side by side on one residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.rotary = shape.heads, width // shape.heads // 4
        self.input_norm, self.post_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Take and return (batch, tokens, width)."""
        parts = self.qkv(self.input_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        q, k = self._turn(q, *angles), self._turn(k, *angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.dense(mixed.transpose(1, 2).flatten(2))
        widened: Tensor = self.down(F.gelu(self.up(self.post_norm(x))))
        return x + attended + widened

    def _turn(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        turned, rest = x[..., : self.rotary], x[..., self.rotary :]
        one, two = turned.chunk(2, dim=-1)
        other = torch.cat((-two, one), dim=-1)
        return torch.cat((turned * cosine + other * sine, rest), dim=-1)


class NeoX(nn.Module):
    """The model; the names of its parameters are those of its parts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_in = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.width)
        self.embed_out = nn.Linear(shape.width, shape.vocabulary, bias=False)
        rotary = shape.width // shape.heads // 4
        frequencies = 10000 ** (-torch.arange(0, rotary, 2) / rotary)
        angles = torch.outer(torch.arange(shape.context), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = 2 / shape.layers if name.endswith(("dense.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=math.sqrt(2 / (5 * shape.width)) * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Take (batch, tokens); return scores of the next token, (batch, tokens, vocabulary)."""
        x = self.embed_in(tokens)
        angles = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, angles)
        scores: Tensor = self.embed_out(self.final_norm(x))
        return scores


def read_text() -> str:
    """Return the documentation strings of Python's library and some packages, file by file."""
    parts = []
    for path in _sources():
        try:
            tree = ast.parse(path.read_text(errors="ignore"))
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        strings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        parts += [string for string in strings if string]
    return "\n\n".join(parts)


def _sources() -> list[Path]:
    """Return 16 MB of programs that are where torch is, but for their tests."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    found = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    for name in PACKAGES:
        found += sorted((packages / name).rglob("*.py"))
    return [path for path in found if not {"test", "tests"} & set(path.parts)]


def tokenize(text: str, vocabulary: int) -> Tensor:
    """Train a byte-pair tokenizer on a text and cut it up; int64."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=vocabulary, show_progress=False)
    return torch.tensor(tokenizer.encode(text).ids)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Make AdamW, which decays matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    betas = (0.9, recipe.beta2)
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=betas, weight_decay=recipe.decay)


def batches(tokens: Tensor, shape: Shape, recipe: Recipe, first: int) -> Iterator[Tensor]:
    """Yield the batches from step ``first`` on: (batch, context + 1), a function of the step."""
    step = first
    while True:
        draw = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        starts = torch.randint(len(tokens) - shape.context - 1, (recipe.batch,), generator=draw)
        yield torch.stack([tokens[s : s + shape.context + 1] for s in starts.tolist()])
        step += 1


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of the next tokens."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        scores = model(batch[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())


@dataclass(slots=True)
class Training:
    """A model, its optimizer, and the steps that were done: what is next follows from these."""

    model: NeoX
    optimizer: torch.optim.AdamW
    tokens: Tensor
    shape: Shape
    recipe: Recipe
    step: int = 0

    def run(self, steps: int, *, shown_every: int = 0) -> list[float]:
        """Train so many steps; return the loss of each."""
        losses = []
        coming = batches(self.tokens, self.shape, self.recipe, self.step)
        for batch in itertools.islice(coming, steps):
            losses.append(self._do(batch.to(self.model.embed_in.weight.device)))
            if shown_every and self.step % shown_every == 0:
                print(f"step {self.step}: loss {losses[-1]:.3f}", flush=True)
        return losses

    def _do(self, batch: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        loss = loss_of(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())


def start(tokens: Tensor, shape: Shape, recipe: Recipe, device: str = "cpu") -> Training:
    """Make a model and its optimizer, at step 0."""
    torch.manual_seed(recipe.seed)
    model = NeoX(shape).to(device)
    return Training(model, make_optimizer(model, recipe), tokens, shape, recipe)
