"""What the planner works on: what ranks saw of their tensors, what things cost, and the choices it makes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dad.methods import compression as _methods
from dad.methods.kinds import KINDS, Kind

ANY_ROWS = 2**62


@dataclass(frozen=True)
class Link:
    """The layer above, and what stands between."""

    upper: str
    activation: str
    slope: float = 0.0

    def mark(self) -> str:
        return f"leaky_relu={self.slope!r}" if self.activation == "leaky_relu" else self.activation


@dataclass(frozen=True)
class Observation:
    """What one rank saw of one tensor in a step."""

    rows: int = 0
    indexed_rows: int = 0
    samples: int = 0
    row_bytes: int = 0  # of one value of A and D: 2 under autocast
    dense: bool = False  # some or all of its gradient came formed
    sparse: bool = False
    used: bool = True
    bias: str | None = None  # the tensor that rides with it
    link: Link | None = None
    reason: str = ""  # why not (only) as rows
    sums: bool = False  # rows of a vector are its gradients of samples: a norm's
    row_outputs: int = 0  # values of D in a row, of one group of a convolution; 0: all outputs
    passes: int = 1  # backward passes of a step
    too_large: bool = False  # a sparse form of it was larger than dense

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Observation:
        """An observation from the dataclasses.asdict() of another rank."""
        link = fields["link"]
        return Observation(**{**fields, "link": Link(**link) if link is not None else None})


@dataclass(frozen=True)
class Layer:
    """One tensor as a matrix, with what all ranks saw of it."""

    name: str
    out: int
    columns: int  # without the bias
    element_bytes: int
    floating: bool
    method: _methods.Method
    seen: tuple[Observation, ...]  # by rank

    @property
    def bias(self) -> str | None:
        names = {s.bias for s in self.seen if s.rows}
        return names.pop() if len(names) == 1 else None

    @property
    def link(self) -> Link | None:
        """Only where every rank that has rows saw it."""
        links = {s.link for s in self.seen if s.rows}
        return links.pop() if len(links) == 1 else None

    @property
    def used(self) -> bool:
        return any(s.used for s in self.seen)

    @property
    def dense(self) -> bool:
        return any(s.dense for s in self.seen) or not any(s.rows or s.indexed_rows for s in self.seen)

    @property
    def sparse(self) -> bool:
        return any(s.sparse for s in self.seen)

    @property
    def too_large(self) -> bool:
        return any(s.too_large for s in self.seen)

    @property
    def rows(self) -> int:
        return max((s.rows + s.indexed_rows for s in self.seen), default=0)

    @property
    def row_outputs(self) -> int:
        """The most values that a row of D has on any rank."""
        return max((s.row_outputs or self.out for s in self.seen if s.rows), default=self.out)

    @property
    def all_rows(self) -> int:
        return sum(s.rows + s.indexed_rows for s in self.seen)

    @property
    def reason(self) -> str:
        """Why it is dense."""
        part = "a part of its" if any(s.rows or s.indexed_rows for s in self.seen) else "its"
        otherwise = f"{part} gradient came from an op without factors"
        return next((s.reason for s in self.seen if s.reason), otherwise)

    @property
    def elements(self) -> int:
        return self.out * (self.columns + (self.bias is not None))

    def row_bits(self, wire: str) -> int:
        """Bits of a value of A or D: fp32 leaves it as it is."""
        bits = 8 * max((s.row_bytes for s in self.seen), default=0) or 8 * self.element_bytes
        return min(bits, 16) if wire == "bf16" else bits

    def text(self, *marks: str) -> str:
        words = [f"{self.out}x{self.columns}", *(["bias"] if self.bias is not None else []), *marks]
        return "layer=" + ":".join(words)


@dataclass(frozen=True)
class Costs:
    """What the planner counts with. Rates are the least over the ranks.

    Bytes are those that a rank sends; where one rank of each host exchanges for all of it (circle.py), those
    that a host does, and `size` is the number of hosts."""

    size: int
    bytes_per_second: float
    flops_per_second: float
    seed: int = 0  # of what is rounded at random
    hosts: tuple[int, ...] = ()  # how many ranks each has; empty: methods go between all ranks

    @property
    def num_ranks(self) -> int:
        return sum(self.hosts) or self.size

    @property
    def factor_copies(self) -> int:
        """How often a rank's factors are sent, and leave its host with those of the host's other ranks."""
        largest = max(self.hosts, default=1)
        return largest * (self.num_ranks - largest)

    def dense_bytes(self, layer: Layer) -> float:
        return 2 * (self.size - 1) / self.size * layer.elements * layer.element_bytes

    def seconds(self, num_bytes: float, flops: float) -> float:
        return num_bytes / self.bytes_per_second + flops / self.flops_per_second


@dataclass(frozen=True)
class Choice:
    """What travels as one request. `layers` are names, of a chain from the lowest to the top.

    Raises ValueError if its kind has no row in kinds.py: no framework would know how to send it."""

    kind: str  # a row of kinds.py
    layers: tuple[str, ...]
    biases: tuple[str | None, ...]
    text: str  # the method, for the core
    why: str
    num_bytes: float  # predicted, sent by one rank in a step
    flops: float = 0.0  # beyond what the framework does anyway
    seconds: float = 0.0
    passes: tuple[bool, ...] = (False,)  # chain: its own gradient goes another way
    capture: str = "off"  # how the layers are captured from now on: a mode of torch_ops/capture/capture.h
    rows: int = 0
    most_rows: int = ANY_ROWS  # a rank with more asks for a new plan
    fallback: bool = False  # the method that was asked for does not fit
    sparse: bool = False  # its gradient comes as torch's sparse tensor
    label: str = ""  # the method as a user knows it, where kind and text do not say it

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f'"{self.layers[0]}": its plan has the kind {self.kind!r}, which this version of dad does '
                f"not have; there are {', '.join(KINDS)}"
            )

    @property
    def row(self) -> Kind:
        return KINDS[self.kind]

    def option(self, key: str) -> str:
        """An option of the method's text."""
        words = (word.partition("=") for word in self.text.split(";"))
        return next((value for name, _, value in words if name == key), "")

    def own(self) -> list[tuple[str, str | None]]:
        """(weight, bias) of the layers whose gradients this is."""
        triples = zip(self.layers, self.biases, self.passes, strict=True)
        return [(weight, bias) for weight, bias, passes in triples if not passes]


@dataclass
class Plan:
    choices: list[Choice] = field(default_factory=list)
    size: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Numbers and strings only, for a checkpoint."""
        return {"size": self.size, "choices": [dataclasses.asdict(choice) for choice in self.choices]}

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> Plan:
        lists = ("layers", "biases", "passes")
        choices = [{**choice, **{key: tuple(choice[key]) for key in lists}} for choice in saved["choices"]]
        return Plan([Choice(**choice) for choice in choices], saved["size"])


def dense_choice(layer: Layer, costs: Costs, why: str, fallback: bool = False) -> Choice:
    num_bytes = 2 * (costs.size - 1) / costs.size * layer.out * layer.columns * layer.element_bytes
    return Choice(
        kind="dense",
        layers=(layer.name,),
        biases=(None,),
        text="none",
        why=why,
        num_bytes=num_bytes,
        seconds=costs.seconds(num_bytes, 0.0),
        rows=layer.rows,
        fallback=fallback,
    )
