"""Writes numbers for TensorBoard, without TensorBoard: event files in the format that its readers expect.

A file is a sequence of records: length, checksum of the length, an Event message, checksum of the message. Of
an Event (tensorflow/core/util/event.proto) only wall_time (1), step (2), file_version (3) and summary (5) are
written, and of a Summary's values only tag (1) and simple_value (2).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from dad.basics import is_initialized, rank, stats
from dad.observe.scalars import number_of, scalars

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected
_MASK = 0xA282EAD8


def _make_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _make_table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, data: bytes) -> bytes:
    """A field of bytes, or of a message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class EventFile:
    """One file in the folder of a run; TensorBoard shows all files of a folder together."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.dad"
        self._file = (folder / name).open("ab")
        self._write(_field(3, b"brain.Event:2"))

    def write(self, values: dict[str, float], step: int) -> None:
        """Numbers of one step."""
        summary = b"".join(
            _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in values.items()
        )
        self._write(b"\x10" + _varint(step) + _field(5, summary))

    def _write(self, fields: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(
            length + struct.pack("<I", _masked_crc(length)) + event + struct.pack("<I", _masked_crc(event))
        )
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes what dad sends for TensorBoard, on rank 0.

    Bytes per step, the ratio to dense, and the effective rank or part of each tensor. With Keras:
    hvd.callbacks.TensorBoardScalars.

    Args:
        log_dir: the folder of the run; other writers may have files in it.
        every: steps between two points.

    Raises:
        ValueError: `every` is less than 1.

    Example::

        board = dad.TensorBoard("runs/1")
        for x, y in loader:
            ...
            optimizer.step()
            board.step(loss=loss)
    """

    def __init__(self, log_dir: str | os.PathLike[str], every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every={every} is not possible; a number of steps, 1 or more")
        self._log_dir = log_dir
        self._every = every
        self._steps = 0
        self._before: dict[str, Any] | None = None
        self._file: EventFile | None = None

    def step(self, **values: Any) -> None:
        """Call it after each step.

        Args:
            values: more numbers for the board, such as loss=loss. Tensors are read only for the steps that
                are written.
        """
        self._steps += 1
        if self._steps % self._every or not is_initialized() or rank() != 0:
            return
        if self._file is None:
            self._file = EventFile(self._log_dir)
        now = stats()
        numbers = {name: number_of(value) for name, value in values.items()}
        self._file.write({**numbers, **scalars(now, self._before)}, self._steps)
        self._before = now

    def close(self) -> None:
        """Closes the file; a further step begins another."""
        if self._file is not None:
            self._file.close()
            self._file = None
