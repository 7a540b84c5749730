"""DistributedOptimizer: the user's optimizer, on gradients reduced over the ranks."""

from __future__ import annotations

import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from dad import dry_run
from dad._lib import _core
from dad.arguments import set_id
from dad.basics import Adasum, Average, Sum, rank, size
from dad.local_steps.methods import require_average
from dad.local_steps.outer import Outer
from dad.local_steps.settings import resolve as resolve_local_steps
from dad.log import log
from dad.methods import compression as _methods
from dad.methods.momentum import require_plain_optimizer
from dad.methods.planned import has_planned_method
from dad.planning.table import method_name, plan_rows
from dad.planning.text import PlanPrinter
from dad.process_sets import ProcessSet, global_process_set
from dad.torch import grad_scaler
from dad.torch.adasum import DeltaOptimizer
from dad.torch.gradient_sync import GradientSync, next_stream
from dad.torch.local_optimizer import LocalOptimizer
from dad.torch.naming import name_parameters, new_names, split_groups
from dad.torch.ops import allreduce
from dad.torch.replicas import hyperparameters


class GradientOptimizer:
    """What is put in front of the user's optimizer class: gradients are reduced before step()."""

    _dad: GradientSync
    param_groups: list[dict[str, Any]]
    _parameter_names: dict[torch.Tensor, str]  # under the name that Horovod has for it

    def _dad_init(self, sync: GradientSync, active: bool, model: torch.nn.Module | None) -> None:
        self._dad = sync
        self._dad_active = active  # False: alone, or outside of the process set
        self._dad_model = model
        self._dad_should_synchronize = True
        self._dad_synchronized: str | None = None  # "user" or "scaler": by whom, since the last step()
        self._dad_plan_printer = PlanPrinter()

    # Horovod's methods

    def synchronize(self) -> None:
        """Waits until every .grad is the reduced one. Then call step() within skip_synchronize().

        Code that reads or changes .grad between backward() and step() does not need this: the first access
        waits."""
        self._dad_wait("user")

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() within it takes .grad as it is."""
        self._dad_should_synchronize = False
        try:
            yield
        finally:
            self._dad_should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How often backward() runs before step(); its gradients add up locally."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step={passes} is not possible; 1 or more")
        self._dad.set_passes(passes)

    @property
    def backward_passes_per_step(self) -> int:
        return self._dad.passes

    # torch.optim.Optimizer's methods

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if self._dad_should_synchronize:
            if closure is not None:
                closure = self._dad_synchronizing(closure)
            else:
                if self._dad_synchronized == "user" and not self._dad.touched:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() after "
                        "optimizer.synchronize(): say `with optimizer.skip_synchronize():` around step()",
                        stacklevel=2,
                    )
                self._dad_wait("step")
        arguments = () if closure is None else (closure,)
        loss = super().step(*arguments, **kwargs)  # type: ignore[misc]
        self._dad_synchronized = None
        self._dad_end_step()
        self._dad_print_plan()
        return loss

    def _dad_print_plan(self) -> None:
        """Once, when there is one and it has been measured."""
        if self._dad.is_planned() and rank() == 0:
            self._dad_plan_printer.step_done(self.plan, self._dad.waited_seconds)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._dad.touched and not self._dad.is_reduced():
            raise AssertionError(
                "zero_grad() between backward() and step(): gradients are still on their way; "
                "call step() or synchronize() first"
            )
        self._dad_end_step()  # it was left out, because of the gradients' norm, say
        # GradScaler may have left out the step that this flag was for.
        self._dad_synchronized = None
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The optimizer's, and under "dad" what this rank keeps for lossy methods: save it on every rank."""
        state = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if self._dad_active and self._dad.has_methods():
            state["dad"] = self._dad.save()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Takes this rank's own state, saved by the rank of the same number. After a change of the number of
        ranks: see merge_states()."""
        self._dad.reset()
        self._dad_synchronized = None
        super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        if self._dad_active and self._dad.has_methods() and "dad" in state_dict:
            self._dad.load(state_dict["dad"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        # torch's constructors call this too, when there is nothing to send yet.
        if "_dad" in self.__dict__ and self._dad_active:
            group = self.param_groups[-1]["params"]
            named = new_names(group, self._dad_model, self._dad.stream, len(self.param_groups) - 1)
            self._dad.add(named, [])
            self._parameter_names |= {param: name for name, param in named}

    # Ours

    def set_batch_size(self, rows: int) -> None:
        """weighted=True: how many rows this rank's loss is the mean of; before each backward()."""
        if self._dad_active:
            self._dad.set_batch_size(rows)

    def plan(self) -> list[dict[str, Any]]:
        """One row per tensor: what is sent for it, and why."""
        if not self._dad_active:
            return []
        sync = self._dad
        choices = sync.plan.choices if sync.plan is not None else []
        # Before the first step, what is measured of these names is another optimizer's.
        measured = _core.stats()["tensors"] if sync.steps > 0 else {}
        return plan_rows(
            sync.slots.values(),
            choices,
            sync.circle.size,
            _why(sync.compression),
            measured,
            exposed=(sync.plan.exposed_seconds if sync.plan is not None else None, sync.exposed_seconds()),
        )

    def _dad_wait(self, by: str) -> None:
        """Reduces the gradients, unless that was done and none has come since."""
        if self._dad_active and (self._dad_synchronized is None or self._dad.touched):
            self._dad.synchronize()
        self._dad_synchronized = by

    def _dad_end_step(self) -> None:
        """Ends a step whose gradients were read without synchronize()."""
        if self._dad.is_reduced():
            self._dad.end_step()

    def _dad_synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with its gradients reduced when it returns."""

        def synchronized() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._dad_synchronized = None
            self._dad_wait("step")
            if isinstance(self, torch.optim.LBFGS) and self._dad_active:
                # It decides by the loss how to go on; ranks must decide alike.
                loss = allreduce(torch.as_tensor(loss).detach(), name=f"loss.{self._dad.stream}")
            return loss

        return synchronized


def _why(compression: Any) -> str:
    if isinstance(compression, _methods.PerLayer):
        return "first glob of per_layer that matches"
    return "no method asked for" if isinstance(compression, _methods.NoCompression) else "asked for"


def _before_unscale(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, GradientOptimizer) and optimizer._dad_should_synchronize:
        optimizer._dad_wait(optimizer._dad_synchronized or "scaler")


def _after_unscale(optimizer: torch.optim.Optimizer, found_inf: dict[Any, torch.Tensor]) -> None:
    if isinstance(optimizer, DeltaOptimizer):
        optimizer.agree_on_infinity(found_inf)
        return
    if isinstance(optimizer, LocalOptimizer):
        optimizer.unscaled(found_inf)
        return
    skips = any(float(found) > 0 for found in found_inf.values())
    if skips and isinstance(optimizer, GradientOptimizer) and optimizer._dad_active:
        optimizer._dad.return_last()


grad_scaler.install(_before_unscale, _after_unscale)


def _elastic() -> bool:
    return "1" in (os.environ.get("DAD_ELASTIC"), os.environ.get("HOROVOD_ELASTIC"))


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    model: torch.nn.Module | None = None,
    weighted: bool = False,
    local_steps: int | str = 1,
    outer: Outer | None = None,
    fragments: int = 1,
    delay: int = 0,
) -> Any:
    """Makes an optimizer use gradients that are reduced over the ranks.

    The result is an instance of a subclass of the optimizer's own class. Gradients are sent while
    backward() still runs. step() waits for them, and so does whoever uses .grad before, for example to clip
    it.

    Args:
        optimizer: any torch.optim.Optimizer.
        named_parameters: model.named_parameters(); names the tensors in errors, timelines and
            statistics.
        compression: a method of Compression or its name. None: what DAD_COMPRESSION says, else dense.
        backward_passes_per_step: backward() runs that often before step(); the gradients add up.
        op: Average, Sum, Min, Max, Product, or Adasum, which combines the updates and not the
            gradients.
        gradient_predivide_factor: with Average, divides by this before the sum and by size/this after
            it.
        num_groups: deprecated: use `groups`.
        groups: a number of groups, or lists of parameters, that are reduced together.
        sparse_as_dense: sends sparse gradients as dense ones.
        process_set: the ranks that take part.
        model: names parameters of groups that are added later.
        weighted: ranks count by their samples: the leading dimension of what goes into the model, or
            what optimizer.set_batch_size(samples) says before each backward().
        local_steps: ranks take that many steps by themselves before they average the changes of their
            weights; or a time such as "5s" (docs/local_steps.md). The defaults of this and the next
            three can be changed from outside: dadrun --local-steps, --outer, --fragments, --delay.
        outer: what is done with the mean change: Outer(lr, momentum, nesterov). None: it is applied as
            it is.
        fragments: the model is exchanged in so many parts in turn, while training goes on.
        delay: 1: the result of an exchange is applied when the next one begins.

    Returns:
        the optimizer.

    Raises:
        ValueError: an argument is not possible. What ranks disagree on is a MismatchError in the first
            step.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.auto
        )
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"a {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if isinstance(optimizer, GradientOptimizer | DeltaOptimizer | LocalOptimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if not 0 < gradient_predivide_factor < math.inf:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor} is not possible; a number above 0"
        )
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} is not possible; 1 or more")
    if weighted and op != Average:
        raise ValueError("weighted=True needs op=Average")
    if num_groups:
        warnings.warn("num_groups= is deprecated: use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if compression is None:
        compression = _methods.from_environment()
    else:
        compression = _methods.resolve(compression)
        ours = isinstance(compression, _methods.Method)
        chosen = compression.name if ours else method_name(compression)
        _say_what_is_not_used(chosen, os.environ.get("DAD_COMPRESSION") or "")
    if op not in (Average, Sum) and has_planned_method(compression):
        raise ValueError(
            f"compression={compression.spec()!r} works for op=Average and op=Sum only: other ops need "
            "the whole gradient of every rank"
        )
    rounds = resolve_local_steps(local_steps, outer, fragments, delay)
    if rounds.is_on:
        require_average(op)
    require_plain_optimizer(compression, optimizer, rounds.is_on)
    if model is not None and named_parameters is None:
        named_parameters = model.named_parameters()
    named_parameters = None if named_parameters is None else list(named_parameters)
    set_id(process_set)  # that there is such a set
    active = process_set.included() and (
        len(process_set.ranks) > 1 or _elastic() or dry_run.current() is not None
    )

    if op == Adasum and size() > 1:
        wrapped = _with_base(DeltaOptimizer, optimizer)
        named = name_parameters(optimizer.param_groups, named_parameters, prefix="adasum")
        wrapped._dad_init(named, compression, process_set)
        wrapped._parameter_names = {param: name for name, param in named}
        return wrapped

    prefix = f"allreduce.noname.{next_stream(process_set)}"
    named = name_parameters(optimizer.param_groups, named_parameters, prefix)
    if rounds.is_on:
        wrapped = _with_base(LocalOptimizer, optimizer)
        wrapped._dad_init(rounds, named if active else None, compression, process_set)
        wrapped._parameter_names = {param: name for name, param in named}
        return wrapped
    grouped = split_groups([param for _, param in named], groups)
    sync = GradientSync(
        compression=compression,
        op=op,
        passes=backward_passes_per_step,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        weighted=weighted,
    )
    wrapped = _with_base(GradientOptimizer, optimizer)
    wrapped._dad_init(sync, active, model)
    wrapped._parameter_names = {param: name for name, param in named}
    if active:
        sync.add(named, grouped)
        _mark_sparse_layers(sync, model)
        outside = [(name, param) for name, param in named_parameters or () if param not in sync.slots]
        sync.outside = lambda: outside
        me = weakref.ref(wrapped)
        sync.hyperparameters = lambda: hyperparameters(me())
    return wrapped


@functools.cache
def _say_what_is_not_used(chosen: str, asked: str) -> None:
    """Scripts written for Horovod often name Compression.none: then --compression is for others."""
    if asked and rank() == 0 and _methods.parse(asked).name not in (chosen, "none"):
        log.warning(
            "--compression %s (DAD_COMPRESSION) is not used: the script chooses %s by itself; leave out the "
            "compression= of its DistributedOptimizer",
            asked,
            chosen,
        )


def _with_base(base: type, optimizer: torch.optim.Optimizer) -> Any:
    """An instance of a new class (base, class of the optimizer) with the optimizer's state, options and
    hooks. Nothing is constructed anew, so optimizers with any constructor work."""
    cls = type(optimizer)
    members = {"__module__": cls.__module__, "__reduce_ex__": _refuse_to_copy}
    wrapped: Any = object.__new__(type(cls.__name__, (base, cls), members))
    # A scheduler may have put a bound step() into the optimizer itself; it would bypass ours.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    return wrapped


def _refuse_to_copy(optimizer: torch.optim.Optimizer, protocol: int) -> NoReturn:
    """A copy would have parameters of its own, which nobody watches: it would train without the others."""
    raise TypeError(
        "a DistributedOptimizer cannot be copied or pickled, for it is tied to its parameters by hooks: save "
        "optimizer.state_dict(), or copy the model and wrap an optimizer for the copy"
    )


def _mark_sparse_layers(sync: GradientSync, model: torch.nn.Module | None) -> None:
    """A rank that did not use an embedding must know that the others will send sparse gradients."""
    for module in model.modules() if model is not None else ():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.weight in sync.slots:
            sync.slots[module.weight].sparse = module.sparse
