"""The parts of elastic workers that need no other process."""

import io
import json
import threading

import pytest

from dad.elastic import wire
from dad.elastic.quorum import Claim, decide
from dad.elastic.round import meet_round
from dad.elastic.run import run_fn
from dad.elastic.sampler import Share
from dad.elastic.snapshot import digest
from dad.elastic.state import ObjectState
from dad.elastic.wire import HostUpdateResult
from dad.errors import (
    DadInternalError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    LostStateError,
    MismatchError,
)
from dad.runner.elastic import round_name
from dad.world import World


def claims(group, *ranks, **common):
    """Of ranks (member, versions, confirmed); without versions: of a newcomer."""
    return [
        Claim(member, versions, confirmed, list(group) if confirmed else [], **common)
        for member, versions, confirmed in ranks
    ]


def test_at_the_beginning_rank_0_is_the_source():
    assert decide(claims("", ("a", [], 0), ("b", [], 0))).source == 0


def test_the_source_is_a_survivor_even_if_rank_0_is_a_newcomer():
    decision = decide(claims("abc", ("new", [], 0), ("c", [4], 4), ("a", [4], 4)))
    assert (decision.source, decision.version, decision.lost) == (1, 4, ("b",))
    assert decision.survivors == (1, 2)


def test_survivors_one_commit_apart_go_on_from_the_newest_version_that_all_of_them_have():
    decision = decide(claims("abc", ("a", [4, 5], 4), ("b", [4], 4)))
    assert decision.version == 4
    assert decision.source == 1  # it has nothing newer to go back from
    assert decision.next_version == 6  # not one that somebody has something else under


def test_a_rank_that_knows_of_the_commit_before_all_others_do_counts_them_as_having_it():
    decision = decide(claims("ab", ("a", [5], 5), ("b", [4, 5], 4)))
    assert (decision.version, decision.survivors) == (5, (0, 1))


def test_a_rank_that_had_fallen_out_of_the_group_is_a_newcomer():
    stale = Claim("x", [9], 9 - 8, ["x", "a", "b"])
    fresh = claims("ab", ("a", [7], 7), ("b", [7], 7))
    assert decide([stale, *fresh]).survivors == (1, 2)


@pytest.mark.parametrize("left", [1, 2])
def test_less_than_half_of_the_group_is_not_the_job(left):
    here = claims("abcde", *[(member, [4], 4) for member in "abcde"[:left]])
    with pytest.raises(LostStateError, match="all that is left of the 5 ranks"):
        decide([*here, *claims("", ("new", [], 0), ("new2", [], 0))])
    assert decide(here, minority_may_go_on=True).version == 4


def test_half_of_the_group_is_enough_since_there_is_one_launcher():
    assert decide(claims("abcd", ("a", [4], 4), ("b", [4], 4))).lost == ("c", "d")


def test_those_who_left_in_order_do_not_count():
    decision = decide(claims("abcde", ("a", [4], 4), left_in_order=True))
    assert decision.survivors == (0,) and decision.in_order


def test_newcomers_alone_are_not_the_job():
    with pytest.raises(LostStateError, match="all that had it are gone"):
        decide(claims("", ("new", [], 0), knows_of_state=True))


@pytest.mark.parametrize(
    "message",
    [
        wire.PingRequest(),
        wire.PingResponse(wire.SERVICE_NAME, "127.0.0.1"),
        wire.HostsUpdatedRequest(1795033969, wire.HostUpdateResult.mixed),
        wire.AckResponse(),
    ],
)
def test_a_message_is_read_as_it_was_written(message):
    stream = io.BytesIO()
    wire.write(stream, b"k" * 32, message)
    stream.seek(0)
    read = wire.read(stream, b"k" * 32)
    assert type(read) is type(message) and vars(read) == vars(message)


def test_nothing_is_unpickled_without_the_key_or_but_the_messages_of_the_protocol():
    stream = io.BytesIO()
    wire.write(stream, b"k" * 32, wire.PingRequest())
    stream.seek(0)
    with pytest.raises(wire.MessageError, match="digest"):
        wire.read(stream, b"x" * 32)
    with pytest.raises(wire.MessageError, match=r"posix\.system|os\.system"):
        wire.loads(b"cos\nsystem\n(X\x04\x00\x00\x00truetR.")


class Store:
    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def get(self, scope, key):
        with self.changed:
            return self.values.get((scope, key))

    def put(self, scope, key, value):
        with self.changed:
            self.values[scope, key] = value
            self.changed.notify_all()


def meet_all(store, size, ranks=None, timeout=20.0):
    """What each rank gets, or its error."""
    got = {}

    def run(rank):
        world = World(rank=rank, size=size, rendezvous="http://x:1", start_timeout=timeout)
        try:
            got[rank] = meet_round(world, store).token
        except DadInternalError as error:
            got[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks or range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_ranks_agree_on_a_new_token_in_a_store_that_was_not_cleared():
    store = Store()
    first, second = meet_all(store, 3), meet_all(store, 3)
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]


