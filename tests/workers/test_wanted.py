"""Against a list of who wants what, and what the cache holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.blocks import BlockName
from workers.wanted import Wanted

names = st.builds(BlockName, st.integers(0, 3))


class WantedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wanted = Wanted()
        self.wants: list[BlockName] = []
        self.cached: set[BlockName] = set()

    @rule(name=names)
    def add(self, name: BlockName) -> None:
        """Who adds has looked, and found that it is not there, or not any more."""
        self.wanted.add([name])
        self.wants.append(name)
        self.cached.discard(name)

    @rule(name=names)
    def remove(self, name: BlockName) -> None:
        if name in self.wants:
            self.wanted.remove([name])
            self.wants.remove(name)

    @rule(name=names)
    def compute(self, name: BlockName) -> None:
        if name in self.wants:
            self.wanted.compute([name])
            self.wants.remove(name)
            self.cached.add(name)

    @invariant()
    def what_is_not_free_is_what_will_be_computed(self) -> None:
        assert len(self.wants) - self.wanted.num_free == len(set(self.wants) - self.cached)


WantedMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestWanted = WantedMachine.TestCase
