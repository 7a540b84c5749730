"""What travels as one request: how it is sent, and where its result goes.

A unit has the slots whose gradients it waits for (`missing` of them have not come), and is sent when all
have: send() starts the request, finish() waits for it and puts the result into .grad. What it needs to know
of the step is handed to it (terms.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dad.methods.kinds import Sends
from dad.methods.planned import looks_at_variance
from dad.planning.outcome import Outcome
from dad.planning.planner import Choice, Link
from dad.state.states import keeps_gradients
from dad.torch._load import _torch
from dad.torch.ops import sparse_allreduce_async
from dad.torch.slots import Slot, as_matrix, materialise, materialise_bias, num_rows, versions
from dad.torch.terms import Terms

_ALLREDUCE = _torch.KINDS["allreduce"]
# Activations whose derivative is found from what went into them (dad_core/exchange/layer/activation.h).
_FROM_INPUT = {"gelu", "gelu_tanh", "silu"}
# A part of a gradient that came formed, and the sum of the squares of its samples.
_Part = tuple[torch.Tensor | None, torch.Tensor | None]


class Unit(ABC):
    """What all kinds have."""

    choice: Choice | None = None  # of the plan; None without one

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        self.missing = 0
        self.handle: int | None = None
        self.was_sent = False

    @property
    def name(self) -> str:
        return self.slots[0].name

    def reset(self, passes: int) -> None:
        """Back to the start of a step. What is still in flight is left to itself."""
        if self.handle is not None:
            _torch.forget(self.handle)
        self.handle = None
        self.was_sent = False
        for slot in self.slots:
            slot.passes_left = passes

    def expect(self) -> None:
        """Backward begins: parameters may have been frozen and thawed since the last step."""
        self.missing = sum(slot.param.requires_grad for slot in self.slots)

    def send(self, terms: Terms) -> None:
        self.was_sent = True
        # Ranks freeze alike; a frozen parameter gets no gradient.
        if any(slot.param.requires_grad for slot in self.slots):
            self._send(terms)

    def finish(self, divisor: int | None) -> Outcome | None:
        """Waits for what is in flight; None if nothing is. divisor: of a sum over samples."""
        if self.handle is None:
            return None
        handle, self.handle = self.handle, None
        finished = _torch.wait(handle)
        self._finish(finished.output, divisor)
        outcome = Outcome.of(finished.value)
        if self.choice is not None and keeps_gradients(self.choice) and not outcome.not_finite:
            for slot in self.slots:
                slot.returned = None  # it is part of what the request keeps
        return outcome

    @property
    def is_lossy(self) -> bool:
        return self.choice is not None and self.choice.row.lossy

    def is_in_flight(self) -> bool:
        return self.handle is not None

    def is_finished(self) -> bool:
        """Whether the results are in .grad. A unit of frozen parameters has none."""
        is_frozen = not any(slot.param.requires_grad for slot in self.slots)
        return is_frozen or (self.was_sent and self.handle is None)

    @abstractmethod
    def _send(self, terms: Terms) -> None:
        """Starts the request, if there is anything to send."""

    @abstractmethod
    def _finish(self, outputs: list[torch.Tensor], divisor: int | None) -> None:
        """Puts the results into .grad."""


class DenseUnit(Unit):
    """Gradients that are sent as they are, or cast."""

    def __init__(self, slots: Sequence[Slot], choice: Choice | None = None) -> None:
        super().__init__(slots)
        self.choice = choice
        self._sent: list[tuple[Slot, Any]] = []  # with the context of its compressor
        self._sparse: list[tuple[Slot, Callable[[], torch.Tensor]]] = []

    def reset(self, passes: int) -> None:
        super().reset(passes)
        self._sent.clear()
        self._sparse.clear()

    def _send(self, terms: Terms) -> None:
        tensors = []
        uncompressed_bytes = []
        for slot in self.slots:
            if not slot.param.requires_grad:
                continue
            slot.return_kept(terms.kept_factor)
            grad = terms.weigh(slot.local_gradient(sparse=not terms.sparse_as_dense))
            if grad.is_sparse:
                slot.sparse = True
                if not terms.sparse_as_dense:
                    handle = sparse_allreduce_async(grad, slot.name, terms.op, terms.process_set)
                    self._sparse.append((slot, handle))
                    continue
                grad = grad.to_dense()
            tensor, context = slot.compressor.compress(grad)
            tensors.append(tensor)
            uncompressed_bytes.append(grad.nbytes)
            self._sent.append((slot, context))
        if not tensors:
            return
        request = _allreduce(tensors, self._sent[0][0].name, terms)
        request.uncompressed_bytes = uncompressed_bytes
        self.handle = _torch.submit(request)

    def finish(self, divisor: int | None) -> Outcome | None:
        outcome = super().finish(divisor)
        while self._sparse:
            slot, finish = self._sparse.pop(0)
            slot.param.grad = _divided(finish(), divisor)
        return outcome

    def is_in_flight(self) -> bool:
        return super().is_in_flight() or bool(self._sparse)

    def is_finished(self) -> bool:
        return super().is_finished() and not self._sparse

    def _finish(self, outputs: list[torch.Tensor], divisor: int | None) -> None:
        for (slot, context), output in zip(self._sent, outputs, strict=True):
            self._store(slot, _divided(slot.compressor.decompress(output, context), divisor))

    @staticmethod
    def _store(slot: Slot, output: torch.Tensor) -> None:
        param = slot.param
        if param.grad is None:
            param.grad = output
        elif param.grad.is_sparse:
            param.grad = output.to_sparse(param.grad.sparse_dim())
        elif param.grad is not output:
            param.grad.copy_(output)


class QuantisedUnit(Unit):
    """One tensor that is quantised as it is."""

    choice: Choice

    def __init__(self, slots: Sequence[Slot], choice: Choice) -> None:
        super().__init__(slots)
        self.choice = choice

    def _send(self, terms: Terms) -> None:
        (slot,) = self.slots
        slot.return_kept(terms.kept_factor)
        slot.dense_gradient()
        grad = slot.local_gradient(sparse=False)
        share = terms.share
        if terms.forms_on_device:
            grad.mul_(share)
            share = 1.0
        request = _allreduce([grad], slot.name, terms)
        request.method = self.choice.text
        request.scale = share
        self.handle = _torch.submit(request)

    def _finish(self, outputs: list[torch.Tensor], divisor: int | None) -> None:
        self.slots[0].take_result(outputs[0])


class LayerUnit(Unit):
    """One layer, or a chain of them, by a method that takes factors, or parts that came formed."""

    choice: Choice

    def __init__(self, choice: Choice, weights: list[Slot], biases: list[Slot | None]) -> None:
        super().__init__([*weights, *(bias for bias in biases if bias is not None)])
        self.choice = choice
        self.weights = weights
        self.biases = biases
        # A layer that only hands D down has its own gradient sent by another unit.
        self.own = [
            (weight, bias) for weight, bias, p in zip(weights, biases, choice.passes, strict=True) if not p
        ]
        self._marks = [
            word.split(":")[1:] for word in choice.text.split(";") if word.startswith("layer=")
        ]  # of each layer: what the plan says about it
        # In a chain: the weights and biases that this step's backward() went through.
        self._through: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._saw_backward = False
        self._lent: Any = None  # the versions of what the request reads

    def reset(self, passes: int) -> None:
        if self.handle is not None:
            self._through = []  # what is left to itself may still read them
        self._saw_backward = False
        self._lent = None
        super().reset(passes)

    def expect(self) -> None:
        super().expect()
        self._saw_backward = True
        if len(self.weights) > 1:
            self._copy_weights()

    def _copy_weights(self) -> None:
        """Deltas are recomputed while backward() goes on and after it, when the weights may have changed:
        users decay them by hand, or put back what they had perturbed."""
        if not self._through:
            self._through = [
                (_memory_like(weight), _memory_like(bias) if bias is not None else None)
                for weight, bias in zip(self.weights, self.biases, strict=True)
            ]
        for i, ((weight, bias), own_bias) in enumerate(zip(self._through, self.biases, strict=True)):
            # The lowest has no layer below that it would hand D to; then only h is found with it.
            if i > 0 or not _FROM_INPUT.isdisjoint(self._marks[i]):
                weight.copy_(self.weights[i].param.detach())
            if bias is not None and own_bias is not None:
                bias.copy_(own_bias.param.detach())

    def _send(self, terms: Terms) -> None:
        # A layer that hands D down is in two units; the segments are the chain's.
        for slot in self.weights:
            slot.take_segments()
        returned = [
            slot.return_kept(terms.kept_factor) for pair in self.own for slot in pair if slot is not None
        ]
        replan = self._too_many_rows()
        forms = terms.forms_on_device
        strays = [slot.segments if forms else self._strays(i) for i, slot in enumerate(self.weights)]
        derive = [self._link_holds(i, strays) for i in range(len(self.weights))]
        in_chain = len(self.weights) > 1
        if in_chain and not self._saw_backward:
            # In the step that was observed the weights may have changed since: all ranks send their D.
            derive = [False] * len(self.weights)
            self._copy_weights()
        layers = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if self._saw_backward and i + 1 < len(self.weights) and not derive[i] and weight.segments:
                weight.unlinked = replan = True
            # An empty batch leaves empty segments, in all layers of a chain alike.
            rows = [s for s in weight.segments if s not in strays[i] and num_rows(s)]
            (dense, square), (dense_bias, bias_square) = self._formed_parts(i, strays[i])
            if forms:
                # Ranks of a host have the same parts, and each is a sample at least.
                dense, square = self._for_host(weight, dense, square, terms.share)
                if bias is not None:
                    dense_bias, bias_square = self._for_host(bias, dense_bias, bias_square, terms.share)
            if dense is not None and self.choice.row.exchanges_rows and not any(returned):
                replan = True
                weight.dense_seen = weight.dense_seen or weight.formed_gradient() is not None
                weight.alone = weight.alone or not weight.dense_seen
            layer = _torch.Layer()
            layer.segments, layer.derive = rows, derive[i]
            layer.dense, layer.dense_square = dense, square
            layer.dense_bias, layer.dense_bias_square = dense_bias, bias_square
            if not self.choice.passes[i]:
                layer.output = weight.new_output(reuse=dense is not weight.param.grad)
                if bias is not None:
                    layer.output_bias = bias.new_output(reuse=dense_bias is not bias.param.grad)
            if in_chain:
                layer.weight, layer.bias = self._through[i]
            layers.append(layer)
        request = _torch.LayersRequest(layers, self.weights[0].param)
        _fill_in(request, self.name, terms)
        request.method = self.choice.text
        request.scale = terms.count if not self.is_lossy else 1.0 if forms else terms.share
        request.replan = replan
        self.handle = _torch.submit_layers(request)
        self._lent = versions([segment for slot in self.weights for segment in slot.segments])
        for slot in self.weights:
            slot.segments = []

    def _too_many_rows(self) -> bool:
        """Whether this rank has more rows than the plan is good for; it remembers how many."""
        if self.choice.capture == "off":  # they came in the step that was observed, for the last time
            return False
        too_many = False
        for slot in self.weights:
            seen = slot.num_rows()
            if sum(seen) > self.choice.most_rows:
                slot.rows_seen, slot.indexed_seen = seen
                too_many = True
        return too_many

    def _strays(self, i: int) -> list[Any]:
        """Segments of layer i that cannot go with the others."""
        weight, bias = self.weights[i], self.biases[i]
        out = as_matrix(weight.param.shape)[0]
        in_chain = len(self.weights) > 1
        return [
            s
            for s in weight.segments
            # Used without its bias: it must not count for it.
            if (bias is not None and s.kind == "rows" and not s.has_bias)
            # A chain goes through whole layers.
            or (in_chain and (s.kind != "rows" or s.d.shape[1] != out))
        ]

    def _link_holds(self, i: int, strays: list[list[Any]]) -> bool:
        """Whether this rank's rows of layer i follow from those of layer i + 1 in this step, too."""
        if i + 1 == len(self.weights) or strays[i] or strays[i + 1]:
            return False
        mine, above = self.weights[i], self.weights[i + 1]
        if len(mine.segments) != len(above.segments):
            return False
        for k, segment in enumerate(mine.segments):
            link = segment.link
            if link is None or link.upper_id != above.capture_id or link.upper_index != k:
                return False
            if Link("", link.activation, link.slope).mark() not in self._marks[i]:
                return False
        return True

    def _formed_parts(self, i: int, strays: list[Any]) -> tuple[_Part, _Part]:
        """What does not go as rows of layer i, weight and bias: uses that were not captured, and those that
        do not fit. Each with the sum of the squares of its samples, where that is not its own square."""
        weight, bias = self.weights[i], self.biases[i]
        nothing = (None, None)
        if self.choice.passes[i]:
            return nothing, nothing
        # Where it comes formed in every step there is no need to look at it.
        formed = Slot.dense_gradient if self.choice.capture == "off" else Slot.formed_gradient
        part = _joined(weight, formed(weight), materialise(weight.param, strays))
        bias_part: _Part = nothing
        if bias is not None:
            bias_part = _joined(bias, formed(bias), materialise_bias(bias.param, strays))
        if part[0] is None and bias_part[0] is None:
            return nothing, nothing
        if part[0] is None:
            part = (torch.zeros_like(weight.param, memory_format=torch.contiguous_format), None)
        if bias is not None and bias_part[0] is None:
            bias_part = (torch.zeros_like(bias.param), None)
        return part, bias_part

    @staticmethod
    def _for_host(slot: Slot, part: torch.Tensor | None, square: torch.Tensor | None, share: float) -> _Part:
        """This rank's part of its host's sum, on a device, where the core forms nothing."""
        if part is None:
            part = torch.zeros_like(slot.param, memory_format=torch.contiguous_format)
        if share != 1.0:
            part = part * share
            square = square * share**2 if square is not None else None
        if not looks_at_variance(slot.method):
            return part, None
        wide = torch.float64 if part.dtype == torch.float64 else torch.float32
        return part, part.to(wide).square() if square is None else square

    def _finish(self, outputs: list[torch.Tensor], divisor: int | None) -> None:
        if self._lent.changed():  # other ranks have the rows as they were: replicas would part
            raise RuntimeError(
                f'"{self.name}": an input or a gradient of its layer was changed in place between backward() '
                "and step(), while its rows were being sent; change a clone() of it, or after step()"
            )
        slots = [slot for pair in self.own for slot in pair if slot is not None]
        for slot, output in zip(slots, outputs, strict=True):
            slot.take_result(output if self.is_lossy else _divided(output, divisor))