def test_ranks_agree_also_with_one_that_comes_in_the_seat_of_a_dead_one():
    store = Store()
    dead = {}
    died = threading.Event()

    def die():
        dead.update(meet_all(store, 3, [2], timeout=0.0))
        died.set()

    threading.Thread(target=die).start()
    died.wait()
    assert isinstance(dead[2], DadInternalError)
    assert len({str(token) for token in meet_all(store, 3).values()}) == 1


def test_ranks_take_the_name_that_dadrun_gives_their_round():
    store = Store()
    store.put(round_name.SCOPE, round_name.KEY, round_name.new_name("my job"))
    given = json.loads(store.get(round_name.SCOPE, round_name.KEY))
    assert meet_all(store, 3) == dict.fromkeys(range(3), given["token"])
    assert len(store.values) == 1  # they have nothing to tell each other
    assert meet_round(World(rank=0, size=2, rendezvous="http://x:1"), store).job == "my job"


def test_a_rank_that_does_not_come_is_named():
    got = meet_all(Store(), 3, [0, 1], timeout=0.3)
    assert "ranks [2] have not come to this round" in str(got[0])


@pytest.fixture
def ranks(monkeypatch):
    """Sets the number of ranks and this one."""

    def set_to(rank, size):
        monkeypatch.setattr("dad.basics.rank", lambda: rank)
        monkeypatch.setattr("dad.basics.size", lambda: size)

    return set_to


def share(ranks, rank, size, state=None, length=40):
    ranks(rank, size)
    sampler = Share(range(length), seed=3)
    if state is not None:
        sampler.load_state_dict(state)
    return sampler


def test_after_a_change_of_ranks_each_sample_of_the_epoch_comes_once(ranks):
    before = [share(ranks, rank, 4) for rank in range(4)]
    done = [index for one in before for index in list(one)[:5]]
    for one in before:
        one.record_batch(0, 5)
    after = [list(share(ranks, rank, 2, before[0].state_dict())) for rank in range(2)]
    assert sorted(done + sum(after, [])) == list(range(40))


def test_samples_that_ranks_have_recorded_by_themselves_do_not_come_again(ranks):
    sampler = share(ranks, 0, 4)
    sampler.record_indices([1, 2, 3])
    left = [index for rank in range(3) for index in share(ranks, rank, 3, sampler.state_dict())]
    assert set(left) == set(range(40)) - {1, 2, 3}
    ranks(0, 4)
    sampler.set_epoch(1)
    assert not sampler.processed_indices and len(sampler) == 10


def test_all_ranks_have_equally_many_samples_also_if_there_are_fewer_than_ranks(ranks):
    shares = [list(share(ranks, rank, 4, length=2)) for rank in range(4)]
    assert [len(one) for one in shares] == [1, 1, 1, 1]
    assert list(share(ranks, 0, 4, length=0)) == []


def test_a_state_goes_back_to_its_last_commit_also_inside_of_its_objects():
    state = ObjectState(step=0, losses=[])
    state.losses.append(0.5)
    state.step = 1
    state.commit()
    state.losses.append(0.4)
    state.step = 2
    state.restore()
    assert (state.step, state.losses) == (1, [0.5])


def test_news_of_one_second_count_each():
    state = ObjectState(step=0)
    for result in (HostUpdateResult.removed, HostUpdateResult.added):
        state.on_hosts_updated(1795033969, result)
        with pytest.raises(HostsUpdatedInterrupt) as interrupt:
            state.check_host_updates()
        assert interrupt.value.skip_sync == (result == HostUpdateResult.removed)
    state.check_host_updates()


def test_run_goes_back_after_a_loss_and_does_not_after_an_update_of_hosts():
    state = ObjectState(step=0)
    calls = []

    def train(state):
        calls.append(state.step)
        state.step += 1
        if len(calls) == 1:
            state.commit()
            state.step += 1
            raise HorovodInternalError("rank 3 is gone")
        if len(calls) == 3:
            raise HostsUpdatedInterrupt()
        return "done"

    assert run_fn(train, lambda: calls.append("reset"))(state) == "done"
    assert calls == [0, "reset", 1, "reset", 2]


def test_run_passes_on_what_would_come_again():
    def train(state):
        raise MismatchError("ranks disagree")

    with pytest.raises(MismatchError):
        run_fn(train, lambda: pytest.fail("no reset"))(ObjectState())


def test_a_digest_is_that_of_values_and_not_of_objects():
    import numpy as np

    one, same = {"b": [np.ones(2), 3], "a": {1, 2}}, {"a": {2, 1}, "b": [np.ones(4)[::2], 3]}
    assert digest(one) == digest(same)
    assert digest(one) != digest({**same, "b": [np.ones(2), 4]})
    assert digest({"x": np.zeros(2, np.float32)}) != digest({"x": np.zeros(4, np.float16)})
