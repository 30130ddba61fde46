"""Signals that end a run, apart from the one of Ctrl-C, and what is to be done when one comes."""

import os
import signal
import stat
from collections.abc import Iterable


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM and SIGHUP (a closed terminal), which Windows lacks; not one that is ignored, as `nohup` has it."""
    present = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return tuple(number for number in present if signal.getsignal(number) is not signal.SIG_IGN)


def next_one_ends(handled: Iterable[int], received: int) -> None:
    """Let the process end at once if another one of these signals comes."""
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    if received == getattr(signal, "SIGHUP", None):
        signal.signal(received, signal.SIG_IGN)  # the shell and the terminal both send it
        _leave_terminal()


def _leave_terminal():
    """Write to nothing instead of to a terminal that is closed, where each write fails."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