def make_unit(choice: Choice, weights: list[Slot], biases: list[Slot | None]) -> Unit:
    """The unit that sends what a plan has chosen for these slots."""
    match choice.row.sends:
        case Sends.LAYER:
            return LayerUnit(choice, weights, biases)
        case Sends.TENSOR:
            return QuantisedUnit(weights, choice)
        case Sends.DENSE:
            return DenseUnit(weights, choice)


def _allreduce(tensors: list[torch.Tensor], name: str, terms: Terms) -> _torch.Collective:
    """A sum that ends where its tensors are."""
    request = _torch.Collective(_ALLREDUCE, tensors)
    request.grouped = request.in_place = True
    _fill_in(request, name, terms)
    return request


def _fill_in(request: _torch.RequestTerms, name: str, terms: Terms) -> None:
    request.name = name
    request.op = terms.op
    request.prescale, request.postscale = terms.scales
    request.process_set = terms.process_set.id
    request.stream = terms.stream


def _divided(output: torch.Tensor, divisor: int | None) -> torch.Tensor:
    return output if divisor is None else output.div_(divisor)


def _memory_like(slot: Slot) -> torch.Tensor:
    return torch.empty_like(slot.param, memory_format=torch.contiguous_format, requires_grad=False)


def _joined(slot: Slot, formed: torch.Tensor | None, stray: torch.Tensor | None) -> _Part:
    """Both together. The strays are one more sample."""
    if formed is None or stray is None:
        only = stray if formed is None else formed
        return only if only is None else only.contiguous(), slot.squares if formed is not None else None
    squares = slot.squares
    if squares is None:
        return (formed + stray).contiguous(), None
    return (formed + stray).contiguous(), squares + stray.to(squares.dtype).square()
