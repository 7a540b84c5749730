"""Capture beside what else autograd does: hooks, autocast, accumulation, checkpointing, functorch, threads."""

import copy
import threading

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from capture_util import assert_close, assert_same_gradients, check, ops, square, take, totals, tracker  # noqa: E402

track = pytest.fixture(tracker)


def test_a_hook_on_the_parameter_gets_its_gradient(track):
    x = torch.randn(3, 5)
    model = nn.Linear(5, 4)
    reference = copy.deepcopy(model)
    track(model)
    for module in (reference, model):
        module.weight.register_hook(lambda grad: 2 * grad)
        square(module(x)).backward()
    assert_close(model.weight.grad, reference.weight.grad, 1e-6)
    assert not ops.capture_take(model.weight)
    assert ops.capture_reason(model.weight) == "a hook on it wants its gradient"


# Ways to run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(track, dtype):
    x = torch.randn(6, 7)
    model = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def run(module):
        with torch.autocast("cpu", dtype=dtype):
            return module(x).float().square().mean()

    segments = check(model, run, track, tolerance=0.03)
    assert all(segment.a.dtype == dtype for kept in segments.values() for segment in kept)


def test_autocast_with_attention_and_convolution(track):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv1d(8, 8, 3, padding=1)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, memory):
            return self.attention(self.convolution(x.mT).mT, memory, memory)[0]

    x, memory = torch.randn(3, 5, 8), torch.randn(3, 4, 8)

    def run(module):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x, memory).float().square().mean()

    check(Mixed(), run, track, tolerance=0.05)


def test_accumulation(track):
    x = torch.randn(6, 7)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    segments = check(model, lambda m: square(m(x)), track, passes=3)
    assert len(segments[model[0].weight]) == 3


def test_retained_graphs_add_up(track):
    model = nn.Linear(5, 4)
    reference = copy.deepcopy(model)
    track(model)
    x = torch.randn(3, 5)
    for module in (reference, model):
        loss = square(module(x))
        loss.backward(retain_graph=True)
        loss.backward()
    sums, segments = totals(model.parameters())
    assert len(segments[model.weight]) == 2
    assert_close(sums[model.weight], reference.weight.grad.double(), 1e-5)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_captures_once(track, reentrant):
    x = torch.randn(6, 7, requires_grad=True)
    model = nn.Sequential(
        nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Conv1d(6, 6, 1)
    )

    def run(module):
        y = checkpoint(module[:3], x, use_reentrant=reentrant)
        return square(checkpoint(module[3:], y, use_reentrant=reentrant))

    segments = check(model, run, track)
    assert {len(kept) for param, kept in segments.items() if param.dim() > 1} == {1}


def test_evaluation_keeps_nothing(track):
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    track(model)
    x = torch.randn(3, 7)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        model(x)
        model(torch.randn(3, 7))
    model(x)  # with a graph that nobody uses
    assert all(ops.capture_count(param) == 0 for param in model.parameters())
    check(copy.deepcopy(model), lambda m: square(m(x)), track)


def test_closures_repeat_forward_and_backward(track):
    model = nn.Linear(5, 1)
    reference = copy.deepcopy(model)
    track(model)
    x, y = torch.randn(8, 5), torch.randn(8, 1)

    def train(module, finish):
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward()
            finish()
            return loss

        optimizer.step(closure)

    def from_segments():
        assert model.weight.grad is None
        for param, total in take(model.parameters())[0].items():
            param.grad = total.float()

    train(reference, lambda: None)
    train(model, from_segments)
    assert_close(model.weight.detach(), reference.weight.detach(), 1e-3)


def test_autograd_grad_and_chosen_inputs_get_dense_gradients(track):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    reference = copy.deepcopy(model)
    track(model)
    x = torch.randn(3, 5)
    expected = torch.autograd.grad(square(reference(x)), list(reference.parameters()))
    actual = torch.autograd.grad(square(model(x)), list(model.parameters()))
    for mine, theirs in zip(actual, expected, strict=True):
        assert_close(mine, theirs, 1e-6)
    square(model(x)).backward(inputs=[model[0].weight])
    assert_close(model[0].weight.grad, expected[0], 1e-6)
    assert all(ops.capture_count(param) == 0 for param in model.parameters())
    assert "inputs=" in ops.capture_reason(model[0].weight)


def test_double_backward_is_torchs(track):
    results = []
    layers = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(9, 4))
    embed = nn.Embedding(6, 5)
    for tracked in (False, True):
        model = copy.deepcopy(nn.ModuleList([embed, layers]))
        if tracked:
            track(model)
        index = torch.tensor([[1, 2], [3, 3]])
        loss = square(model[1](model[0](index)))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum(grad.square().sum() for grad in grads)
        if tracked:
            loss.backward(create_graph=True)
            assert all(ops.capture_count(param) == 0 for param in model.parameters())
        else:
            loss.backward()
        results.append([param.grad.detach().double() for param in model.parameters()])
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert_close(mine, theirs, 1e-5)


def test_functorch_does_without_us(track):
    model = nn.Linear(5, 4)
    reference = copy.deepcopy(model)
    track(model)
    x = torch.randn(3, 5)

    def per_sample(module):
        params = dict(module.named_parameters())

        def loss(p, row):
            return torch.func.functional_call(module, p, (row,)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)

    for name, grad in per_sample(model).items():
        assert_close(grad, per_sample(reference)[name], 1e-6)
    jacobian = torch.func.jacrev(model)(x[0])
    assert_close(jacobian, model.weight.detach(), 1e-6)
    _, tangent = torch.func.jvp(model, (x,), (x,))
    assert_close(tangent, (x @ model.weight.T).detach(), 1e-6)
    assert ops.capture_count(model.weight) == 0
    # vmap alone runs the layer as ever.
    torch.func.vmap(model)(x).sum().backward()
    torch.func.vmap(reference)(x).sum().backward()
    sums, _ = totals(model.parameters())
    assert_close(sums[model.weight], reference.weight.grad.double(), 1e-6)


def test_jit_trace_and_script(track):
    x = torch.randn(3, 5)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    track(model)
    for run in (torch.jit.trace(model, x), torch.jit.script(model)):
        for _ in range(4):
            square(run(x)).backward()
            square(reference(x)).backward()
    assert_same_gradients(model, reference)


def test_saved_tensor_hooks(track):
    x = torch.randn(3, 5)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))

    def run(module):
        with torch.autograd.graph.save_on_cpu():
            return square(module(x))

    check(model, run, track)


def test_threads(track):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    reference = copy.deepcopy(model)
    track(model)
    batches = [torch.randn(8, 16) for _ in range(4)]

    def work(x):
        for _ in range(20):
            square(model(x)).backward()

    threads = [threading.Thread(target=work, args=(x,)) for x in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x in batches:
        (20 * square(reference(x))).backward()
    segments = assert_same_gradients(model, reference)
    assert len(segments[model[0].weight]) == 80
