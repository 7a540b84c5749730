"""What the callbacks do, apart from the Keras they are for: dad.keras.callbacks puts these in front of the
classes of Keras 3, dad.tensorflow.keras.callbacks in front of those of tf_keras where that is in use.

`_dad_framework` is what they need of a framework: see on_tensorflow.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dad._keras.batch_norm import average_batch_norm
from dad.basics import rank, size, stats
from dad.observe.tensorboard import TensorBoard


def _variables_of(optimizer: Any) -> list[Any]:
    variables = getattr(optimizer, "variables", [])
    return list(variables() if callable(variables) else variables)


def is_seed(variable: Any) -> bool:
    """The state of a layer's random numbers: ranks that share it would drop the same units."""
    return getattr(variable, "path", "").endswith("seed_generator_state")


class BroadcastVariables:
    """Gives all ranks the root's weights and optimizer state after the first batch, when all of it exists."""

    _dad_framework: Any
    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local_variables: list[Any] = []
        if local_variables is not None:
            several = isinstance(local_variables, list | tuple | set)
            for variable in local_variables if several else [local_variables]:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """This variable is not broadcast."""
        if not hasattr(var, "assign"):
            raise ValueError("All local variables must be of tf.Variable type.")
        self._local_variables.append(var)

    def _is_local(self, variable: Any) -> bool:
        inner = getattr(variable, "value", None)
        return any(local is variable or local is inner for local in self._local_variables)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        variables = [v for v in self.model.variables if not is_seed(v) and not self._is_local(v)]
        known = {id(v) for v in variables}
        # Some optimizers count a model's weights among their own.
        variables += [v for v in _variables_of(self.model.optimizer) if id(v) not in known]
        self._dad_framework().broadcast_variables(variables, self.root_rank)
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if hasattr(getattr(optimizer, "_dad", None), "begin_anew"):  # local steps begin with these weights
            optimizer._dad.begin_anew()
        self.broadcast_done = True


class MetricAverage:
    """Averages the metrics of an epoch over the ranks, for all callbacks that come later."""

    _dad_framework: Any

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs or size() == 1:
            return
        numbers = {k: v for k, v in logs.items() if isinstance(v, int | float | np.number)}
        # All in one, and with their names: ranks may have validated in different epochs.
        everyone = self._dad_framework().collectives.allgather_object(numbers, name="metric_average")
        for metric in numbers:
            values = [theirs[metric] for theirs in everyone if metric in theirs]
            logs[metric] = float(np.mean(np.array(values, np.float64)))


class BatchNormAverage:
    """Gives all ranks the same moving statistics of batch normalization at the end of every epoch, for all
    callbacks that come later: see average_batch_norm(). Put it before those that save the model."""

    model: Any

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        average_batch_norm(self.model)


class LearningRateSchedule:
    """Sets the learning rate to initial_lr * multiplier(epoch) from start_epoch up to end_epoch.

    multiplier: a function of the epoch, or a number for exponential decay.
    staircase: once per epoch; else per batch, with fractions of an epoch.
    momentum_correction: when the rate changes, the velocity of SGD and RMSprop, which holds the old rate, is
        scaled along.
    """

    model: Any
    params: dict[str, Any]
    _dad_read: Any
    _dad_write: Any

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                    f"parameter to the {type(self).__name__}()"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(epoch)
        elif not self.staircase:
            self._adjust(epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._dad_read(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = self._dad_read(optimizer.learning_rate)
        new = self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (new / old))


def _velocities(optimizer: Any) -> Sequence[Any]:
    """The variables v of v = momentum * v + rate * gradient. To scale them by new rate / old rate is to scale
    the momentum for one step, as in the paper; a graph that has been traced would not see a new momentum."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if not getattr(inner, "momentum", None) or type(inner).__name__ not in ("SGD", "RMSprop"):
        return []
    velocities = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []
    return [v for v in velocities if v is not None]


class LearningRateWarmup(LearningRateSchedule):
    """From initial_lr / size to initial_lr, over warmup_epochs.

    As in "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", https://arxiv.org/abs/1706.02677.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # So that the rate is a round number at the end of each epoch.
            epoch += 1.0 / self.steps_per_epoch
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            new = self._dad_read(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {new:g}.")


class AgreedEarlyStopping:
    """EarlyStopping by the mean over the ranks: all stop after the same epoch, and none waits for another."""

    _dad_framework: Any
    model: Any

    def get_monitor_value(self, logs: Any) -> float | None:
        value = super().get_monitor_value(logs)  # type: ignore[misc]
        everyone = self._dad_framework().collectives.allgather_object(
            None if value is None else float(value), name="early_stopping"
        )
        values = [theirs for theirs in everyone if theirs is not None]
        return float(np.mean(values)) if values else None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]
        # Another callback may have stopped one rank only.
        everyone = self._dad_framework().collectives.allgather_object(
            bool(self.model.stop_training), name="early_stopping.stop"
        )
        self.model.stop_training = any(everyone)


class RankZeroCheckpoint:
    """ModelCheckpoint of the best model, on rank 0 only. `filepath` may be set later, but before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        default = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(  # type: ignore[call-arg]
            filepath=filepath or default,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its filepath first")
        if rank() == 0:
            super()._save_model(*args, **kwargs)  # type: ignore[misc]


class ReportCompression:
    """Says at the end of training what rank 0 has sent."""

    def on_train_end(self, logs: Any = None) -> None:
        if rank() != 0:
            return
        sent = stats()
        ratio = f", {sent['ratio']:.1f} times less than dense" if (sent["ratio"] or 0) > 1.05 else ""
        print(f"dad: {sent['wire_bytes_sent'] / 1e6:.2f} MB sent by rank 0{ratio}", file=sys.stderr)


class WriteScalars:
    """Writes what dad sends for TensorBoard, on rank 0: bytes per step, the ratio to dense, and the effective
    rank or part of each tensor, beside what else is in the folder.

    log_dir: of the run. every: batches between two points."""

    def __init__(self, log_dir: str, every: int = 50) -> None:
        super().__init__()
        self._board = TensorBoard(log_dir, every)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._board.step()

    def on_train_end(self, logs: Any = None) -> None:
        self._board.close()


# Of elastic training: a state is committed, and knows where training stands.


class CommitState:
    """Commits the state every `batches_per_commit` batches, and at the end of an epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchState:
    """state.batch is the number of the current batch; an epoch that is taken up again has only the rest."""

    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochState:
    """state.epoch is the number of epochs done, over all times that training was taken up."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
