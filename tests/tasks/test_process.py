"""Commands end with the pipeline, however it ends, and tell why they failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks.process import ManagedProcess, ProcessFailed, ProcessTimeout, run_logged

PYTHON = sys.executable
REPOSITORY = Path(__file__).resolve().parents[2]

# A command with a child and a grandchild; the grandchild hides in a session of its own.
FAMILY = """
import os, subprocess, sys, time
folder = sys.argv[1]
def note(name):
    with open(os.path.join(folder, name + '.tmp'), 'w') as f: f.write(str(os.getpid()))
    os.rename(os.path.join(folder, name + '.tmp'), os.path.join(folder, name))
if len(sys.argv) == 2:
    note('child')
    subprocess.Popen([sys.executable, __file__, folder, 'x'], start_new_session=True)
else:
    note('grandchild')
print('started', flush=True)
time.sleep(600)
"""
# The pipeline: starts FAMILY from a worker thread that then ends.
PIPELINE = """
import sys, threading, time
from pathlib import Path
from tasks.process import ManagedProcess, run_logged
folder, how = sys.argv[1:]
command = [sys.executable, folder + '/family.py', folder]
def start():
    if how == 'managed':
        global process
        process = ManagedProcess.start(command, Path(folder, 'log'), grace_seconds=2)
    else:
        run_logged(command, log=print, grace_seconds=2)
thread = threading.Thread(target=start, daemon=True)
thread.start()
if how == 'managed':
    thread.join()
time.sleep(600)
"""


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def family_pids(folder: Path) -> list[int]:
    wait_for(lambda: (folder / "child").exists() and (folder / "grandchild").exists())
    return [int((folder / name).read_text()) for name in ("child", "grandchild")]


@pytest.fixture
def family(tmp_path):
    (tmp_path / "family.py").write_text(FAMILY)
    return tmp_path


@pytest.mark.parametrize("how", ["managed", "logged"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_descendant_survives_the_death_of_the_pipeline(family, how, signum):
    pipeline = subprocess.Popen([PYTHON, "-c", PIPELINE, str(family), how], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    try:
        pids = family_pids(family)
        assert all(map(is_running, pids))
        pipeline.send_signal(signum)
        pipeline.wait()
        wait_for(lambda: not any(map(is_running, pids)))
    finally:
        pipeline.kill()
        pipeline.wait()


def test_a_killed_supervisor_takes_its_command_along(family):
    process = ManagedProcess.start([PYTHON, str(family / "family.py"), str(family)], family / "log")
    child, grandchild = family_pids(family)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(child))
    assert is_running(grandchild)
    os.kill(grandchild, signal.SIGKILL)  # in a session of its own, out of the kernel's reach
    process.stop()


def test_stop_ends_all_and_returns_when_they_are_gone(family):
    process = ManagedProcess.start([PYTHON, str(family / "family.py"), str(family)], family / "log")
    pids = family_pids(family)
    assert process.alive()
    process.stop(grace_seconds=1)
    assert not any(map(is_running, pids))
    assert not process.alive()
    assert process.returncode == 128 + signal.SIGTERM
    process.stop()


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);time.sleep(600)"
    )
    log = tmp_path / "log"
    process = ManagedProcess.start([PYTHON, "-c", stubborn], log)
    wait_for(lambda: log.read_text() == "up\n")
    process.stop(grace_seconds=0.2)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_command_may_clean_up_within_the_grace_period(tmp_path):
    program = (
        "import signal, sys, time, pathlib\n"
        "def end(*_): time.sleep(0.3); print('saved', flush=True); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    process = ManagedProcess.start([PYTHON, "-c", program], log)
    wait_for(lambda: log.read_text() == "up\n")
    process.stop(grace_seconds=20)
    assert log.read_text() == "up\nsaved\n"
    assert process.returncode == 3


def test_lines_of_both_streams_arrive_in_order_and_environment_and_folder_are_passed(tmp_path):
    lines: list[str] = []
    program = (
        "import os, sys; print(os.environ['COLOUR']); sys.stdout.flush();"
        "print(os.getcwd(), file=sys.stderr); sys.stderr.flush(); print('caf\\u00e9')"
    )
    environment = dict(os.environ, COLOUR="green", PYTHONIOENCODING="utf-8")
    run_logged([PYTHON, "-c", program], log=lines.append, cwd=tmp_path, env=environment)
    assert lines == ["green", str(tmp_path), "café"]


def test_a_failure_carries_the_status_and_the_last_lines():
    with pytest.raises(ProcessFailed, match="ended with status 7") as caught:
        run_logged([PYTHON, "-c", "for i in range(100): print('line', i)\nraise SystemExit(7)"], log=lambda _: None)
    assert caught.value.returncode == 7
    assert caught.value.tail == [f"line {i}" for i in range(70, 100)]


def test_death_by_signal_and_a_missing_command_are_told_apart():
    with pytest.raises(ProcessFailed, match="signal 11") as caught:
        run_logged([PYTHON, "-c", "import os; os.kill(os.getpid(), 11)"], log=lambda _: None)
    assert caught.value.returncode == 128 + 11
    with pytest.raises(ProcessFailed, match="command not found"):
        run_logged(["/does/not/exist"], log=lambda _: None)


def test_timeout_ends_the_command(family):
    with pytest.raises(ProcessTimeout, match="stopped after 2 s"):
        run_logged(
            [PYTHON, str(family / "family.py"), str(family)],
            log=lambda _: None,
            timeout_seconds=2,
            grace_seconds=1,
        )
    assert not any(map(is_running, family_pids(family)))


def test_an_exception_from_the_log_callback_ends_the_command(family):
    def interrupt(line: str) -> None:
        family_pids(family)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_logged([PYTHON, str(family / "family.py"), str(family)], log=interrupt, grace_seconds=1)
    assert not any(map(is_running, family_pids(family)))


def test_leftovers_of_a_command_that_ended_are_removed_and_do_not_hold_the_caller(family):
    lines: list[str] = []
    program = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, {str(family / 'family.py')!r}, {str(family)!r}])"
    )
    run_logged([PYTHON, "-c", program], log=lines.append, grace_seconds=1)
    leftovers = [int(p.read_text()) for name in ("child", "grandchild") if (p := family / name).exists()]
    assert not any(map(is_running, leftovers))


def test_commands_run_side_by_side_in_threads_do_not_hold_each_other():
    # Each inherits nothing of the other's lifeline, or the first would not end when stopped.
    ended: list[float] = []

    def run(seconds: float) -> None:
        run_logged([PYTHON, "-c", f"import time; time.sleep({seconds})"], log=lambda _: None)
        ended.append(seconds)

    threads = [threading.Thread(target=run, args=(seconds,)) for seconds in (1.5, 0.1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [0.1, 1.5]
