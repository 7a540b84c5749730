"""One rank of the doctor's exchange: sums what all ranks have and checks it."""

from __future__ import annotations

import sys

from dad.runner.check_build import framework_status

_ELEMENTS = 100_000


def main() -> int:
    if framework_status("torch")[0]:
        total, expected = _sum_with_torch()
    elif framework_status("tensorflow")[0]:
        total, expected = _sum_with_tensorflow()
    else:
        sys.exit("dad was built for no framework that is installed here")
    if total != expected:
        sys.exit(f"wrong result: {total} instead of {expected}")
    return 0


def _sum_with_torch() -> tuple[float, float]:
    import torch

    import dad.torch as hvd

    hvd.init()
    summed = hvd.allreduce(torch.full((_ELEMENTS,), float(hvd.rank() + 1)), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    hvd.shutdown()
    return float(summed.sum()), expected * _ELEMENTS


def _sum_with_tensorflow() -> tuple[float, float]:
    import tensorflow as tf

    import dad.tensorflow as hvd

    hvd.init()
    summed = hvd.allreduce(tf.fill((_ELEMENTS,), float(hvd.rank() + 1)), op=hvd.Sum)
    expected = hvd.size() * (hvd.size() + 1) / 2
    hvd.shutdown()
    return float(tf.reduce_sum(summed)), expected * _ELEMENTS


if __name__ == "__main__":
    sys.exit(main())
