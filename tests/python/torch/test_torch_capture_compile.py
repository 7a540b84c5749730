"""Capture in compiled graphs."""

import copy
import io

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from capture_util import assert_close, assert_same_gradients, check, ops, square, take, tracker  # noqa: E402
from dad.torch import capture  # noqa: E402

track = pytest.fixture(tracker)
BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def compiled(backend, **options):
    return lambda model: torch.compile(model, backend=backend, fullgraph=True, **options)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.grouped = nn.Conv1d(8, 8, 3, padding="same", groups=2)
        self.strided = nn.Conv1d(8, 8, 3, padding=1, stride=2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        x = self.embed(index)
        memory = self.strided(self.grouped(x.mT).relu()).mT
        return self.head(self.decoder(self.encoder(x), memory))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_layers(track, backend):
    model = Everything()
    index = torch.randint(0, 11, (3, 6))
    names = {name for name, _ in model.named_parameters() if "norm" not in name}
    run = lambda m: square(m(index))  # noqa: E731
    segments = check(model, run, track, captured=names, passes=2, wrap=compiled(backend))
    kept = segments[model.decoder.multihead_attn.in_proj_weight]
    assert sorted((s.out_begin, s.d.shape[1]) for s in kept) == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert ops.capture_samples(list(model.parameters())) == 3


@pytest.mark.parametrize(("backend", "dims"), [("aot_eager", 2), ("aot_eager", 3), ("inductor", 2)])
def test_convolutions_of_more_dimensions(track, backend, dims):
    kind = (nn.Conv2d, nn.Conv3d)[dims - 2]
    model = nn.Sequential(kind(2, 4, 3, padding=1), nn.ReLU(), kind(4, 4, 2, stride=2, bias=False))
    x = torch.randn(2, 2, *(6, 5, 4)[:dims])
    check(model, lambda m: square(m(x)), track, wrap=compiled(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(track, backend):
    model = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Unflatten(1, (4, 2)), nn.Conv1d(4, 4, 1))
    x = torch.randn(6, 7)

    def run(module):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x).float().square().mean()

    segments = check(model, run, track, tolerance=0.05, wrap=compiled(backend))
    assert segments[model[0].weight][0].a.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_use_twice_counts_twice(track, backend):
    model = nn.Linear(5, 4)
    x = torch.randn(3, 5)
    reference = copy.deepcopy(model)
    track(model)
    twice = torch.compile(lambda x: model(x) + model(x), backend=backend, fullgraph=True)
    square(twice(x)).backward()
    square(2 * reference(x)).backward()
    segments = assert_same_gradients(model, reference)
    assert len(segments[model.weight]) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_batch_sizes(track, backend):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    reference = copy.deepcopy(model)
    track(model)
    run = compiled(backend, dynamic=True)(model)
    for rows in (2, 7, 5):
        x = torch.randn(rows, 5)
        square(run(x)).backward()
        square(reference(x)).backward()
    segments = assert_same_gradients(model, reference)
    assert [segment.samples for segment in segments[model[0].weight]] == [2, 7, 5]


def test_modes_may_change_after_the_graph_was_made(track):
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.Conv1d(4, 4, 3))
    reference = copy.deepcopy(model)
    track(model)
    index = torch.randint(0, 9, (3, 4))
    graphs = []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    run = torch.compile(model, backend=backend, fullgraph=True)
    square(reference(index)).backward()
    for mode in ("rows", "rows_and_dense", "off", "rows"):
        for param in model.parameters():
            ops.capture_set_mode(param, mode)
            param.grad = None
        square(run(index)).backward()
        sums, segments = take(model.parameters())
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            if mode != "off":
                assert_close(sums[param], other.grad, 1e-5)
            if mode != "rows":
                assert_close(param.grad, other.grad, 1e-5)
            else:
                assert param.grad is None
            assert not (mode == "off" and segments[param])
    assert len(graphs) == 1


def test_tracking_may_start_and_end_after_the_graph_was_made(track):
    model = nn.Linear(5, 4)
    reference = copy.deepcopy(model)
    x = torch.randn(3, 5)
    square(reference(x)).backward()
    run = compiled("aot_eager")(model)
    square(run(x)).backward()
    assert_close(model.weight.grad, reference.weight.grad, 1e-6)
    track(model)
    model.zero_grad()
    square(run(x)).backward()
    assert model.weight.grad is None
    assert_same_gradients(model, reference)
    loss = square(run(x))
    for param in model.parameters():
        capture.untrack(param)
    loss.backward()  # its forward ran when they were tracked
    assert_close(model.weight.grad, reference.weight.grad, 1e-6)
    assert_close(model.bias.grad, reference.bias.grad, 1e-6)
    model.zero_grad()
    square(run(x)).backward()
    assert_close(model.weight.grad, reference.weight.grad, 1e-6)


def test_evaluation_and_frozen_weights(track):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    x = torch.randn(3, 5)
    run = compiled("aot_eager")
    check(model, lambda m: square(m(x)), track, captured=["2.weight", "2.bias"], wrap=run)
    with torch.no_grad():
        assert_close(run(model)(x), model(x), 1e-6)
    assert ops.capture_count(model[2].weight) == 0


def test_what_a_graph_cannot_give_is_an_error(track):
    model = nn.Linear(5, 4)
    track(model)
    x = torch.randn(3, 5, requires_grad=True)
    run = compiled("aot_eager")(model)
    square(run(x)).backward(inputs=[x])
    assert x.grad is not None and ops.capture_count(model.weight) == 0
    square(run(x)).backward(inputs=[model.weight])
    assert len(ops.capture_take(model.weight)) == 1
    with pytest.raises(RuntimeError, match="cannot return it"):
        torch.autograd.grad(square(run(x)), [model.weight])
    model.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match="hook"):
        square(run(x)).backward()


def test_copies_and_pickles_are_not_tracked(track):
    model = nn.Linear(5, 4)
    track(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    x = torch.randn(3, 5)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        square(compiled("aot_eager")(other)(x)).backward()
        assert other.weight.grad is not None
    assert ops.capture_count(model.weight) == 0


def test_an_exported_program_has_only_ops_of_torch(track):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    track(model)
    for strict in (True, False):
        program = torch.export.export(model, (torch.randn(3, 5),), strict=strict)
        assert "dad" not in str(program.graph)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing(track, backend):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(3, 5, requires_grad=True)
    reference = copy.deepcopy(model)
    track(model)
    run = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend=backend)
    square(run(x)).backward()
    square(reference(x)).backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.GRU, nn.LSTM, nn.EmbeddingBag])
def test_layers_without_an_op_are_right_all_the_same(track, kind):
    model = kind(6, 5)
    x = torch.randint(0, 6, (3, 4)) if kind is nn.EmbeddingBag else torch.randn(3, 6)
    reference = copy.deepcopy(model)
    track(model)
    run = torch.compile(model, backend="aot_eager")
    for module in (reference, run):
        output = module(x)
        square(output[0] if isinstance(output, tuple) else output).backward()
    assert_same_gradients(model, reference)


def test_layers_that_are_not_tracked_are_compiled_as_ever(track):
    track(nn.Linear(2, 2))
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.Conv1d(4, 4, 3))
    reference = copy.deepcopy(model)
    index = torch.randint(0, 9, (3, 4))
    square(reference(index)).backward()
    square(compiled("aot_eager")(model)(index)).backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(param.grad, other.grad, 1e-5)
