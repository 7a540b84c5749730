"""dad for Keras 3, on its TensorFlow and torch backends: `import dad.keras as hvd`."""
# ruff: noqa: F401  this file only collects names

from dad._keras.batch_norm import average_batch_norm
from dad.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reset_stats,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from dad.errors import (
    CheckpointError,
    DadInternalError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
)
from dad.keras import callbacks, elastic
from dad.keras.framework import framework as _framework
from dad.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from dad.keras.saving import load_model, save_model
from dad.keras.values import (
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    reducescatter,
)
from dad.local_steps.outer import Outer
from dad.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

Compression = _framework().Compression

# Horovod has these for a framework only; a script with uneven data wants join() also under Keras.
_collectives = _framework().collectives
alltoall = _collectives.alltoall
barrier = _collectives.barrier
grouped_allgather = _collectives.grouped_allgather
grouped_allreduce = _collectives.grouped_allreduce
grouped_reducescatter = _collectives.grouped_reducescatter
join = _collectives.join
