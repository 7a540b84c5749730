"""How a request by a method ends, besides its result: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

# The bits of dad_core/include/dad/ticket.h.
_WANTS_PLAN = 1
_NOT_FINITE = 2
_TOO_LARGE = 4
_RANK_SHIFT = 8


@dataclass(frozen=True)
class Outcome:
    """wants_plan: some rank asks for another plan. not_finite: a gradient had NaN or infinities, so all ranks
    got NaN and their state is unchanged. rank: the lowest member of the set with such a gradient; None if
    unknown. too_large: a sparse form was larger than dense."""

    wants_plan: bool = False
    not_finite: bool = False
    too_large: bool = False
    rank: int | None = None

    @staticmethod
    def of(value: int) -> Outcome:
        """Decodes the value of a ticket."""
        if value <= 0:
            return _NOTHING
        number = value >> _RANK_SHIFT
        return Outcome(
            wants_plan=bool(value & _WANTS_PLAN),
            not_finite=bool(value & _NOT_FINITE),
            too_large=bool(value & _TOO_LARGE),
            rank=number - 1 if number else None,
        )


_NOTHING = Outcome()
