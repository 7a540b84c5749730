"""Capture: the segments of every parameter and its .grad add up to what torch alone computes."""

import copy
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from capture_util import assert_close, assert_same_gradients, check, ops, square, totals, tracker  # noqa: E402

track = pytest.fixture(tracker)


# Linear


@pytest.mark.parametrize("mode", ["rows", "rows_and_dense"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (2, 3, 2, 7), (7,), (0, 7), (2, 0, 7), (1, 7)])
def test_linear_with_any_leading_dimensions(track, shape, bias, mode):
    x = torch.randn(shape)
    segments = check(nn.Linear(7, 4, bias), lambda m: square(m(x)), track, mode=mode)
    (segment,) = next(iter(segments.values()))
    assert segment.samples == (shape[0] if len(shape) > 1 else 1)
    assert segment.has_bias == bias


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(track, dtype):
    x = torch.randn(6, 7).to(dtype)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)
    segments = check(model, lambda m: square(m(x)), track)
    assert all(segment.a.dtype == dtype for kept in segments.values() for segment in kept)


def test_non_contiguous_inputs_and_gradients(track):
    x = torch.randn(7, 3, 5).permute(1, 2, 0)
    model = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 4))
    check(model, lambda m: square(m(x).transpose(0, 1)) + m(x[:, ::2]).sum(), track)


def test_the_product_is_never_computed(track):
    class Shapes(TorchDispatchMode):
        seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.seen.append((str(func), tuple(result.shape)))
            return result

    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    loss = model(torch.randn(4, 7)).sum()
    track(model)
    loss_tracked = model(torch.randn(4, 7)).sum()
    with Shapes():
        loss.backward()
    assert ("aten.mm.default", (5, 7)) in Shapes.seen and ("aten.mm.default", (3, 5)) in Shapes.seen
    Shapes.seen.clear()
    model.zero_grad()
    with Shapes():
        loss_tracked.backward()
    assert ("aten.mm.default", (4, 5)) in Shapes.seen  # the gradient of the input is
    assert not [shape for _, shape in Shapes.seen if shape in ((5, 7), (3, 5))]
    assert all(param.grad is None for param in model.parameters())


def test_hooks_fire_once_per_backward_with_nothing_in_grad(track):
    model = nn.Linear(7, 4)
    track(model)
    fired = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, p.grad)))
    x = torch.randn(3, 7)
    (model(x).sum() + model(2 * x).sum()).backward()
    assert sorted(fired) == [("bias", None), ("weight", None)]
    assert ops.capture_count(model.weight) == 2


def test_the_users_batch_is_copied_and_activations_are_not(track):
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    track(model)
    x = torch.randn(4, 7)
    before = x.clone()
    hidden = model[:2](x)
    model[2](hidden).sum().backward()
    x.zero_()
    (first,) = ops.capture_take(model[0].weight)
    (second,) = ops.capture_take(model[2].weight)
    assert torch.equal(first.a, before)
    assert second.a.data_ptr() == hidden.data_ptr()


def test_a_view_of_the_users_batch_is_copied(track):
    model = nn.Linear(8, 3)
    track(model)
    x = torch.randn(4, 2, 4, requires_grad=True)
    before = x.detach().clone()
    model(x.flatten(1)).sum().backward()
    x.data.zero_()
    (segment,) = ops.capture_take(model.weight)
    assert torch.equal(segment.a, before.flatten(1))


def test_an_activation_changed_after_backward_is_an_error(track):
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    track(model)
    hidden = model[:2](torch.randn(4, 7))
    model[2](hidden).sum().backward()
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        ops.capture_take(model[2].weight)


# Convolutions

CONVOLUTIONS = [
    {"kernel_size": 3},
    {"kernel_size": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "dilation": 2, "padding": 1, "bias": False},
    {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 1, "groups": 4},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 1, "stride": 2},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(track, dims, options):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(kind(4, 8, **options), nn.ReLU(), kind(8, 4, **options))
    x = torch.randn(2, 4, *(9, 8, 7)[:dims])
    segments = check(model, lambda m: square(m(x)), track)
    groups = options.get("groups", 1)
    assert len(segments[model[0].weight]) == groups
    assert segments[model[0].weight][0].samples == 2
    alone = x[0]
    model.zero_grad()
    track(model, "off")
    check(model, lambda m: square(m(alone)), track, mode="rows_and_dense")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_convolution_dtypes_and_channels_last(track, dtype):
    model = nn.Conv2d(4, 6, 3, padding=1).to(dtype).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 6, dtype=dtype).contiguous(memory_format=torch.channels_last)
    check(model, lambda m: square(m(x)), track)


