"""What a convolution reads at each position, and the gradient of its kernel."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Convolution:
    """The numbers of a convolution with channels last. `op` forms the gradient of its kernel."""

    kernel: tuple[int, ...]
    inputs: int  # channels per group
    outputs: int
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...] | None  # padding; None: SAME
    groups: int

    def padded(self, x, dy) -> tf.Tensor:
        """`x` with all that the kernel saw at the positions of `dy`."""
        spatial = range(1, 1 + len(self.kernel))
        sizes = [dimension(x, axis) for axis in spatial]
        outs = [dimension(dy, axis) for axis in spatial]
        reaches = [
            (out - 1) * stride + (kernel - 1) * dilation + 1
            for out, stride, kernel, dilation in zip(
                outs, self.strides, self.kernel, self.dilations, strict=True
            )
        ]
        if self.before is not None:
            before = self.before
        else:
            before = [_at_least_zero(reach - size) // 2 for reach, size in zip(reaches, sizes, strict=True)]
        after = [
            _at_least_zero(reach - size - pad)
            for reach, size, pad in zip(reaches, sizes, before, strict=True)
        ]
        if all(isinstance(pad, int) and pad == 0 for pad in (*before, *after)):
            return x
        return tf.pad(x, [(0, 0), *zip(before, after, strict=True), (0, 0)])

    def patches(self, x, dy) -> tf.Tensor:
        """N × (channels · kernel): for every position of `dy` what the kernel saw there, in torch's order;
        groups × N × (channels of a group · kernel) if there are several groups."""
        outs = [dimension(dy, axis) for axis in range(1, 1 + len(self.kernel))]
        channels = x.shape[-1]
        x = self.padded(x, dy)
        views = []
        for offsets in itertools.product(*(range(size) for size in self.kernel)):
            begins = [offset * dilation for offset, dilation in zip(offsets, self.dilations, strict=True)]
            slices = [
                slice(begin, begin + (out - 1) * stride + 1, stride)
                for begin, out, stride in zip(begins, outs, self.strides, strict=True)
            ]
            views.append(x[(slice(None), *slices)])
        if self.groups > 1:
            positions = tf.reshape(tf.concat(views, -1), [-1, len(views), self.groups, self.inputs])
            by_group = tf.transpose(positions, [2, 0, 3, 1])
            return tf.reshape(by_group, [self.groups, -1, self.columns])
        if len(views) == 1:
            return tf.reshape(views[0], [-1, channels])
        positions = tf.reshape(tf.concat(views, -1), [-1, len(views), channels])
        return tf.reshape(tf.transpose(positions, [0, 2, 1]), [-1, self.columns])

    def deltas(self, dy) -> tf.Tensor:
        """N × outputs, or groups × N × outputs of a group: the rows that belong to `patches`."""
        if self.groups == 1:
            return tf.reshape(dy, [-1, self.outputs])
        by_position = tf.reshape(dy, [-1, self.groups, self.outputs_of_group])
        return tf.transpose(by_position, [1, 0, 2])

    def sample_kernels(self, x, dy) -> tf.Tensor:
        """samples × kernel × inputs × outputs: the gradient of the kernel by each sample."""
        if self.inputs == 1 and len(self.kernel) == 2 and len({*self.strides}) == 1 == max(self.dilations):
            return self._sample_kernels_by_channel(x, dy)
        positions, outputs = math.prod(self.kernel), self.outputs_of_group
        samples = dimension(dy, 0)
        a = tf.reshape(self.patches(x, dy), [self.groups, samples, -1, self.columns])
        d = tf.reshape(self.deltas(dy), [self.groups, samples, -1, outputs])
        product = tf.linalg.matmul(a, d, transpose_a=True)
        product = tf.reshape(product, [self.groups, samples, self.inputs, positions, outputs])
        kernels = tf.transpose(product, [1, 3, 2, 0, 4])
        return tf.reshape(kernels, [samples, *self.kernel, self.inputs, self.outputs])

    def _sample_kernels_by_channel(self, x, dy) -> tf.Tensor:
        """Groups of one channel: the channels of all samples are those of one image, in a depthwise
        convolution. No patches are copied, which have the size of the input times that of the kernel."""
        samples = dimension(dy, 0)
        images = [tf.transpose(image, [1, 2, 0, 3]) for image in (self.padded(x, dy), dy)]
        x, dy = (
            tf.reshape(image, [1, dimension(image, 0), dimension(image, 1), samples * image.shape[-1]])
            for image in images
        )
        kernels = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=x,
            filter_sizes=[*self.kernel, samples * self.groups, self.outputs_of_group],
            out_backprop=dy,
            strides=[1, *self.strides, 1],
            padding="VALID",
        )
        kernels = tf.reshape(kernels, [*self.kernel, samples, self.outputs])
        return tf.expand_dims(tf.transpose(kernels, [2, 0, 1, 3]), 3)

    @property
    def columns(self) -> int:
        """The columns of a row of A."""
        return self.inputs * math.prod(self.kernel)

    @property
    def outputs_of_group(self) -> int:
        return self.outputs // self.groups


def dimension(tensor, axis):
    """A number if it is known, else a tensor."""
    size = tensor.shape[axis]
    return tf.shape(tensor)[axis] if size is None else size


def _at_least_zero(size):
    return max(size, 0) if isinstance(size, int) else tf.maximum(size, 0)
