"""Handlers that were there before are called and put back, in whatever order Watches and others come and go."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from holdfast import Preemption
from holdfast.preemption.signals import Tap
from holdfast.preemption.watch import Watch

USR2 = Preemption(signals=["SIGUSR2"])


class Heard:
    """A handler of somebody else, that counts."""

    def __init__(self, before: Any = None) -> None:
        self.count = 0
        self.before = before

    def __call__(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.before is not None:
            self.before(number, frame)


def send(number: int = signal.SIGUSR2) -> None:
    signal.raise_signal(number)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, for signals that end it."""
    code = "import os, signal, sys, time\nfrom holdfast import Preemption\nfrom holdfast.preemption.watch import Watch\n"
    code += textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_noted_and_does_not_end_the_process(name: str) -> None:
    watch = Watch(Preemption())
    assert watch.wanted() == ""
    send(signal.Signals[name])
    assert watch.wanted() == name
    left = watch.seconds_left()
    assert left is not None
    assert 0 < left <= 30
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert watch.wanted() == name, "what was noted stays"


def test_the_handler_from_before_is_called_too_and_put_back() -> None:
    theirs = Heard()
    signal.signal(signal.SIGUSR2, theirs)
    watch = Watch(USR2)
    send()
    assert (watch.wanted(), theirs.count) == ("SIGUSR2", 1)
    watch.close()
    assert signal.getsignal(signal.SIGUSR2) is theirs
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_what_the_handler_from_before_raises_passes_and_the_signal_is_noted() -> None:
    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR2, stop)
    watch = Watch(USR2)
    with pytest.raises(KeyboardInterrupt):
        send()
    assert watch.wanted() == "SIGUSR2"
    watch.close()
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_signal_that_was_ignored_is_noted_and_ignored_again_afterwards() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    watch = Watch(USR2)
    send()
    assert watch.wanted() == "SIGUSR2"
    watch.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_watches_all_hear_and_close_in_any_order(order: tuple[int, ...]) -> None:
    theirs = Heard()
    signal.signal(signal.SIGUSR2, theirs)
    watches = [Watch(USR2) for _ in range(3)]
    send()
    assert [w.wanted() for w in watches] == ["SIGUSR2"] * 3
    assert theirs.count == 1
    for number in order:
        assert isinstance(signal.getsignal(signal.SIGUSR2), Tap)
        watches[number].close()
        watches[number].close()  # twice is no fault
    assert signal.getsignal(signal.SIGUSR2) is theirs
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_handler_that_was_put_on_top_stays_there() -> None:
    watch = Watch(USR2)
    tap: Any = signal.getsignal(signal.SIGUSR2)
    on_top = Heard(tap)
    signal.signal(signal.SIGUSR2, on_top)
    send()
    assert watch.wanted() == "SIGUSR2"
    watch.close()
    assert signal.getsignal(signal.SIGUSR2) is on_top
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_watches_below_and_above_the_handler_of_another_close_in_any_order() -> None:
    for first_closed in (0, 1):
        below = Watch(USR2)
        middle = Heard(signal.getsignal(signal.SIGUSR2))
        signal.signal(signal.SIGUSR2, middle)
        above = Watch(USR2)
        watches = [below, above]
        send()
        assert (below.wanted(), above.wanted(), middle.count) == ("SIGUSR2", "SIGUSR2", 1)
        watches[first_closed].close()
        watches[1 - first_closed].close()
        assert signal.getsignal(signal.SIGUSR2) is middle
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_our_handler_below_another_is_as_if_it_were_not_there_once_it_is_closed() -> None:
    done = run(
        """
        watch = Watch(Preemption())
        tap = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: tap(number, frame))
        signal.raise_signal(signal.SIGTERM)
        print("lives", flush=True)
        watch.close()
        signal.raise_signal(signal.SIGTERM)
        print("not reached")
        """
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "lives\n"), done.stderr


def test_a_harmless_signal_leaves_the_handler_on_top_in_its_place() -> None:
    watch = Watch(Preemption(signals=["SIGWINCH"]))
    on_top = Heard(signal.getsignal(signal.SIGWINCH))
    signal.signal(signal.SIGWINCH, on_top)
    watch.close()
    send(signal.SIGWINCH)
    assert on_top.count == 1
    assert signal.getsignal(signal.SIGWINCH) is on_top
    signal.signal(signal.SIGWINCH, signal.SIG_DFL)


def test_after_closing_the_signal_ends_the_process_as_ever() -> None:
    done = run(
        """
        watch = Watch(Preemption())
        signal.raise_signal(signal.SIGTERM)
        print("lives", flush=True)
        watch.close()
        signal.raise_signal(signal.SIGTERM)
        print("not reached")
        """
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "lives\n"), done.stderr


@pytest.mark.parametrize("on_top", [False, True], ids=["alone", "below_another"])
def test_a_forked_child_is_ended_by_sigterm(on_top: bool) -> None:
    """As the workers of a loader or a pool are, by those who then wait for them."""
    done = run(
        """
        watch = Watch(Preemption())
        if sys.argv[1] == "True":
            tap = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, frame: tap(number, frame))
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"!")
            time.sleep(30)
            os._exit(7)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        signal.raise_signal(signal.SIGTERM)
        print(watch.wanted())
        """,
        str(on_top),
    )
    assert (done.returncode, done.stdout) == (0, "-15\nSIGTERM\n"), done.stderr


def test_a_thread_warns_once_and_goes_without_signals() -> None:
    found: list[Any] = []

    def work() -> None:
        with pytest.warns(RuntimeWarning, match="signals can only be caught by the main thread") as caught:
            watches = [Watch(Preemption(deadline=1e9)), Watch(USR2)]
        found.extend([len(caught), watches[0].wanted(), signal.getsignal(signal.SIGTERM)])
        for watch in watches:
            watch.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] == 1
    assert found[1].startswith("the deadline")
    assert found[2] is signal.SIG_DFL


def test_a_watch_that_another_thread_closes_is_as_if_it_were_not_there() -> None:
    theirs = Heard()
    signal.signal(signal.SIGUSR2, theirs)
    watch = Watch(USR2)
    thread = threading.Thread(target=watch.close)
    thread.start()
    thread.join()
    send()
    assert (watch.wanted(), theirs.count) == ("", 1)
    again = Watch(USR2)
    again.close()
    assert signal.getsignal(signal.SIGUSR2) is theirs
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
