"""What a rank keeps of gradients between steps, in the form that a checkpoint stores.

The core keeps a residual per request: one that this rank has not sent yet (E_w), and one that it has not
given back yet as an owner (E_o). Their form follows the plan and the number of ranks. To carry them over to
another plan or to another number of ranks they are brought into one form that depends on neither: for each
tensor the share v_w of this rank in what is still to be applied, so that

    sum of all gradients = sum of what was applied + sum over ranks of v_w

Where one rank of each host exchanges for all of it (circle.py), size is that of hosts, and the other ranks'
v_w are zero.

    average:               v_w = E_w / size + E_o
    sum, low rank:         v_w = E_w + size * E_o        its owner's residual is that of the mean
    sum, int8, chunk_topk: v_w = E_w + E_o

How each kind of exchange keeps E_w and E_o is in kept.py. Nothing else of a state is carried over: not the
warm starts, not the averages that thresholds are made of, not the number of qsgd's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dad.local_steps.saved import is_local, merge_rounds
from dad.planning.circle import Circle, Place, as_hosts
from dad.planning.planner import Choice, Plan
from dad.state.kept import Shape, Tensors


def keeps(choice: Choice) -> bool:
    """Whether the core keeps something between steps: gradients, a warm start, or the step number by which
    qsgd rounds."""
    return choice.row.lossy


def keeps_gradients(choice: Choice) -> bool:
    """Whether unsent parts wait for a later step."""
    return choice.row.kept is not None and choice.row.kept.keeps_gradients(choice)


def layout(choice: Choice, size: int) -> tuple[Any, ...]:
    """Choices with the same layout can go on with each other's state."""
    options = ("layer", "combine", "feedback", "bucket", "chunk", "first", "rule")
    return (choice.kind, choice.biases, size, *(choice.option(option) for option in options))


def shares(tensors: Tensors, choice: Choice, shapes: dict[str, Shape], place: Place) -> Tensors:
    """v_w of the tensors of a request, from its state."""
    if choice.row.kept is None or not choice.row.kept.keeps_gradients(choice):
        return {}
    return choice.row.kept.shares(tensors, choice, shapes, place)


def state(kept: Tensors, choice: Choice, place: Place, dtype: np.dtype) -> Tensors:
    """The state of a request that still has to apply these shares."""
    own = {name for pair in choice.own() for name in pair if name is not None}
    if choice.row.kept is None or own.isdisjoint(kept):
        return {}
    return choice.row.kept.state(kept, choice, place, dtype)


# Checkpoints


def saved_shares(saved: dict[str, Any]) -> Tensors:
    """v_w of all tensors of a saved state."""
    circle = Circle(saved["size"], saved["rank"], as_hosts(saved.get("hosts", ())))
    place = circle.place(saved["average"])
    total = dict(saved["kept"])
    shapes = {name: tuple(shape) for name, shape, *_ in saved["tensors"]}
    for choice in Plan.from_dict(saved["kept_by"]).choices:
        tensors = saved["states"].get(choice.layers[0])
        if tensors:
            add_shares(total, shares(tensors, choice, shapes, place))
    return total


def add_shares(total: Tensors, more: Tensors) -> None:
    for name, share in more.items():
        total[name] = total[name] + share if name in total else share


def merge(saved: Sequence[dict[str, Any]], new_size: int) -> list[dict[str, Any]]:
    """Redistributes the saved states of all ranks, in any order, for another number of ranks: one for each
    new rank. Σ v_w is the same before and after: old rank w goes to new rank w mod new_size, where shares add
    up."""
    if new_size < 1:
        raise ValueError(f"new_size={new_size} is not possible; 1 or more")
    if saved and is_local(saved[0]):
        return merge_rounds(saved, new_size, merge)
    size = len(saved)
    by_rank = {one["rank"]: one for one in saved}
    wrong_size = [one["size"] for one in saved if one["size"] != size]
    if sorted(by_rank) != list(range(size)) or wrong_size:
        raise ValueError(
            f"states are those of ranks {sorted(by_rank)} of {(wrong_size or [size])[0]}; "
            f"all of them are needed, each once"
        )
    if new_size == size:
        return [by_rank[rank] for rank in range(size)]
    merged = []
    for rank in range(new_size):
        kept: Tensors = {}
        for old in range(rank, size, new_size):
            add_shares(kept, saved_shares(by_rank[old]))
        new = {**by_rank[0], "size": new_size, "rank": rank, "plan": None, "states": {}, "hosts": []}
        merged.append({**new, "kept": kept, "kept_by": Plan().as_dict()})
    return merged


def lost_on_load(saved: dict[str, Any], rank: int, size: int) -> str:
    """What a rank loses if it continues with this state, as a message; empty if it loses nothing."""
    if saved["size"] < 2 or not (saved["states"] or saved["kept"]):
        return ""
    if saved["rank"] != rank and rank < saved["size"]:
        what = f"rank {rank} loads the optimizer state of rank {saved['rank']}: what rank {rank} had kept"
    elif saved["rank"] == 0 and saved["size"] > size:
        what = f"a checkpoint of {saved['size']} ranks is loaded on {size}: what the other ranks had kept"
    else:
        return ""
    return (
        f"{what} for later steps is lost. Save with hvd.save(path, model=model, optimizer=optimizer), with "
        "Keras hvd.save_model(model, path), with TensorFlow hvd.save_checkpoint(checkpoint, path): these "
        "keep the state of all ranks"
    )


def under_names(saved: dict[str, Any], tensors: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """What was saved, under the names of these tensors, each with its name, shape, dtype and method. Keras
    numbers layers as they are made and prefixes some with the model's name, so the same model may have other
    names in this process. Then the order identifies the tensors."""
    names = [name for name, *_ in saved["tensors"]]
    theirs = [(tuple(shape), *rest) for _, shape, *rest in saved["tensors"]]
    ours = [tuple(rest) for _, *rest in tensors]
    our_names = [name for name, *_ in tensors]
    if theirs != ours or names == our_names:
        return saved
    new = dict(zip(names, our_names, strict=True))

    def renamed_plan(plan: dict[str, Any] | None) -> dict[str, Any] | None:
        if plan is None:
            return None
        choices = [
            {
                **choice,
                "layers": [new[name] for name in choice["layers"]],
                "biases": [new.get(name) for name in choice["biases"]],
            }
            for choice in plan["choices"]
        ]
        return {**plan, "choices": choices}

    return {
        **saved,
        "tensors": [(new[name], *rest) for name, *rest in saved["tensors"]],
        "plan": renamed_plan(saved["plan"]),
        "kept_by": renamed_plan(saved["kept_by"]),
        "too_large": [new[name] for name in saved["too_large"]],
        "states": {new[name]: tensors for name, tensors in saved["states"].items()},
        "kept": {new[name]: share for name, share in saved["kept"].items()},
        "guard": {new.get(name, name): one for name, one in saved.get("guard", {}).items()},
    }
