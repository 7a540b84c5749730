"""Local steps of an optimizer of Keras 3: what it has in place of a reducer of gradients.

What is done when is in dad/local_steps; how changes travel is the part of a backend
(tensorflow/local_part.py, torch/local_part.py). A step begins and ends in Python, also where Keras runs it
as a graph: the framework calls begin() before the weights change and done() afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dad._keras.batch_norm import average_batch_norm
from dad._keras.settings import Settings
from dad.basics import num_inits, rank
from dad.keras.framework import framework
from dad.local_steps.fragments import split
from dad.local_steps.joining import before_join
from dad.local_steps.methods import for_changes
from dad.local_steps.rounds import Rounds
from dad.local_steps.saved import pack, unpack
from dad.log import log
from dad.process_sets import ProcessSet
from dad.state.state_bytes import for_rank, to_bytes

_reducers: weakref.WeakSet[LocalReducer] = weakref.WeakSet()


class LocalReducer:
    """See dad._keras.on_tensorflow.GradientReducer for what Keras' optimizers expect of it."""

    def __init__(self, settings: Settings, name: str, optimizer: Any) -> None:
        self.settings = settings
        self.name = name
        self.settings_of_optimizer: Callable[[], dict[str, str]] = dict
        self.of_all_ranks: bytes | None = None  # while a checkpoint is written that has them all
        self.model: Any = None  # whose moving statistics are pooled
        self._optimizer = weakref.ref(optimizer)
        self._local: dict[int, Any] = {}
        self._parts: list[Any] = []
        self._rounds: Rounds | None = None
        self._saved: dict[str, Any] | None = None  # to go on with, once there are variables
        self._counter = framework().BatchCounter()
        self._passes = 0  # batches whose gradients are being added up
        self._is_outside = False  # steps are begun and ended outside of this optimizer's apply()
        _reducers.add(self)

    @property
    def process_set(self) -> ProcessSet:
        return self.settings.process_set

    @property
    def has_rounds(self) -> bool:
        return self._rounds is not None

    @property
    def is_active(self) -> bool:
        return framework().is_active(self.process_set)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], **_: Any) -> list[Any]:
        """Gradients stay on this rank."""
        return list(gradients)

    def reduced_scaled(self, gradients: Sequence[Any]) -> None:
        """A step that is left out is left out by this rank alone."""

    def register_local(self, variable: Any) -> None:
        """The variable stays on this rank."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        return id(variable) in self._local

    def sees(self, model: Any, outputs: Any) -> None:
        """What the model has computed from a batch."""
        self.model = model
        first = next((part for part in _leaves(outputs) if len(part.shape)), None)
        if first is not None:
            self._counter.count(first)

    def run(self, model: Any, train: Callable[[], Any]) -> Any:
        """One or several steps of a model, which may be a graph."""
        optimizer = self._optimizer()
        if not self.is_active:
            return train()
        if self._is_outside or not optimizer.built:
            # The first call makes what is trained; a step of another model may be inside of this one.
            optimizer.build(model.trainable_variables)
        self._begin(optimizer._trainable_variables)
        self._is_outside = True
        try:
            result = train()
        finally:
            self._is_outside = False
        self._done()
        return result

    def step(self, variables: Sequence[Any], apply: Callable[[], Any]) -> Any:
        """apply: changes the variables."""
        if not self.is_active or self._is_outside:
            return apply()
        variables = list(variables)
        return framework().around(lambda: self._begin(variables), apply, self._done, variables)

    def around_scaled(self, variables: Sequence[Any], apply: Callable[[], Any]) -> Any:
        """A step of a LossScaleOptimizer, which may leave out that of the optimizer inside."""

        def inside() -> Any:
            self._is_outside = True
            try:
                return apply()
            finally:
                self._is_outside = False

        return self.step(variables, inside)

    def _begin(self, variables: Sequence[Any]) -> None:
        if self._rounds is None:
            self._make_rounds(variables)
        self._rounds.begin_step()

    def _make_rounds(self, variables: Sequence[Any]) -> None:
        shared = [
            v for v in variables if not self.is_local(v) and not getattr(v, "overwrite_with_gradient", False)
        ]
        local, backend = self.settings.local, framework()
        none = backend.Compression.none
        compression = for_changes(backend.resolve(self.settings.compression), none, says=rank() == 0)
        sizes = [int(np.prod(v.shape)) for v in shared]
        self._parts = [
            backend.make_part([shared[i] for i in places], compression, self)
            for places in split(sizes, local.fragments)
        ]
        self._rounds = Rounds(local, self._parts, self._parts[0].name, self.process_set, _epoch)
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._take(saved)

    def _done(self) -> None:
        batches, samples = self._counter.take()
        self._rounds.saw(samples)
        self._passes += max(batches, 1)  # a train_step of the user's own may have told nothing
        steps, self._passes = divmod(self._passes, self._optimizer().gradient_accumulation_steps or 1)
        if not steps:
            return  # the weights have not changed
        for part in self._parts:
            part.note_step()
        before = self._rounds.rounds
        self._rounds.step_done(steps)
        if self._rounds.rounds > before:
            self._pool_statistics()

    def _pool_statistics(self) -> None:
        if self.model is not None and has_statistics(self.model):
            average_batch_norm(self.model, self.process_set)

    def end_round(self, alone: bool = False) -> None:
        if self._rounds is not None and self._rounds.end_round(alone) and not alone:
            self._pool_statistics()

    def begin_anew(self) -> None:
        """The weights were set from outside, on all ranks."""
        if self._rounds is not None:
            self._rounds.load(None, None)
            for part in self._parts:
                part.doubt()

    def plan(self) -> list[dict[str, Any]]:
        length = self.settings.local.length
        rows = [row for part in self._parts for row in part.plan()]
        return [{**row, "every": length, "why": f"{row['why']}; once in {length}"} for row in rows]

    # Checkpoints

    def save_state(self) -> bytes:
        """Where this rank is in the round and what it keeps; or that of all ranks."""
        if self.of_all_ranks is not None:
            return self.of_all_ranks
        if self._rounds is None:
            return b""
        common, own = self._rounds.save()
        own["inner"] = [np.asarray(v.numpy()) for v in self._optimizer().variables]
        return to_bytes(
            {
                "rank": self.process_set.rank(),
                "size": self.process_set.size(),
                "common": _as_arrays(common),
                "own": _as_arrays(own),
                "fragments": pack([part.save() for part in self._parts]),
            }
        )

    def load_state(self, data: bytes) -> None:
        """Goes on with the state of the rank of the same number."""
        if not self.is_active:
            return
        self._saved = for_rank(data, self.process_set.rank(), self.process_set.size())
        optimizer = self._optimizer()
        if self._rounds is None and optimizer.built:
            # Now, and not with the first step: its gradients are of this rank's own weights.
            self._make_rounds(optimizer._trainable_variables)
        elif self._rounds is not None:
            saved, self._saved = self._saved, None
            self._take(saved)

    def _take(self, saved: dict[str, Any]) -> None:
        common = saved.get("common")
        if common is None or len(common["starts"]) != len(self._parts):
            log.warning("the checkpoint has other local steps than this optimizer: a new round begins")
            self.begin_anew()
            return
        own = saved.get("own") if saved["rank"] == self.process_set.rank() else None
        self._rounds.load(
            self._as_tensors(common, ("starts", "momenta", "arrived")),
            None if own is None else self._as_tensors(own, ("weights", "anchors")),
        )
        variables = self._optimizer().variables
        if own is not None and len(own["inner"]) == len(variables):
            for variable, value in zip(variables, own["inner"], strict=True):
                variable.assign(value)
        for part, one in zip(self._parts, unpack(saved["fragments"]), strict=True):
            part.load(one)

    def _as_tensors(self, state: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        return {
            key: [
                None if values is None else [part.tensor(value) for value in values]
                for part, values in zip(self._parts, state[key], strict=True)
            ]
            if key in keys
            else state[key]
            for key in state
        }


def _epoch() -> tuple[int, int]:
    return num_inits(), framework().joins()


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_arrays(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_arrays(part) for part in value]
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value.numpy()) if hasattr(value, "numpy") else value


def has_statistics(model: Any) -> bool:
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    return any(hasattr(layer, "moving_mean") for layer in layers)


def _leaves(outputs: Any) -> list[Any]:
    import keras

    return [part for part in keras.tree.flatten(outputs) if hasattr(part, "shape")]


def end_rounds_before_join() -> None:
    """A rank that joins sends what it has not sent: the others wait for nothing else of it."""
    for reducer in sorted((one for one in _reducers if one.has_rounds), key=lambda one: one.name):
        reducer.end_round(alone=True)


before_join(end_rounds_before_join)