def test_one_by_one_convolution_of_the_users_batch_is_copied(track):
    model = nn.Conv2d(4, 6, 1)
    track(model)
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    before = x.permute(0, 2, 3, 1).reshape(-1, 4).clone()
    model(x).sum().backward()
    x.zero_()
    (segment,) = ops.capture_take(model.weight)
    assert torch.equal(segment.a, before)


def test_transposed_convolution_is_left_to_torch(track):
    x = torch.randn(2, 4, 5)
    model = nn.ConvTranspose1d(4, 6, 3)
    check(model, lambda m: square(m(x)), track, captured=[])
    assert ops.capture_reason(model.weight) == "a transposed convolution"


# Embeddings


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"max_norm": 0.5}], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 5), (0,), ()])
def test_embedding(track, shape, options):
    index = torch.randint(0, 9, shape)
    segments = check(nn.Embedding(9, 4, **options), lambda m: square(m(index)), track)
    (segment,) = next(iter(segments.values()))
    if "padding_idx" in options:
        assert not (segment.index == options["padding_idx"] % 9).any()


def test_embedding_copies_the_index(track):
    model = nn.Embedding(9, 4)
    track(model)
    index = torch.randint(0, 9, (3, 2), dtype=torch.int32)
    for batch in (index, index.long()):
        before = batch.clone()
        model(batch).sum().backward()
        batch.zero_()
        (segment,) = ops.capture_take(model.weight)
        assert torch.equal(segment.index, before.flatten().long())


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"sparse": True}, "sparse=True"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True")],
)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_are_declined(track, kind, options, reason):
    model = kind(9, 4, **options)
    track(model)
    index = torch.tensor([[1, 2], [1, 3]])
    model(index).sum().backward()
    assert not ops.capture_take(model.weight)
    assert ops.capture_reason(model.weight) == reason
    assert model.weight.grad is not None


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"include_last_offset": True}], ids=str)
def test_embedding_bag(track, mode, options):
    index = torch.tensor([1, 3, 3, 0, 8, 3, 5, 3])
    offsets = torch.tensor([0, 2, 2, 5, 7, 8] if options.get("include_last_offset") else [0, 2, 2, 5, 7])
    check(nn.EmbeddingBag(9, 4, mode=mode, **options), lambda m: square(m(index, offsets)), track)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_of_a_matrix_and_of_nothing(track, mode):
    index = torch.randint(0, 9, (3, 4))
    empty = torch.zeros(0, dtype=torch.int64)
    model = nn.EmbeddingBag(9, 4, mode=mode)
    check(model, lambda m: square(m(index)) + square(m(empty, torch.tensor([0, 0]))), track)


def test_embedding_bag_with_sample_weights(track):
    index = torch.randint(0, 9, (3, 4))
    factors = torch.randn(3, 4)
    check(
        nn.EmbeddingBag(9, 4, mode="sum"),
        lambda m: square(m(index, per_sample_weights=factors)),
        track,
    )
    model = nn.EmbeddingBag(9, 4, mode="sum")
    factors.requires_grad_()
    check(model, lambda m: square(m(index, per_sample_weights=factors)), track, captured=[])
    assert "per_sample_weights" in ops.capture_reason(model.weight)


def test_embedding_bag_max_is_left_to_torch(track):
    index = torch.randint(0, 9, (3, 4))
    model = nn.EmbeddingBag(9, 4, mode="max")
    check(model, lambda m: square(m(index)), track, captured=[])
    assert ops.capture_reason(model.weight) == 'mode="max"'


# Attention, recurrent nets, transformers


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(track, batch_first):
    x = torch.randn(3, 5, 8)
    model = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    check(model, lambda m: square(m(x, x, x)[0]), track)


