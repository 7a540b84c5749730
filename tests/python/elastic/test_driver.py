"""What the driver of an elastic job decides, with a clock of the test's and workers that do not exist."""

import random

import pytest

from dad.runner.elastic.driver import (
    LEAVE_SECONDS,
    UNRESPONSIVE_SECONDS,
    Driver,
    Settings,
    State,
)
from dad.runner.elastic.hosts import MAX_FAILURES, STEADY_SECONDS, HostBook
from dad.runner.elastic.notify import ADDED, REMOVED
from dad.runner.elastic.placement import Seat, number, places
from dad.runner.hosts import Host


class Lab:
    """A driver, and what it has done."""

    def __init__(self, hosts, **settings):
        self.now = 100.0
        self.started = []
        self.answers = {}
        self.news = []
        self.probed = []
        self.ended = []
        self.said = []
        self.rounds = 0
        self.abandoned = 0
        self.hung_up = set()
        settings.setdefault("may_grow", False)
        self.driver = Driver(Settings(**settings), self, random.Random(1))
        self.hosts(hosts)

    # ---- the driver's Actions

    def start(self, place, is_newcomer):
        self.started.append((Seat(place.host, place.local_rank), is_newcomer))

    def answer(self, seat, place):
        self.answers[seat] = place

    def is_waiting(self, seat):
        return seat not in self.hung_up

    def notify(self, seat, timestamp, result):
        self.news.append((seat, timestamp, result))

    def probe(self, seat):
        self.probed.append(seat)

    def end(self, seat, at_once=False):
        self.ended.append((seat, at_once))

    def begin_round(self, ranks):
        self.rounds += 1

    def abandon_round(self):
        self.abandoned += 1

    def say(self, text):
        self.said.append(text)

    # ---- what happens

    def hosts(self, text):
        found = [Host(name, int(slots)) for name, slots in (item.split(":") for item in text.split())]
        self.driver.hosts_found(found, self.now)

    def ask(self, *seats):
        for seat in seats:
            self.driver.asked(parse(seat), self.now)

    def register(self, *seats):
        for seat in seats:
            self.driver.registered(parse(seat), self.now)

    def exit(self, seat, code=137, **more):
        self.driver.exited(parse(seat), code, f"code {code}", self.now, **more)

    def wait(self, seconds):
        """A tick each second, at the latest."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.driver.next_tick(self.now))
            self.driver.tick(self.now)

    def train(self, *seats):
        """All of these have their place, run and can be told news."""
        self.ask(*seats)
        self.register(*seats)

    def ranks(self):
        return {str(seat): rank for seat, rank in self.driver.members.items()}

    def starts(self):
        return [str(seat) for seat, _ in self.started]

    @property
    def verdict(self):
        return self.driver.verdict


def parse(text):
    host, _, slot = text.rpartition(":")
    return Seat(host, int(slot))


def training(hosts="a:2 b:2", seats=("a:0", "a:1", "b:0", "b:1"), steady=True, **settings):
    lab = Lab(hosts, **{"min_np": 2, **settings})
    lab.train(*seats)
    if steady:
        lab.wait(STEADY_SECONDS)
    return lab


# ---- ranks


def seats(*texts):
    return [parse(text) for text in texts]


def test_survivors_keep_their_ranks():
    before = dict(zip(seats("a:0", "a:1", "b:0", "b:1"), range(4), strict=True))
    left = seats("a:0", "b:0", "b:1")
    assert number(left, before) == dict(zip(left, (0, 2, 1), strict=True))
    # A successor gets the rank that is free.
    assert number(seats("a:0", "a:1", "b:0", "b:1"), dict(zip(left, (0, 2, 1), strict=True))) == {
        **dict(zip(left, (0, 2, 1), strict=True)),
        parse("a:1"): 3,
    }


def test_rank_0_is_a_survivor():
    before = dict(zip(seats("a:0", "a:1", "b:0"), range(3), strict=True))
    # Who loses its rank anyway takes it.
    assert number(seats("a:1", "b:0"), before) == {parse("a:1"): 1, parse("b:0"): 0}
    # Else one has to move, for a newcomer must not be the source of the state.
    assert number(seats("a:0", "a:1", "b:0"), {parse("a:1"): 1, parse("b:0"): 2}) == {
        parse("a:1"): 0,
        parse("b:0"): 2,
        parse("a:0"): 1,
    }


def test_places_count_who_is_there():
    found = places({parse("a:1"): 0, parse("b:0"): 1, parse("b:1"): 2})
    a, b = found[parse("a:1")], found[parse("b:1")]
    assert (a.local_rank, a.local_size, a.cross_rank, a.cross_size) == (1, 1, 0, 2)
    assert (b.rank, b.size, b.local_rank, b.local_size, b.cross_rank, b.cross_size) == (2, 3, 1, 2, 1, 2)


# ---- the beginning


def test_first_round_has_all_slots_up_to_max_np():
    lab = Lab("a:2 b:2", min_np=1, max_np=3)
    assert lab.starts() == ["a:0", "a:1", "b:0"]
    lab.ask("a:0", "a:1")
    assert lab.answers == {}
    lab.ask("b:0")
    assert {seat: place.rank for seat, place in lab.answers.items()} == {
        parse("a:0"): 0,
        parse("a:1"): 1,
        parse("b:0"): 2,
    }


def test_job_waits_for_enough_slots_and_then_gives_up():
    lab = Lab("a:1", min_np=2, np=3, may_grow=True, elastic_timeout=60)
    lab.wait(30)
    assert lab.starts() == []
    lab.hosts("a:1 b:1")
    lab.wait(20)
    assert lab.starts() == []  # -np has not come yet
    lab.wait(15)
    assert lab.starts() == ["a:0", "b:0"]  # but --min-np has
    lab = Lab("a:1", min_np=2, may_grow=True, elastic_timeout=60)
    lab.wait(61)
    assert lab.verdict.code == 1
    assert "there are 1 slots where 2 are needed" in lab.verdict.text


def test_worker_that_fails_before_the_first_round_is_not_waited_for():
    lab = Lab("a:2 b:1", min_np=2)
    lab.ask("a:0")
    lab.exit("b:0", 1)
    assert lab.answers == {}
    lab.ask("a:1")
    assert lab.ranks() == {"a:0": 0, "a:1": 1}
    assert lab.driver.round == 1  # no reset: nobody has been in training yet


def test_worker_that_starts_slowly_joins_later():
    lab = Lab("a:3", min_np=2, start_timeout=30)
    lab.ask("a:0", "a:1")
    lab.wait(29)
    assert lab.answers == {}
    lab.wait(2)
    assert lab.ranks() == {"a:0": 0, "a:1": 1}
    lab.register("a:0")
    lab.ask("a:2")
    assert [(str(seat), result) for seat, _, result in lab.news] == [("a:0", ADDED)]


# ---- losses


def test_lost_worker_is_started_again_while_the_others_go_on():
    lab = training()
    lab.exit("a:1")
    assert lab.started[-1] == (parse("a:1"), True)
    lab.ask("b:1", "a:0")
    assert lab.driver.round == 1
    lab.ask("b:0")
    assert lab.ranks() == {"a:0": 0, "b:0": 2, "b:1": 1}
    assert lab.answers[parse("b:1")].size == 3


def test_successor_joins_at_the_next_commit():
    lab = training()
    lab.exit("a:1")
    lab.ask("a:0", "b:0", "b:1")
    assert lab.news == []
    lab.wait(3)
    lab.ask("a:1")
    assert [(str(seat), result) for seat, _, result in lab.news] == [("a:0", ADDED)]
    assert lab.driver.round == 2
    lab.ask("a:0", "b:0", "b:1")
    assert lab.ranks() == {"a:0": 0, "a:1": 3, "b:0": 2, "b:1": 1}
    assert lab.driver.round == 3


def test_two_successors_join_together():
    lab = training("a:2 b:2")
    lab.exit("b:0")
    lab.exit("b:1")
    lab.ask("a:0", "a:1")
    lab.wait(3)
    lab.ask("b:0")
    assert lab.news == []
    lab.ask("b:1")
    assert len(lab.news) == 1
    # One that takes much longer is not waited for.
    lab = training("a:2 b:2")
    lab.exit("b:0")
    lab.exit("b:1")
    lab.ask("a:0", "a:1")
    lab.ask("b:0")
    lab.wait(2)
    assert len(lab.news) == 1


def test_news_that_did_not_arrive_are_told_again_with_a_later_time():
    lab = training()
    lab.exit("a:1")
    lab.ask("a:0", "b:0", "b:1")
    lab.ask("a:1")
    lab.driver.not_told(parse("a:0"))
    lab.wait(1)
    assert len(lab.news) == 2
    assert lab.news[1][1] > lab.news[0][1]


def test_news_wait_for_the_service_of_rank_0():
    lab = Lab("a:2", min_np=1)
    lab.ask("a:0", "a:1")
    lab.hosts("a:3")
    lab.ask("a:2")
    lab.wait(2)
    assert lab.news == []
    lab.register("a:0")
    assert len(lab.news) == 1


def test_loss_while_ranks_connect_ends_the_round():
    lab = training()
    before = lab.abandoned
    lab.exit("b:0")
    assert lab.abandoned == before + 1


def test_who_has_hung_up_is_asked_again_before_a_round_begins():
    lab = training("a:2", ("a:0", "a:1"))
    lab.hung_up.add(parse("a:0"))
    lab.ask("a:0", "a:1")
    assert lab.driver.round == 1
    lab.hung_up.clear()
    lab.ask("a:0")
    assert lab.driver.round == 2


def test_fewer_than_min_np_wait_for_a_successor():
    lab = training("a:2", ("a:0", "a:1"))
    lab.exit("a:1")
    lab.ask("a:0")
    assert lab.driver.round == 1
    assert any("1 rank is left where --min-np is 2" in text for text in lab.said)
    lab.wait(3)
    lab.ask("a:1")
    assert lab.driver.round == 2
    assert lab.ranks() == {"a:0": 0, "a:1": 1}


def test_fewer_than_min_np_for_too_long_end_the_job_with_every_reason():
    lab = training("a:1 b:1", ("a:0", "b:0"), elastic_timeout=60)
    lab.exit("b:0")
    lab.ask("a:0")
    lab.wait(59)
    assert lab.verdict is None
    lab.wait(2)
    assert lab.verdict.code == 1
    assert "1 rank is left where --min-np is 2, also after 60 s" in lab.verdict.text
    assert [(str(f.seat), f.rank, f.reason) for f in lab.verdict.failures] == [("b:0", 1, "code 137")]


def test_job_without_a_survivor_has_failed():
    lab = training("a:2", ("a:0", "a:1"), min_np=1)
    lab.exit("a:1", 1, lost_peer=True)
    assert lab.verdict is None
    lab.exit("a:0", 137)
    assert lab.verdict.code == 137
    assert lab.verdict.culprit.seat == parse("a:0")


def test_job_is_reset_only_so_often():
    lab = training("a:2", ("a:0", "a:1"), min_np=1, reset_limit=1)
    lab.exit("a:1")
    lab.ask("a:0")
    assert lab.driver.round == 2
    lab.ask("a:1", "a:0")
    assert lab.verdict.code == 1
    assert "reset 2 times, and --reset-limit is 1" in lab.verdict.text


def test_member_that_does_not_answer_is_ended():
    lab = training()
    lab.exit("b:1")
    lab.ask("a:0", "a:1")
    lab.wait(UNRESPONSIVE_SECONDS - 1)
    assert set(lab.probed) == {parse("b:0")}
    assert lab.ended == []
    lab.driver.answered_probe(parse("b:0"), lab.now)
    lab.wait(UNRESPONSIVE_SECONDS - 2)
    assert lab.ended == []
    lab.wait(3)
    assert lab.ended == [(parse("b:0"), True)]
    lab.exit("b:0")
    assert lab.ranks() == {"a:0": 0, "a:1": 1}


# ---- the end


def test_job_ends_well_when_all_members_do():
    lab = training("a:2", ("a:0", "a:1"))
    lab.exit("a:0", 0)
    assert lab.verdict is None
    lab.exit("a:1", 0)
    assert lab.verdict.code == 0


def test_nothing_is_started_while_a_job_ends():
    lab = training("a:2", ("a:0", "a:1"), min_np=1)
    lab.exit("a:0", 0)
    lab.exit("a:1", 3)
    assert lab.starts() == ["a:0", "a:1"]
    assert lab.verdict.code == 3


def test_worker_that_leaves_the_others_in_training_is_started_again():
    lab = training("a:2 b:1", ("a:0", "a:1", "b:0"))
    lab.exit("a:1", 0)
    assert lab.starts() == ["a:0", "a:1", "b:0"]
    lab.ask("a:0", "b:0")
    assert lab.driver.round == 2
    assert lab.starts()[3:] == ["a:1"]
    assert any("rank 1 on a ended with exit code 0 while the others were still" in text for text in lab.said)


# ---- hosts come and go


def test_new_host_joins_when_its_workers_are_ready():
    lab = training("a:2", ("a:0", "a:1"), may_grow=True)
    lab.hosts("a:2 b:1")
    assert lab.started[-1] == (parse("b:0"), True)
    assert lab.news == []
    lab.ask("b:0")
    assert len(lab.news) == 1
    lab.ask("a:0", "a:1")
    assert lab.ranks() == {"a:0": 0, "a:1": 1, "b:0": 2}


def test_removed_host_leaves_between_two_rounds():
    lab = training(may_grow=True)
    lab.hosts("b:2")
    # Never "removed" alone: a newcomer may be there by then, and all must exchange their state.
    assert [(str(seat), result) for seat, _, result in lab.news] == [("a:0", ADDED | REMOVED)]
    lab.ask("a:0", "a:1", "b:0", "b:1")
    assert lab.answers[parse("a:0")] is None
    assert lab.ranks() == {"b:0": 0, "b:1": 1}
    lab.exit("a:0", 1)
    assert lab.driver.failures == []
    lab.wait(LEAVE_SECONDS + 1)
    assert lab.ended == [(parse("a:1"), False)]


def test_hosts_that_are_gone_for_a_moment_stay_in_a_job_that_cannot_go_on_without():
    lab = training("a:2", ("a:0", "a:1"), may_grow=True)
    lab.hosts("")
    lab.ask("a:0", "a:1")
    assert lab.verdict is None
    lab.hosts("a:2")
    assert lab.ranks() == {"a:0": 0, "a:1": 1}
    assert lab.driver.round == 2


def test_worker_that_is_starting_on_a_host_that_goes_is_ended():
    lab = training("a:2", ("a:0", "a:1"), may_grow=True)
    lab.hosts("a:2 b:1")
    lab.hosts("a:2")
    assert lab.ended == [(parse("b:0"), False)]
    assert lab.driver.workers[parse("b:0")].state is State.LEAVING


# ---- hosts that fail


def fail_repeatedly(lab, seat="b:0"):
    for _ in range(MAX_FAILURES):
        lab.wait(4)
        lab.exit(seat, 1)


def test_host_on_which_workers_fail_repeatedly_gets_no_more():
    lab = training("a:2 b:1", ("a:0", "a:1", "b:0"), steady=False)
    fail_repeatedly(lab)
    assert lab.starts().count("b:0") == MAX_FAILURES
    assert any("3 workers in a row have failed on b" in text for text in lab.said)
    lab.wait(1000)
    assert lab.starts().count("b:0") == MAX_FAILURES
    lab.ask("a:0", "a:1")
    assert lab.ranks() == {"a:0": 0, "a:1": 1}


def test_worker_that_was_in_training_is_no_failure_of_its_host():
    lab = training("a:2 b:1", ("a:0", "a:1", "b:0"))
    for _ in range(4 * MAX_FAILURES):
        lab.exit("b:0")
        lab.ask("a:0", "a:1")
        lab.wait(1)
        lab.train("b:0", "a:0", "a:1")
        assert "b:0" in lab.ranks()
        lab.wait(STEADY_SECONDS)


def test_workers_that_are_lost_in_short_rounds_are_no_failure_of_their_host():
    lab = training("a:4", ("a:0", "a:1", "a:2", "a:3"), min_np=1)
    for lost, *left in (("a:3", "a:0", "a:1", "a:2"), ("a:2", "a:0", "a:1"), ("a:1", "a:0")):
        lab.exit(lost)
        lab.ask(*left)  # they have been in this round for no time
    assert all(text.endswith("it is started again") for text in lab.said if "was lost" in text)
    assert sorted(lab.starts()[4:]) == ["a:1", "a:2", "a:3"]


def test_loss_on_a_host_that_gets_no_more_says_so():
    lab = training("a:1 b:2", ("a:0", "b:0", "b:1"), min_np=1, steady=False)
    fail_repeatedly(lab, "b:0")
    lab.wait(STEADY_SECONDS)
    lab.exit("b:1")
    assert lab.said[-1].endswith("was lost: code 137; no more are started on b in this job")


def test_others_on_a_host_that_gets_no_more_go_on():
    lab = training("a:2", ("a:0", "a:1"), min_np=1, steady=False)
    fail_repeatedly(lab, "a:1")
    lab.ask("a:0")
    assert lab.ranks() == {"a:0": 0}
    lab.wait(100)
    assert lab.verdict is None


def test_last_host_that_fails_ends_a_job_that_has_too_few():
    lab = training("a:2", ("a:0", "a:1"), steady=False)
    lab.exit("a:1", 1)
    lab.ask("a:0")
    for _ in range(MAX_FAILURES - 1):
        lab.wait(3)
        lab.exit("a:1", 1)
    assert lab.verdict.code == 1
    assert "there is no host on which another could be started" in lab.verdict.text


def test_cooldown_brings_a_host_back():
    lab = training("a:2 b:1", ("a:0", "a:1", "b:0"), steady=False, cooldown=(60.0, 1000.0))
    fail_repeatedly(lab)
    lab.wait(59)
    assert lab.starts().count("b:0") == MAX_FAILURES
    lab.wait(32)
    assert lab.starts().count("b:0") == MAX_FAILURES + 1


@pytest.mark.parametrize("times", [1, 2, 3, 10])
def test_cooldown_grows_within_its_range(times):
    book = HostBook((10.0, 100.0), random.Random(3))
    book.update([Host("a", 1)])
    for _ in range(times * MAX_FAILURES):
        book.failed("a", was_steady=False, now=0.0)
    shortest = 10.0 * 2 ** (times - 1)
    assert min(100.0, shortest) <= book.next_return(0.0) <= min(100.0, 1.5 * shortest)
    assert book.seats(0.0) == []
    assert book.seats(100.0) == [parse("a:0")]
