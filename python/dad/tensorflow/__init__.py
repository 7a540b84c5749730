"""dad for TensorFlow: `import dad.tensorflow as hvd`."""
# ruff: noqa: F401  this file only collects names

from typing import NoReturn as _NoReturn

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
    ReplicaError,
)
from dad.local_steps.outer import Outer
from dad.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from dad.tensorflow.compression import Compression
from dad.tensorflow.factors.eager_capture import capture
from dad.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from dad.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from dad.tensorflow.optimizer import DistributedOptimizer
from dad.tensorflow.saving import save_checkpoint
from dad.tensorflow.sync_batch_norm import SyncBatchNormalization
from dad.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from dad.tensorflow.util import _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

from dad.tensorflow import elastic, mpi_ops  # isort: skip  mpi_ops takes the names above