def test_attention_over_another_sequence_uses_blocks_of_the_packed_weight(track):
    x, memory, values = torch.randn(3, 5, 8), torch.randn(3, 6, 8), torch.randn(3, 6, 8)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    segments = check(model, lambda m: square(m(x, memory, memory)[0]), track)
    kept = segments[model.in_proj_weight]
    assert sorted((s.out_begin, s.d.shape[1], s.has_bias) for s in kept) == [(0, 8, True), (8, 16, True)]
    model.zero_grad()
    segments = check(model, lambda m: square(m(x, memory, values)[0]), track)
    kept = segments[model.in_proj_weight]
    assert sorted((s.out_begin, s.d.shape[1]) for s in kept) == [(0, 8), (8, 8), (16, 8)]


def test_attention_with_other_key_and_value_sizes(track):
    query, key, value = torch.randn(5, 3, 8), torch.randn(6, 3, 4), torch.randn(6, 3, 7)
    model = nn.MultiheadAttention(8, 2, kdim=4, vdim=7)
    # One bias for three weights: it has no weight to ride with.
    names = {name for name, _ in model.named_parameters()} - {"in_proj_bias"}
    check(model, lambda m: square(m(query, key, value)[0]), track, captured=names)
    assert ops.capture_reason(model.in_proj_bias) == "it does not go with the rows of its weight"


def test_attention_with_bias_kv_in_part(track):
    x = torch.randn(5, 3, 8)
    model = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    names = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    check(model, lambda m: square(m(x, x, x)[0]), track, captured=names)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells_over_several_steps(track, kind):
    x = torch.randn(4, 3, 6)

    def run(cell):
        state = None
        for step in x:
            state = cell(step, state)
        return square(state[0] if isinstance(state, tuple) else state)

    segments = check(kind(6, 5), run, track)
    assert {len(kept) for kept in segments.values()} == {0, 4}


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str
)
def test_recurrent_modules(track, kind, options):
    x = torch.randn(4, 3, 6)
    check(kind(6, 5, **options), lambda m: square(m(x)[0]), track)


def test_lstm_in_float64_is_captured_and_the_fused_one_is_named(track):
    x = torch.randn(4, 3, 6)
    check(nn.LSTM(6, 5).double(), lambda m: square(m(x.double())[0]), track)
    model = nn.LSTM(6, 5)
    check(model, lambda m: square(m(x)[0]), track, captured=[])
    assert ops.capture_reason(model.weight_ih_l0) == "fused recurrent kernel"


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_layers(track, norm_first, activation):
    options = {"dim_feedforward": 12, "dropout": 0.1, "activation": activation, "norm_first": norm_first}
    x, memory = torch.randn(5, 3, 8), torch.randn(6, 3, 8)
    encoder = nn.TransformerEncoderLayer(8, 2, **options)
    names = {name for name, _ in encoder.named_parameters() if "norm" not in name}
    check(encoder, lambda m: square(m(x)), track, captured=names)
    decoder = nn.TransformerDecoderLayer(8, 2, **options)
    names = {name for name, _ in decoder.named_parameters() if "norm" not in name}
    check(decoder, lambda m: square(m(x, memory)), track, captured=names)


# Parameters shared, frozen, changed, used elsewhere


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        return self.head(self.body(self.embed(index)).tanh())


def test_tied_embedding_and_head(track):
    index = torch.randint(0, 9, (3, 5))
    model = Tied()
    segments = check(model, lambda m: square(m(index)), track)
    assert [segment.kind for segment in segments[model.embed.weight]] == ["rows", "indexed"]


def test_a_module_used_several_times(track):
    x = torch.randn(3, 5)
    model = nn.Linear(5, 5)
    segments = check(model, lambda m: square(m(m(m(x).tanh()).tanh())), track)
    assert len(segments[model.weight]) == 3


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen(track, frozen):
    x = torch.randn(3, 5, requires_grad=True)
    model = nn.Linear(5, 4)
    getattr(model, frozen).requires_grad_(False)
    check(model, lambda m: square(m(x)), track, captured=["weight"] if frozen == "bias" else [])


