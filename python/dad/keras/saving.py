"""Models that go on training after they have been loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from dad._keras.saving import writing
from dad.keras import patches
from dad.keras.compressor_state import read_state
from dad.keras.framework import framework
from dad.keras.optimizer import DistributedOptimizer, is_distributed
from dad.state.all_ranks import replacing


def save_model(model: Any, filepath: Any) -> None:
    """Saves a model with what all ranks keep for lossy methods.

    All ranks call it; the first one writes. The file replaces an older one only when it is complete.
    load_model() then loses nothing, whatever the number of ranks.

    Args:
        model: a compiled model.
        filepath: the file; its name ends with .keras.

    Raises:
        ValueError: the name ends otherwise.
        CheckpointError: a rank has failed; raised on all ranks.

    Example::

        hvd.save_model(model, "run.keras")
        model = hvd.load_model("run.keras", compression=hvd.Compression.auto)
    """
    if Path(filepath).suffix != ".keras":
        raise ValueError(f"{filepath}: the name of a model's file ends with .keras")
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    reducers = [inner._dad] if is_distributed(optimizer) else []
    with writing(reducers, filepath) as is_first:
        if is_first:
            with replacing(filepath) as written:
                model.save(written)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model whose optimizer, with its state, becomes a DistributedOptimizer.

    Args:
        filepath: what model.save() or save_model() has written.
        custom_optimizers: optimizer classes of your own.
        custom_objects: anything else that is needed to load, by name.
        compression: as of DistributedOptimizer.
        legacy_opts: accepted for Horovod's sake.

    Returns:
        the model, compiled.

    Example::

        model = hvd.load_model("run.keras", compression=hvd.Compression.auto)
    """
    names = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**names, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if state := read_state(filepath):
            inner._dad.load_state(state)
            framework().loaded(model.optimizer)
        patches.leave_jit(model)
    return model
