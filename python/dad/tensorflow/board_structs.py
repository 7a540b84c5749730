"""What crosses between board.py and tf_ops/plan/board.cc, which has the same structs."""

from __future__ import annotations

import ctypes


class Way(ctypes.Structure):
    """How one tensor is sent, as tf_ops/plan/board.h describes it."""

    _fields_ = [
        ("method", ctypes.c_char_p),
        ("most_rows", ctypes.c_int64),
        ("by_layer", ctypes.c_bool),
        ("as_rows", ctypes.c_bool),
        ("keeps", ctypes.c_bool),
    ]


class PairWays(ctypes.Structure):
    """A weight, and the bias that may ride with it."""

    _fields_ = [
        ("weight", Way),
        ("bias", Way),
        ("bias_rides", ctypes.c_bool),
        ("in_chain", ctypes.c_bool),
    ]


class Member(ctypes.Structure):
    """A layer of a chain, by the place of its pair on the board."""

    _fields_ = [("pair", ctypes.c_int64), ("passes", ctypes.c_bool)]


class Chain(ctypes.Structure):
    """Layers that travel as one request, from the lowest to the top."""

    _fields_ = [("way", Way), ("members", ctypes.POINTER(Member)), ("num_members", ctypes.c_int64)]


class Note(ctypes.Structure):
    """What a request ended with (Ticket::value())."""

    _fields_ = [("pair", ctypes.c_int64), ("value", ctypes.c_int64), ("of_bias", ctypes.c_bool)]


def declare(library: ctypes.CDLL) -> None:
    """Says how these cross. ImportError if the library has other structs: it was built from other sources."""
    int64 = ctypes.c_int64
    library.dad_tf_set_board.argtypes = [
        int64,
        ctypes.POINTER(PairWays),
        int64,
        ctypes.POINTER(Chain),
        int64,
        int64,
    ]
    library.dad_tf_set_board.restype = None
    library.dad_tf_take_notes.argtypes = [int64, ctypes.POINTER(Note), int64]
    library.dad_tf_take_notes.restype = int64
    sizes = (int64 * 4)()
    library.dad_tf_struct_sizes(sizes)
    mine = [ctypes.sizeof(one) for one in (PairWays, Chain, Member, Note)]
    if list(sizes) != mine:
        raise ImportError(f"libdad_tensorflow.so and dad do not belong together: {list(sizes)} and {mine}")
