"""Learnt draft lengths under a load that rises: throughput does not fall when rows join and drafts become shorter, or end."""

import itertools

import pytest
from test_draft_length import DRAFTERS, MACHINES, World, learnt

LOADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
LONGEST = 6


def under_rising_load(policy, machine, drafter):
    """[(tokens per second, the same of plain decoding, mean length)] at each of LOADS, once the policy has seen it for a while; one
    policy throughout, as in a server."""
    found = []
    for number, count in enumerate(LOADS):
        world = World([0.7] * count, machine, drafter, noise=0.05, seed=number, longest=LONGEST)
        world.run(policy, 60)
        speed, history = world.run(policy, 150)
        found.append((speed, world.plain(), sum(map(sum, history)) / len(history) / count))
        for seq in world.sequences:
            policy.forget(seq)
    return found


class Table:
    """Drafts begin where the batch is large, which is the wrong way round."""

    def limits(self, sequences, caps):
        return [LONGEST if len(sequences) > 16 else 0] * len(sequences)

    def observe(self, step):
        pass

    def observe_plain(self, sequences, seconds):
        pass

    def wants_plain_time(self):
        return False

    def forget(self, sequence):
        pass


def falls(found):
    """The largest fall of throughput from one load to the next, as a share."""
    return max(1 - after[0] / before[0] for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_throughput_does_not_fall_where_lengths_change(machine, drafter):
    """From one row to 96: long drafts for one, short ones or none for many."""
    found = under_rising_load(learnt(LONGEST), MACHINES[machine], DRAFTERS[drafter])
    lengths = [length for _, _, length in found]
    assert lengths[0] > 1.5 and lengths[-1] < 1.2  # so that lengths do change
    assert falls(found) < 0.1, found
    assert all(speed > 0.85 * plain for speed, plain, _ in found), found


def test_a_table_that_is_wrong_would_fail_that():
    found = under_rising_load(Table(), MACHINES["cpu"], DRAFTERS["lookup"])
    assert falls(found) > 0.1, found
