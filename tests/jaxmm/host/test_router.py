"""The router against a list of replicas whose work is known."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from jaxmm.host.router import Offer, Router

SLOTS = 3
LENGTH = 100
"""Tokens of every request here."""


def test_the_longest_prefix_decides_where_the_load_is_equal() -> None:
    offers = [Offer(0, 50, False), Offer(64, 50, False), Offer(32, 50, False)]
    assert Router(3).best(offers) == 1


def test_a_prefix_does_not_outweigh_more_work_than_it_saves() -> None:
    router = Router(2)
    assert router.best([Offer(1000, 900, False), Offer(0, 0, False)]) == 0
    assert router.best([Offer(1000, 1100, False), Offer(0, 0, False)]) == 1


def test_a_replica_without_a_free_slot_comes_last_whatever_it_has_cached() -> None:
    assert Router(2).best([Offer(9999, 0, True), Offer(0, 500, False)]) == 1
    assert Router(2).best([Offer(9999, 0, True), Offer(0, 500, True)]) == 0


def test_equals_take_turns() -> None:
    router, taken = Router(3), []
    for _ in range(7):
        taken.append(router.best([Offer(0, 0, False)] * 3))
        router.note(taken[-1])
    assert taken == [0, 1, 2, 0, 1, 2, 0]


@given(st.lists(st.builds(Offer, st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1))
def test_asking_changes_nothing(offers: list[Offer]) -> None:
    router = Router(len(offers))
    assert router.best(offers) == router.best(offers)


class Routing(RuleBasedStateMachine):
    """Requests of a few conversations come and go on three replicas that never evict."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(3)
        self.running: list[list[int]] = [[], [], []]
        self.cached: list[set[int]] = [set(), set(), set()]
        self.last: list[int] = [-1, -1, -1]
        self.clock = 0

    def offers(self, conversation: int) -> list[Offer]:
        return [
            Offer(
                (LENGTH - 1) * (conversation in self.cached[r]),
                LENGTH * len(self.running[r]),
                len(self.running[r]) >= SLOTS,
            )
            for r in range(3)
        ]

    @rule(conversation=st.integers(0, 4))
    def come(self, conversation: int) -> None:
        offers = self.offers(conversation)
        chosen = self.router.best(offers)
        ranks = [(o.is_full, o.ahead - o.saved, self.last[r]) for r, o in enumerate(offers)]
        assert ranks[chosen] == min(ranks)
        self.router.note(chosen)
        self.clock += 1
        self.last[chosen] = self.clock
        self.running[chosen].append(conversation)
        self.cached[chosen].add(conversation)

    @precondition(lambda self: any(self.running))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        busy = [r for r in range(3) if self.running[r]]
        replica = data.draw(st.sampled_from(busy))
        self.running[replica].pop(data.draw(st.integers(0, len(self.running[replica]) - 1)))


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
