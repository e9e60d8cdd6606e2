"""The clock of a rehearsed rank's device: predicted times count as predicted, and a process that is late shows."""

from __future__ import annotations

import random

from dflop.runtime.device_clock import DeviceClock, DeviceRecorder

HERE, THERE = 7, 8


class Host:
    """A process that wakes `late_ns` after the moment it slept to, and whose every look at the clock takes `own_ns`."""

    def __init__(self, late_ns=0, own_ns=0):
        self.at = 0
        self._late_ns, self._own_ns = late_ns, own_ns

    def now(self):
        self.at += self._own_ns
        return self.at

    def sleep(self, moment):
        if moment > self.at:
            self.at = moment + self._late_ns


def clock_of(host, clocks=(HERE, HERE)):
    clock = DeviceClock(HERE, clocks, host.now, host.sleep)
    clock.begin(1_000)
    return clock


def run(clock, duration, sent=(), transfer=0, receivers=()):
    """One action; its start and end."""
    clock.arrive(list(sent), transfer)
    clock.ready()
    clock.run(duration, receivers)
    clock.finish()
    return clock.start_ns, clock.end_ns


def test_actions_follow_each_other_and_their_inputs():
    """Worked by hand: the input of the second comes at 1,500 + 100, that of the third long before."""
    clock = clock_of(Host())
    assert run(clock, 300) == (1_000, 1_300)
    assert run(clock, 200, sent=[1_200, 1_500], transfer=100) == (1_600, 1_800)
    assert run(clock, 50, sent=[900], transfer=100) == (1_800, 1_850)


def test_waking_late_does_not_add_up():
    """As long as the process is back before the action that runs meanwhile has ended."""
    clock, end = clock_of(Host(late_ns=90, own_ns=5)), 1_000
    for _ in range(1_000):
        start, end_of_this = run(clock, 100)
        assert (start, end_of_this) == (end, end + 100)
        end = end_of_this


def test_a_process_that_comes_too_late_shows_in_full():
    """It is stuck for 700 ns while an action of 300 runs: the device idles for 400, and goes on from there."""
    host = Host()
    clock = clock_of(host)
    run(clock, 300)
    # It slept to the start of the first action, at 1,000, and was stuck.
    host.at = 1_000 + 700
    assert run(clock, 100) == (1_700, 1_800)
    assert run(clock, 100) == (1_800, 1_900)


def test_what_goes_to_another_machine_leaves_when_it_is_done():
    """To a rank here the message leaves at once, before the action before it has begun; to one there it does not."""
    host = Host()
    clock = clock_of(host, (HERE, HERE, THERE))
    run(clock, 300, receivers=[1])
    assert host.at == 0
    clock.ready()
    assert host.at == 1_000
    run(clock, 300, receivers=[1, 2])
    assert host.at == 1_600
    assert (clock.num_here, clock.is_one_machine) == (2, False)


def test_an_action_without_work_takes_no_time_and_waits_for_no_process():
    host = Host()
    clock = clock_of(host)
    recorder = DeviceRecorder(0, clock)
    recorder.begin()
    host.at = 50_000
    recorder.add("0F0", recorder.now())
    recorder.add("tail", recorder.now())
    spans = recorder.finish()
    assert spans.actions == (("0F0", 1_000, 1_000),)
    assert spans.start_ns == 1_000


def test_lateness_is_the_only_difference_to_a_simulation():
    """A random chain of two ranks: with processes on time, the ends are those of the longest path."""
    draw = random.Random(3)
    up, down = clock_of(Host(late_ns=3)), clock_of(Host(late_ns=3))
    free = [1_000, 1_000]
    for _ in range(200):
        durations = [draw.randrange(10, 500) for _ in range(2)]
        transfer = draw.randrange(50)
        free[0] += durations[0]
        free[1] = max(free[1], free[0] + transfer) + durations[1]
        _, sent = run(up, durations[0], receivers=[1])
        assert sent == free[0]
        assert run(down, durations[1], [sent], transfer)[1] == free[1]


def test_how_long_the_first_action_needed_is_kept():
    """The start was agreed on at 400; the process comes to its first action at 950, and to a later one at 5,000."""
    host = Host()
    clock = DeviceClock(HERE, (HERE, HERE), host.now, host.sleep)
    clock.begin(1_000, 400)
    host.at = 950
    assert run(clock, 300) == (1_000, 1_300)
    host.at = 5_000
    run(clock, 300)
    assert clock.needed_ns == 550
    # A rank that is late for the start says so, too; and one that starts nothing needed nothing.
    clock.begin(6_000, 5_500)
    host.at = 6_100
    assert run(clock, 300) == (6_100, 6_400)
    assert clock.needed_ns == 600
    clock.begin(9_000, 8_000)
    assert run(clock, 300, sent=[9_500]) == (9_500, 9_800)
    assert clock.needed_ns == 0
