"""Training on several ranks is training on the joined batch; and replicas stay bit-equal."""

import copy

import pytest

from util import check_names, hvd, launched_once

try:
    import torch
    from torch import nn
except ImportError:
    torch = None

NUM_RANKS = 2
STEPS = 50

results = launched_once(__file__, NUM_RANKS)


@pytest.mark.parametrize("check", check_names(__file__))
def test_on_two_ranks(results, check):
    results.assert_passed(check)


def train(model, batches, optimizer, loss_of):
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


def compare(model, make_batch, loss_of, rows=8, **options):
    """50 steps of SGD on `rows` rows per rank, against one process on all of them."""
    rank, size = hvd().rank(), hvd().size()
    model = model.double()
    alone = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    joined = [make_batch(rows * size, generator) for _ in range(STEPS)]
    mine = [(x[rank * rows : (rank + 1) * rows], y[rank * rows : (rank + 1) * rows]) for x, y in joined]

    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), **settings), named_parameters=model.named_parameters(), **options
    )
    train(model, mine, optimizer, loss_of)
    train(alone, joined, torch.optim.SGD(alone.parameters(), **settings), loss_of)
    hvd().check_replicas(model)
    for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def classify(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def vectors(count, generator):
    return (
        torch.randn(count, 10, generator=generator, dtype=torch.float64),
        torch.randint(4, (count,), generator=generator),
    )


def mlp():
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def check_mlp():
    compare(mlp(), vectors, classify)


def check_mlp_in_groups():
    compare(mlp(), vectors, classify, groups=2)


def check_mlp_with_predivide():
    compare(mlp(), vectors, classify, gradient_predivide_factor=2.0)


def check_cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(72, 4)
    )

    def images(count, generator):
        x, y = vectors(count, generator)
        return torch.randn(count, 1, 12, 12, generator=generator, dtype=torch.float64), y

    compare(model, images, classify)


def check_gru():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(5, 8, batch_first=True)
            self.out = nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.gru(x)[0][:, -1])

    def sequences(count, generator):
        _, y = vectors(count, generator)
        return torch.randn(count, 6, 5, generator=generator, dtype=torch.float64), y

    compare(Model(), sequences, classify)


def check_transformer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.out = nn.Linear(16, 4)

        def forward(self, x):
            return self.out(self.body(self.embed(x)).mean(1))

    def tokens(count, generator):
        _, y = vectors(count, generator)
        return torch.randint(20, (count, 6), generator=generator), y

    compare(Model(), tokens, classify)


def check_weighted_ranks_count_by_their_rows():
    rank = hvd().rank()
    model, rows = mlp().double(), [2, 6]
    alone = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), weighted=True
    )
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        x, y = vectors(8, generator)
        part = slice(0, 2) if rank == 0 else slice(2, 8)
        optimizer.zero_grad()
        optimizer.set_batch_size(rows[rank])
        classify(model, x[part], y[part]).backward()
        optimizer.step()
        train(alone, [(x, y)], single, classify)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def batch_norm_matches(sync, plain, shape, rows):
    """rows[rank] rows of the joined batch on each rank."""
    rank = hvd().rank()
    first = sum(rows[:rank])
    generator = torch.Generator().manual_seed(11)
    for _ in range(3):
        joined = torch.randn(sum(rows), *shape, generator=generator, dtype=torch.float64) * 3 + 100
        weights = torch.randn(joined.shape, generator=generator, dtype=torch.float64)
        whole = joined.clone().requires_grad_()
        (plain(whole) * weights).sum().backward()
        mine = joined[first : first + rows[rank]].clone().requires_grad_()
        out = sync(mine)
        (out * weights[first : first + rows[rank]]).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad[first : first + rows[rank]], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(sync.running_mean, plain.running_mean)
    torch.testing.assert_close(sync.running_var, plain.running_var)
    if plain.affine:
        total = hvd().allreduce(sync.weight.grad, op=hvd().Sum)
        torch.testing.assert_close(total, plain.weight.grad)
        torch.testing.assert_close(hvd().allreduce(sync.bias.grad, op=hvd().Sum), plain.bias.grad)
    sync.eval()
    plain.eval()
    probe = torch.randn(2, *shape, dtype=torch.float64)
    torch.testing.assert_close(sync(probe), plain(probe))


def check_sync_batch_norm_equals_batch_norm_on_the_joined_batch():
    for rows in ([4, 4], [1, 7], [5, 0]):
        batch_norm_matches(hvd().SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double(), (3,), rows)
        batch_norm_matches(hvd().SyncBatchNorm(3).double(), nn.BatchNorm2d(3).double(), (3, 4, 5), rows)
    options = {"affine": False, "momentum": None}
    batch_norm_matches(
        hvd().SyncBatchNorm(3, **options).double(), nn.BatchNorm1d(3, **options).double(), (3,), [2, 3]
    )


def check_sync_batch_norm_in_half_precision_and_without_running_statistics():
    layer = hvd().SyncBatchNorm(3, track_running_stats=False)
    x = torch.randn(4, 3).bfloat16().requires_grad_()
    out = layer(x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="2 dimensions"):
        layer(torch.ones(3))
