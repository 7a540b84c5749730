"""What the tests of factor methods share: layers of every type, and a comparison with the dense mean."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from util import hvd, slow_link

D = 48  # layers this large are cheaper as factors, up to a dozen rows
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass
class Case:
    """A model, its input for so many samples, and which tensors have to go as factors."""

    model: Any  # () -> module
    batch: Any  # (samples, generator, dtype) -> inputs
    factors: Any = None  # names; None: those of two dimensions or more
    run: Any = None  # (model, *inputs) -> output
    runs_empty: bool = True  # also with no samples
    options: dict = field(default_factory=dict)

    def loss(self, model, inputs):
        output = (self.run or (lambda model, *inputs: model(*inputs)))(model, *inputs)
        return (output * torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype)).sin().sum()


def vectors(*shape):
    def make(samples, generator, dtype):
        return (torch.randn(samples, *shape, generator=generator, dtype=dtype),)

    return make


def tokens(count, *shape):
    def make(samples, generator, dtype):
        return (torch.randint(count, (samples, *shape), generator=generator),)

    return make


class Chain(nn.Sequential):
    """Five layers with an activation between them."""

    def __init__(self, activation, width=D):
        layers = []
        for i in range(5):
            layers += [nn.Linear(width, width if i < 4 else 10), activation()]
        super().__init__(*layers[:-1])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """Embedding and head are one tensor; the head has a bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(D, 2 * D)
        self.head = nn.Linear(2 * D, D)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


class Outside(nn.Module):
    """A weight and a bias that are also used outside of their module."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        y = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return y + self.a.weight.square().sum() * 1e-2 + self.b.bias * 1e-2


class Attention(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True, **sizes)

    def forward(self, x, y=None):
        y = x if y is None else y
        return self.attention(x, y, y)[0]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body = kind(D, D, batch_first=True)

    def forward(self, x):
        return self.body(x)[0]


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(D, D)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x, x.flip(1))


def frozen(part):
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    getattr(model[0], part).requires_grad_(False)
    return model


def methods():
    c = hvd().Compression
    return {"dad": c.dad(), "edad": c.edad(), "exact": c.exact()}


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def mean(grads, model, process_set):
    """The mean over ranks, of zeros where a rank has no gradient."""
    named = dict(model.named_parameters())
    filled = [grads[n] if grads[n] is not None else torch.zeros_like(named[n]) for n in grads]
    reduced = hvd().grouped_allreduce(filled, op=hvd().Average, process_set=process_set)
    return dict(zip(grads, reduced, strict=True))


def assert_equal_gradients(model, expected, tolerance, where=""):
    for name, grad in gradients(model).items():
        scale = max(expected[name].abs().max().item(), 1e-30)
        error = (grad - expected[name]).abs().max().item() / scale
        assert error <= tolerance, f"{where}: {name}: {error:.2e}"


def assert_same_bits(model, process_set):
    """As check_replicas, in a process set."""
    for name, p in model.named_parameters():
        if p.grad is not None:
            all_ranks = hvd().allgather(p.grad.reshape(1, -1).contiguous(), process_set=process_set)
            assert (all_ranks == all_ranks[0]).all() or all_ranks.isnan().all(), name


def compare(
    case, method, dtype=torch.float64, rows=None, steps=3, process_set=None, expect_factors=True, **options
):
    """Gradients against the dense mean from the same weights, step by step. rows[rank]: samples of a rank."""
    process_set = process_set or hvd().global_process_set
    rank, size = process_set.rank(), process_set.size()
    rows = rows or [2] * size
    torch.manual_seed(5)
    model = case.model().to(dtype)
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=method,
        process_set=process_set,
        **{**case.options, **options},
    )
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(steps):
        batch = case.batch(rows[rank], generator, dtype)
        skips = rows[rank] == 0 and (not case.runs_empty or step % 2 == 1)
        twin = copy.deepcopy(model)
        for param in twin.parameters():
            param.grad = None
        optimizer.zero_grad()
        if not skips:
            case.loss(twin, batch).backward()
            case.loss(model, batch).backward()
        expected = mean(gradients(twin), twin, process_set)
        optimizer.synchronize()
        assert_equal_gradients(model, expected, TOLERANCE[dtype], f"{method.spec()} step {step} {dtype}")
        with optimizer.skip_synchronize():
            optimizer.step()
        if size == hvd().size():
            hvd().check_replicas(model)
        else:
            assert_same_bits(model, process_set)
    if expect_factors and size > 1:
        wanted = {n for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad}
        wanted = wanted if case.factors is None else set(case.factors)
        sent = {row["name"] for row in optimizer.plan() if row["method"] in ("dad", "edad")}
        sent = {n for n, p in model.named_parameters() if n in sent and p.dim() > 1 and p.requires_grad}
        assert sent == wanted, optimizer.plan()
    return optimizer


def assert_exact(case, steps=3):
    """All exact methods, both types, even and uneven batches, a rank without samples."""
    dad, edad, exact = methods().values()
    uneven = {"rows": [1, 3, 0, 2], "expect_factors": False}
    with slow_link():
        compare(case, dad, torch.float64, steps=steps)
        compare(case, dad, torch.float32, steps=steps, **uneven)
        compare(case, edad, torch.float32, steps=steps)
        compare(case, edad, torch.float64, steps=steps, **uneven)
        compare(case, exact, torch.float64, steps=steps, **uneven)


ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


def weight_norm(layer):
    return nn.utils.parametrizations.weight_norm(layer)


def log_softmax(model, x):
    return F.log_softmax(model(x), -1)
