"""What dad.keras needs of a framework, from torch."""

from __future__ import annotations

import collections
import glob
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

import dad.torch as collectives
from dad import dry_run
from dad._keras.settings import Settings
from dad._lib import _core
from dad.arguments import require_variables_of
from dad.basics import Average, Max
from dad.log import log
from dad.methods import compression as _methods
from dad.methods.planned import has_planned_method
from dad.planning.agreement import Agreement, Description, common_options, named_groups
from dad.planning.circle import circle_of
from dad.planning.ranks import RanksOf
from dad.planning.table import plan_rows
from dad.planning.text import PlanPrinter
from dad.process_sets import ProcessSet
from dad.state.left_out import LeftOut
from dad.state.replicas import CURES_OF_VARIABLES, Replica, ReplicaCheck
from dad.state.state_bytes import for_rank, to_bytes
from dad.state.states import under_names
from dad.torch.checkpoint import as_arrays, as_tensors
from dad.torch.compression import Compression, compressor
from dad.torch.gradient_sync import GradientSync
from dad.torch.handles import synchronize
from dad.torch.local_part import TorchPart
from dad.torch.move_ops import broadcast_async_
from dad.torch.naming import describe
from dad.torch.ops import allreduce_async_, grouped_allreduce_async_
from dad.torch.replicas import dense as memory_of_each
from dad.torch.slots import Slot

__all__ = [
    "BatchCounter",
    "Compression",
    "around",
    "broadcast_variables",
    "collectives",
    "expect",
    "is_active",
    "joins",
    "loaded",
    "make_part",
    "make_reducer",
    "resolve",
    "track_state",
    "watch",
]


left_out = LeftOut()  # of Keras' variables


def expect(variables: Iterable[Any]) -> None:
    """These belong to what is trained: ranks should have them in common."""
    left_out.expect([(variable.path, variable) for variable in variables])


def resolve(compression: Any) -> Any:
    """A method, from what a user gave; None: what DAD_COMPRESSION says."""
    if hasattr(compression, "compress"):
        return compression
    return _methods.from_environment() if compression is None else _methods.resolve(compression)


def is_active(process_set: ProcessSet) -> bool:
    """Whether there is anybody to talk to."""
    elastic = "1" in (os.environ.get("DAD_ELASTIC"), os.environ.get("HOROVOD_ELASTIC"))
    return process_set.included() and (process_set.size() > 1 or elastic or dry_run.current() is not None)