def test_used_outside_of_its_module_too(track):
    x = torch.randn(3, 5)
    model = nn.Linear(5, 4)
    reference = copy.deepcopy(model)
    track(model)
    for module in (reference, model):
        (square(module(x)) + module.weight.square().sum() + module.bias.cos().sum()).backward()
    assert_close(model.weight.grad, 2 * model.weight.detach(), 1e-6)
    sums, _ = totals(model.parameters())
    assert_close(sums[model.weight], reference.weight.grad.double(), 1e-6)
    assert_close(sums[model.bias], reference.bias.grad.double(), 1e-6)


def test_a_bias_of_two_weights_rides_with_the_first(track):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 4)
            self.second.bias = self.first.bias

        def forward(self, x):
            return self.first(x) * self.second(x)

    x = torch.randn(3, 5)
    model = Both()
    reference = copy.deepcopy(model)
    track(model)
    for module in (reference, model):
        square(module(x)).backward()
    segments = assert_same_gradients(model, reference)
    assert segments[model.first.weight][0].has_bias and not segments[model.second.weight][0].has_bias
    assert ops.capture_reason(model.first.bias) == "it is used with more than one weight"


def test_a_pair_can_be_named_in_advance(track):
    first, second = nn.Linear(5, 4), nn.Linear(5, 4)
    track(first)
    track(second)
    ops.capture_fold_bias(second.weight, first.bias)
    assert ops.capture_folded_bias(second.weight) is first.bias
    first(torch.randn(3, 5)).sum().backward()
    assert first.bias.grad is not None
    assert not ops.capture_take(first.weight)[0].has_bias
    with pytest.raises(ValueError, match="partner"):
        ops.capture_fold_bias(second.weight, second.bias)
    too_short = nn.Parameter(torch.zeros(3))
    track([too_short])
    with pytest.raises(ValueError, match="one element for each row"):
        ops.capture_fold_bias(first.weight, too_short)


def test_weight_norm_is_left_to_torch(track):
    x = torch.randn(3, 5)
    for wrap in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        model = wrap(nn.Linear(5, 4))
        reference = copy.deepcopy(model)
        track(model)
        for module in (reference, model):
            square(module(x)).backward()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(param.grad, other.grad, 1e-5)
            assert not ops.capture_take(param)
            assert ops.capture_reason(param) == "its gradient came from an op without factors"


# The registry


def test_modes_and_lifetime(track):
    model = nn.Linear(5, 4)
    x = torch.randn(3, 5)
    first, second = track(model)
    assert second == first + 1
    assert ops.capture_track(model.weight, "rows") == first
    loss = model(x).sum()
    ops.capture_set_mode(model.weight, "off")
    loss.backward()  # ran forward as captured, and off now
    assert model.weight.grad is not None and ops.capture_count(model.weight) == 0
    ops.capture_set_mode(model.weight, "rows")
    loss = model(x).sum()
    ops.capture_untrack(model.weight)
    model.zero_grad()
    loss.backward()
    assert model.weight.grad is not None
    with pytest.raises(ValueError, match="not tracked"):
        ops.capture_take(model.weight)
    with pytest.raises(ValueError, match="mode"):
        ops.capture_track(model.weight, "sideways")
    with pytest.raises(ValueError, match="leaf"):
        ops.capture_track(model.weight * 2, "rows")


def test_a_parameter_that_is_gone_is_forgotten(track):
    model = nn.Linear(5, 4)
    for param in model.parameters():
        ops.capture_track(param, "rows")
    model(torch.randn(3, 5)).sum().backward()
    gone = weakref.ref(model.weight)
    del model, param
    assert gone() is None
    track(nn.Linear(5, 4))


def test_samples_of_the_earliest_op(track):
    index = torch.randint(0, 9, (3, 5))
    model = Tied()
    params = list(model.parameters())
    track(model)
    assert ops.capture_samples(params) == -1
    model(index).flatten(0, 1).sum().backward()
    assert ops.capture_samples(params) == 3
    assert ops.capture_samples([model.body.weight]) == 3
    ops.capture_begin_step(params)
    assert ops.capture_samples(params) == -1
    assert ops.capture_count(model.embed.weight) == 0
