"""Segments of single samples: which rows are of one sample, and what they add up to."""

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from capture_util import assert_close, bias_per_sample, loss_of, ops, per_sample, tracker  # noqa: E402
from dad.torch.observe import _samples as samples_of  # noqa: E402
from dad.torch.slots import num_rows  # noqa: E402

track = pytest.fixture(tracker)


def small_nets():
    yield nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.RMSNorm(6)), (5, 7)
    yield nn.Sequential(nn.Linear(7, 6), nn.LayerNorm((3, 6)), nn.Linear(6, 6)), (5, 3, 7)
    yield (
        nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(120, 3)
        ),
        (4, 2, 5, 4),
    )
    yield (
        nn.Sequential(
            nn.Conv1d(2, 6, 3, bias=False), nn.InstanceNorm1d(6, affine=True), nn.Tanh(), nn.Conv1d(6, 4, 2)
        ),
        (4, 2, 9),
    )


def assert_single_samples(model, batch, loss=loss_of):
    """Σ over samples of g_s², from segments and from one sample at a time; no parameter came formed."""
    reference = copy.deepcopy(model)
    wanted = [torch.zeros_like(param) for param in reference.parameters()]
    for s in range(len(batch)):
        reference.zero_grad()
        loss(reference(batch[s : s + 1])).backward()
        for total, param in zip(wanted, reference.parameters(), strict=True):
            total += param.grad.square()
    loss(model(batch)).backward()
    segments = {param: ops.capture_take(param) for param in model.parameters()}
    riding = {}
    for param, kept in segments.items():
        bias = ops.capture_folded_bias(param)
        if bias is not None:
            riding[bias] = bias_per_sample(bias, kept)
    for (name, param), total in zip(model.named_parameters(), wanted, strict=True):
        assert param.grad is None, name
        parts = riding[param] if param in riding else per_sample(param, segments[param])
        # A sample's squares are of the sum of its parts: of one segment, unless they are of different rows.
        assert len({s.out_begin for s in segments[param]}) == len(segments[param]), name
        assert len(parts) == len(batch), name
        try:
            assert_close(parts.square().sum(0), total, 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("number", range(4))
def test_single_samples_of_a_net(track, number):
    model, shape = list(small_nets())[number]
    track(model.double(), "samples")
    assert_single_samples(model, torch.randn(shape, dtype=torch.float64))


class Tokens(nn.Module):
    """A transformer whose rows lie in every way: B × T × E, T × B × E, and T·B × E."""

    def __init__(self, length, batch_first, padding_idx=None):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": True}
        self.batch_first = batch_first
        self.embed = nn.Embedding(11, 8, padding_idx=padding_idx)
        self.position = nn.Embedding(length, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=10, **options)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, index):
        places = torch.arange(index.shape[1]).expand_as(index)
        x = self.embed(index) + self.position(places)
        x = self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.head(self.norm(x).flatten(0, 1))


@pytest.mark.parametrize(
    ("samples", "length", "batch_first"),
    [
        *((*shape, first) for shape in ((4, 3), (3, 4), (1, 3), (3, 1)) for first in (True, False)),
        (4, 4, True),  # as many positions as samples: the order is seen where attention has changed it
    ],
)
def test_single_samples_of_a_transformer(track, samples, length, batch_first):
    model = Tokens(length, batch_first).double()
    track(model, "samples")
    for batch in (samples, samples + 3):
        assert_single_samples(model, torch.randint(0, 11, (batch, length)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.states = kind(6, 5, **options)
        self.norm = nn.LayerNorm(5)

    def forward(self, index):
        x = self.embed(index)
        if isinstance(self.states, nn.RNNBase):
            return self.norm(self.states(x)[0])
        state = None
        for place in range(x.shape[1]):
            state = self.states(x[:, place], state)
        return self.norm(self.norm(state).tanh())


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.RNNCell, {}), (nn.GRUCell, {}), (nn.GRU, {"batch_first": True}), (nn.LSTM, {"batch_first": True})],
)
def test_single_samples_of_a_recurrent_net(track, kind, options):
    model = Recurrent(kind, **options).double()
    track(model, "samples")
    assert_single_samples(model, torch.randint(0, 11, (4, 3)))