class GradientReducer:
    """Reduces the gradients of Keras variables over the ranks, in place.

    why: what a plan says of them all. asked_for: the compression, if another one is used.
    """

    def __init__(self, settings: Settings, name: str, why: str = "", asked_for: Any = None) -> None:
        self.settings = settings
        self.name = name
        self.compression = resolve(settings.compression)
        self._asked_for = self.compression if asked_for is None else asked_for
        # A class of the user's own need not have a name.
        dense = getattr(self.compression, "name", "") == "none"
        self._why = why or ("no method asked for" if dense else "asked for")
        self.settings_of_optimizer: Callable[[], dict[str, str]] = dict
        self.of_all_ranks: bytes | None = None  # while a checkpoint is written that has them all
        self._local: dict[int, Any] = {}
        self._seen: dict[str, Slot] = {}
        self._printer = PlanPrinter()
        self._waited_seconds = 0.0
        ranks = RanksOf(settings.process_set)
        self._agreement = Agreement(ranks, "torch")
        self._replicas = ReplicaCheck(ranks, CURES_OF_VARIABLES)

    @property
    def process_set(self) -> ProcessSet:
        return self.settings.process_set

    def register_local(self, variable: Any) -> None:
        self._local[id(variable)] = variable
        left_out.trains([variable])

    def _outside(self) -> list[tuple[str, Any]]:
        return [(name, variable.value) for name, variable in left_out.of(self)]

    def is_local(self, variable: Any) -> bool:
        return id(variable) in self._local

    @torch.no_grad()
    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], loss_scale: Any = None
    ) -> list[Any]:
        results = list(gradients)
        require_variables_of(self.settings.model, variables)
        if not is_active(self.settings.process_set):
            return results
        names = self._names(variables)
        self._note(names, variables)
        left_out.trains(variables)
        self._agree(gradients, variables, names)
        shared = [(name, v.value) for name, v in zip(names, variables, strict=True) if not self.is_local(v)]
        exchange = self._agreement.name
        self._replicas.begin(
            exchange,
            lambda: Replica.of(
                memory_of_each(shared), self.settings_of_optimizer(), memory_of_each(self._outside())
            ),
        )
        results = self._reduce(results, variables, names)
        self._replicas.end(exchange)
        return results

    def _agree(self, gradients: Sequence[Any], variables: Sequence[Any], names: Sequence[str]) -> None:
        """MismatchError, on all ranks, if their optimizers were made with something else."""
        if not self._agreement.is_due():
            return
        settings = self.settings
        known = {id(variable): name for variable, name in zip(variables, names, strict=True)}
        options = common_options(
            compression=self._asked_for,
            op=settings.op,
            gradient_predivide_factor=settings.gradient_predivide_factor,
            groups=named_groups(settings.groups, lambda variable: known.get(id(variable))),
            sparse_as_dense=settings.sparse_as_dense,
            **settings.common_options(),
        )
        tensors = [
            (name, describe(variable.value) + (", no gradient" if gradient is None else ""))
            for name, variable, gradient in zip(names, variables, gradients, strict=True)
            if not self.is_local(variable)
        ]
        facts = self._agreement.settle(Description(options, tensors), {"replicas": self._replicas.facts()})
        self._replicas.agree([one["replicas"] for one in facts])

    @torch.no_grad()
    def _reduce(self, results: list[Any], variables: Sequence[Any], names: Sequence[str]) -> list[Any]:
        dense = []
        for i, gradient in enumerate(results):
            if gradient is None:
                continue
            if self.is_local(variables[i]):
                if self.settings.scale_local_gradients:
                    results[i] = gradient / self.settings.process_set.size()
            else:
                dense.append(i)
        started = [
            self._start(members, results, names, variables) for members in self._batches(dense, variables)
        ]
        begin = time.perf_counter()
        for handle, finish in started:
            for i, gradient in finish(synchronize(handle)):
                results[i] = gradient
        self._waited_seconds += time.perf_counter() - begin
        self._print_plan()
        return results

    def _print_plan(self) -> None:
        if self.settings.process_set.rank() == 0:
            self._printer.step_done(self.plan, self._waited_seconds)

    def reduced_scaled(self, gradients: Sequence[Any]) -> None:
        """Handles gradients of a scaled loss: if they are not finite, the step is left out."""

    def _note(self, names: Sequence[str], variables: Sequence[Any]) -> None:
        for name, variable in zip(names, variables, strict=True):
            if name not in self._seen and not self.is_local(variable):
                chosen = compressor(self.compression, variable.path)
                self._seen[name] = Slot(variable.value, name, chosen, 1)

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor that has been reduced: what is sent for it, and why."""
        return self._plan_of(self._seen.values(), [])

    def _plan_of(self, slots: Iterable[Slot], choices: Sequence[Any]) -> list[dict[str, Any]]:
        """By the variables' own names: what is in front of them between ranks is left out."""
        if not is_active(self.settings.process_set):
            return []
        size = circle_of(self.settings.process_set).size
        rows = plan_rows(slots, choices, size, self._why, _core.stats()["tensors"])
        return [
            {**row, **{key: row[key].replace(f"{self.name}/", "") for key in ("name", "why")}} for row in rows
        ]

    def save_state(self) -> bytes:
        """What this rank keeps between steps, or all ranks do; empty if nothing is kept."""
        return self.of_all_ranks or b""

    def load_state(self, data: bytes) -> None:
        """Nothing is kept by casts."""

    def _names(self, variables: Sequence[Any]) -> list[str]:
        seen: collections.Counter[str] = collections.Counter()
        names = []
        for variable in variables:
            seen[variable.path] += 1
            number = seen[variable.path]
            names.append(f"{self.name}/{variable.path}" + (f".{number}" if number > 1 else ""))
        return names

    def _batches(self, dense: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """What travels together."""
        groups = self.settings.groups
        if isinstance(groups, list | tuple):
            place = {id(variables[i]): i for i in dense}
            found = [[place.pop(id(v)) for v in group if id(v) in place] for group in groups]
            return [*(group for group in found if group), *([i] for i in sorted(place.values()))]
        if groups:
            count = min(groups, len(dense))
            ends = [len(dense) * k // count for k in range(count + 1)] if count else []
            return [dense[first:last] for first, last in zip(ends[:-1], ends[1:], strict=True)]
        return [[i] for i in dense]

    def _start(
        self, members: list[int], gradients: list[Any], names: list[str], variables: Sequence[Any]
    ) -> tuple[Any, Any]:
        settings = self.settings
        chosen = [compressor(self.compression, variables[i].path) for i in members]
        compressed = [c.compress(gradients[i]) for c, i in zip(chosen, members, strict=True)]
        # Keras' float8 layers keep statistics in "gradients" that replace the variable: all take the largest.
        is_statistic = getattr(variables[members[0]], "overwrite_with_gradient", False)
        factor = settings.gradient_predivide_factor if settings.op == Average and not is_statistic else 1.0
        options = {
            "op": Max if is_statistic else settings.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "process_set": settings.process_set,
        }
        tensors = [tensor for tensor, _ in compressed]
        if len(members) == 1:
            handle = allreduce_async_(tensors[0], name=names[members[0]], **options)
        else:
            handle = grouped_allreduce_async_(tensors, name=f"{names[members[0]]}.group", **options)

        def finish(reduced: Any) -> list[tuple[int, Any]]:
            reduced = [reduced] if len(members) == 1 else reduced
            return [
                (i, c.decompress(tensor, context))
                for i, c, tensor, (_, context) in zip(members, chosen, reduced, compressed, strict=True)
            ]

        return handle, finish


class MethodReducer(GradientReducer):
    """By methods that are planned for: dad.torch's GradientSync, which sends while backward() runs. Of the
    first step nothing was seen when it comes here: it goes dense, unless start() has said before what is
    trained."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(settings, name)
        self._sync: GradientSync | None = None
        self._started_with: tuple[list[Any], Any] = ([], None)
        self._has_stepped = False
        self._saved: dict[str, Any] | None = None

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], loss_scale: Any = None
    ) -> list[Any]:
        require_variables_of(self.settings.model, variables)
        if not is_active(self.settings.process_set):
            return list(gradients)
        self._has_stepped = True
        if self._sync is None:
            names = self._names(variables)
            self._agree(gradients, variables, names)
            self.start(variables, loss_scale)
            dense = GradientReducer(replace(self.settings, compression=Compression.none), self.name)
            dense._local = self._local
            return dense._reduce(list(gradients), variables, names)
        # Whoever reads .grad after backward() gets what is reduced, and may have changed it.
        is_reduced = self._sync.is_reduced()
        self._sync.synchronize()
        results = list(gradients) if is_reduced else [variable.value.grad for variable in variables]
        if self.settings.scale_local_gradients:
            size = self.settings.process_set.size()
            for i, variable in enumerate(variables):
                if self.is_local(variable) and results[i] is not None:
                    results[i] = results[i] / size
        self._waited_seconds = self._sync.waited_seconds
        if self._sync.is_planned():
            self._print_plan()
        return results

    def register_local(self, variable: Any) -> None:
        super().register_local(variable)
        if self._sync is not None and not self._has_stepped:
            # It was started without knowing of this one.
            self._sync = None
            self.start(*self._started_with)

    def start(self, variables: Sequence[Any], loss_scale: Any = None) -> None:
        """From now on backward() sends. loss_scale: what the loss is multiplied with, or a function that
        tells."""
        if self._sync is not None or not variables or not is_active(self.settings.process_set):
            return
        self._started_with = (list(variables), loss_scale)
        self._sync = self._start_sync(variables)
        if loss_scale is not None:
            _core.expect_overflows()
            self._sync.loss_scale = lambda: float(
                loss_scale() if callable(loss_scale) else getattr(loss_scale, "value", loss_scale)
            )

    def _start_sync(self, variables: Sequence[Any]) -> GradientSync:
        settings = self.settings
        sync = GradientSync(
            compression=self._by_wire_name(),
            op=settings.op,
            passes=1,
            predivide=settings.gradient_predivide_factor,
            sparse_as_dense=settings.sparse_as_dense,
            process_set=settings.process_set,
            weighted=False,
        )
        named = [
            (name, variable.value)
            for name, variable in zip(self._names(variables), variables, strict=True)
            if not self.is_local(variable) and not getattr(variable, "overwrite_with_gradient", False)
        ]
        left_out.trains(variables)
        sync.hyperparameters = lambda: self.settings_of_optimizer()
        sync.outside = self._outside
        sync.replicas.cures = CURES_OF_VARIABLES
        params = {id(variable): variable.value for variable in variables}
        groups = settings.groups if isinstance(settings.groups, list | tuple) else []
        sync.add(named, [[params[id(v)] for v in group if id(v) in params] for group in groups])
        self._load_into(sync)
        return sync

    def _by_wire_name(self) -> Any:
        """The compression, for tensors that are called by their names between ranks: the globs of per_layer
        are for those of the variables."""
        if not isinstance(self.compression, _methods.PerLayer):
            return self.compression
        return by_wire_name(self.compression, self.name)

    def _load_into(self, sync: GradientSync) -> None:
        if self._saved is not None:
            sync.load(as_tensors(self._saved))

    def reduced_scaled(self, gradients: Sequence[Any]) -> None:
        if not all(bool(g.isfinite().all()) for g in gradients if g is not None):
            self._sync.return_last()

    def plan(self) -> list[dict[str, Any]]:
        if self._sync is None:
            return []
        choices = self._sync.plan.choices if self._sync.plan is not None else []
        return self._plan_of(self._sync.slots.values(), choices)

    def save_state(self) -> bytes:
        if self.of_all_ranks is not None:
            return self.of_all_ranks
        if self._sync is None:
            return b"" if self._saved is None else to_bytes(self._saved)
        return to_bytes(as_arrays(self._sync.save()))

    def load_state(self, data: bytes) -> None:
        place = self.settings.process_set
        self._saved = for_rank(data, place.rank(), place.size())
        if self._sync is not None:
            self._load_into(self._sync)

    carry_state = load_state  # in a new round of an elastic job

    def abandon_step(self) -> None:
        """Back to the start of a step that a lost rank has broken off."""
        if self._sync is not None:
            self._sync.reset()


def make_reducer(settings: Settings, name: str, accumulates: bool = False) -> GradientReducer:
    method = resolve(settings.compression)
    if not has_planned_method(method):
        return GradientReducer(settings, name)
    if accumulates:
        log.warning(
            "gradients are sent dense, not by %s: Keras adds them up over several steps, and on its torch "
            "backend methods send what one backward() has computed",
            method.spec(),
        )
        why = f"not by {method.spec()}: Keras adds gradients up over several steps"
        return GradientReducer(replace(settings, compression=Compression.none), name, why, method)
    return MethodReducer(settings, name)


def by_wire_name(compression: _methods.PerLayer, name: str) -> _methods.PerLayer:
    """Its globs are for names that begin with that of the optimizer."""
    front = glob.escape(name)
    return _methods.PerLayer({f"{front}/{key}": one for key, one in compression.methods.items()})


class LocalPart(TorchPart):
    """A fragment of local steps."""

    def __init__(self, variables: Sequence[Any], compression: Any, reducer: Any) -> None:
        paths = [f"{reducer.name}/{variable.path}" for variable in variables]
        named = [(path, variable.value) for path, variable in zip(paths, variables, strict=True)]
        if isinstance(compression, _methods.PerLayer):
            compression = by_wire_name(compression, reducer.name)
        super().__init__(named, compression, reducer.process_set, None)
        self.sync.hyperparameters = lambda: reducer.settings_of_optimizer()
        self.sync.replicas.cures = CURES_OF_VARIABLES

    def load(self, saved: dict[str, Any]) -> None:
        # The same model may have other names in this process.
        super().load(under_names(saved, self.sync.tensors()))


def joins() -> int:
    """How many joins all ranks have come to."""
    return _core.joins()


def make_part(variables: Sequence[Any], compression: Any, reducer: Any) -> LocalPart:
    left_out.trains(variables)
    return LocalPart(variables, compression, reducer)


class BatchCounter:
    """Counts batches and their samples."""

    def __init__(self) -> None:
        self._sums = (0, 0)

    def count(self, outputs: torch.Tensor) -> None:
        """outputs: of a batch, one row for each sample."""
        self._sums = self._sums[0] + 1, self._sums[1] + outputs.shape[0]

    def take(self) -> tuple[int, int]:
        """How many batches, and samples, there were since the last call."""
        sums, self._sums = self._sums, (0, 0)
        return sums


def around(
    begin: Callable[[], None],
    apply: Callable[[], Any],
    done: Callable[[], None],
    variables: Sequence[Any],
) -> Any:
    """A step of local steps, with what comes before and after it."""
    begin()
    result = apply()
    done()
    return result


def track_state(optimizer: Any) -> None:
    """Checkpoints of torch have what the user puts into them."""


def watch(model: Any, optimizer: Any) -> None:
    """What is trained is known before the first backward(), so that its gradients go by a method, too."""
    will_be_wrapped = not hasattr(optimizer, "inner_optimizer") and _scales_its_loss(model)
    if model.built and not will_be_wrapped:
        _start(optimizer, model.trainable_variables)


def loaded(optimizer: Any) -> None:
    """A run that goes on does so with the first backward()."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner.built:
        _start(optimizer, inner._trainable_variables)


def _scales_its_loss(model: Any) -> bool:
    """Then compile() puts a LossScaleOptimizer around ours, and what it multiplies with is not known yet."""
    return getattr(getattr(model, "dtype_policy", None), "name", "") == "mixed_float16"


def _start(optimizer: Any, variables: Sequence[Any]) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def scale() -> float:
        return optimizer.dynamic_scale.value if optimizer.built else optimizer.initial_scale

    if isinstance(inner._dad, MethodReducer):
        inner._dad.start(variables, None if inner is optimizer else scale)


def tensor(value: Any) -> Any:
    return torch.as_tensor(value)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    expect(variable for variable in variables if variable.trainable)
    with torch.no_grad():
        handles = [
            broadcast_async_(variable.value.data, root_rank, f"broadcast_variables.{i}.{variable.path}")
            for i, variable in enumerate(variables)
        ]
        for handle in handles:
            synchronize(handle)