def test_uses_of_other_batches_are_not_merged(track):
    model = nn.Linear(4, 3)
    track(model, "samples")
    for _ in range(2):
        x = torch.randn(5, 4)
        (model(x) * model(2 * x)).sum().backward()
    first, second = ops.capture_take(model.weight)
    assert first.a.shape == second.a.shape == (10, 4) and first.batch != second.batch
    assert torch.equal(second.a.view(5, 2, 4), torch.stack([2 * x, x], 1))


def test_single_samples_with_padding(track):
    model = Tokens(5, True, padding_idx=3).double()
    track(model, "samples")
    index = torch.randint(0, 11, (4, 5))
    index[1, 2:] = 3
    assert_single_samples(model, index)


def test_bags_of_one_size_are_samples_and_others_are_not(track):
    model = nn.EmbeddingBag(9, 4, mode="sum").double()
    track(model, "samples")
    assert_single_samples(model, torch.randint(0, 9, (4, 5)))
    model(torch.randint(0, 9, (8,)), torch.tensor([0, 1, 4, 5])).sum().backward()
    (segment,) = ops.capture_take(model.weight)
    assert not segment.even


def test_rows_in_an_order_that_nobody_knows_are_not_said_to_be_even(track):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)).double()
    track(model, "samples")
    hidden = model[:2](torch.randn(5, 3, 4, dtype=torch.float64))
    rows = torch.cat([hidden[:, i] for i in range(3)])
    loss_of(model[2](rows)).backward()
    (segment,) = ops.capture_take(model[2].weight)
    assert (segment.samples, segment.even) == (5, False)


def test_reshaped_rows_are_of_the_samples_before(track):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    for mode in ("rows", "samples"):
        track(model, mode)
        hidden = model[0](torch.randn(5, 3, 4, dtype=torch.float64))
        loss_of(model[1](hidden.view(15, 4))).backward()
        (segment,) = ops.capture_take(model[1].weight)
        assert (segment.samples, segment.even) == (5, True)
        ops.capture_take(model[0].weight)


def test_positions_first_are_put_in_order_only_where_samples_are_wanted(track):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    for mode in ("rows", "samples"):
        track(model, mode)
        hidden = model[0](x)
        loss_of(model[1](hidden.transpose(0, 1))).backward()
        ops.capture_take(model[0].weight)
        (segment,) = ops.capture_take(model[1].weight)
        assert (segment.samples, segment.even) == (5, mode == "samples")
        inputs = hidden if mode == "samples" else hidden.transpose(0, 1)
        assert torch.equal(segment.a, inputs.detach().reshape(15, 4))


def test_reordered_rows_are_tensors_of_their_own(track):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)).double()
    track(model, "samples")
    index = torch.randint(0, 9, (5, 2))
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    before = x.clone()
    (model[0](index).sum() + model[1](x).sum()).backward()  # the gradient of a sum has no memory
    x.zero_()
    (segment,) = ops.capture_take(model[1].weight)
    assert segment.a.is_contiguous() and segment.d.is_contiguous() and segment.even
    assert torch.equal(segment.a, before.transpose(0, 1).reshape(10, 4))
    assert torch.equal(segment.d, torch.ones(10, 3, dtype=torch.float64))


def test_what_goes_forward_together_is_one_batch(track):
    cell = nn.RNNCell(4, 3)
    track(cell)
    for _ in range(2):
        state = None
        for step in torch.randn(6, 5, 4):
            state = cell(step, state)
        state.sum().backward()
    segments = ops.capture_take(cell.weight_hh)
    assert len(segments) == 12 and len({s.batch for s in segments}) == 2
    assert {s.samples for s in segments} == {5}


def test_rows_of_tokens_are_more_than_the_samples(track):
    model = nn.ModuleList([Tokens(3, True), Recurrent(nn.GRU, batch_first=True), Recurrent(nn.GRUCell)])
    track(model)
    for net in model:
        for _ in range(2):
            loss_of(net(torch.randint(0, 11, (4, 3)))).backward()
    for name, param in model.named_parameters():
        segments = ops.capture_take(param) if param.dim() > 1 else []
        if segments:
            assert samples_of(segments) == 8, name
            assert sum(num_rows(s) for s in segments) > 8, name
