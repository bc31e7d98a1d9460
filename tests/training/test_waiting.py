"""The warning of a training whose threads wait for a core that another program uses.

That of a training that waits for data is in test_update.py.
"""

import json
import shutil
import subprocess
import sys

import pytest

from speakerlab.training.waiting import WaitWatch, thread_seconds

# A process that computes for a second, alone or beside another one on the same core.
SHARED_CORE = """
import json, multiprocessing, os, sys, time
from pathlib import Path
from speakerlab.training.waiting import thread_seconds

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] == "shared":
    context = multiprocessing.get_context("fork")
    context.Process(target=compute, args=[3.0], daemon=True).start()
main_thread = str(os.getpid())
before = thread_seconds(Path("/proc/self/task")).get(main_thread, (0.0, 0.0))
compute(1.0)
after = thread_seconds(Path("/proc/self/task")).get(main_thread, (0.0, 0.0))
print(json.dumps([after[0] - before[0], after[1] - before[1]]))
"""


@pytest.fixture
def threads(tmp_path):
    """A folder as /proc/self/task, and a function that lets its two threads go on."""
    total = {"main": [0, 0], "worker": [0, 0]}

    def go_on(**seconds):
        for name, (computed, waited) in seconds.items():
            total[name][0] += round(1e9 * computed)
            total[name][1] += round(1e9 * waited)
        for name, (computed, waited) in total.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "schedstat").write_text(f"{computed} {waited} 7\n")

    go_on()
    return tmp_path, go_on


def test_waiting_for_a_core_is_the_share_of_all_threads(threads, caplog):
    folder, go_on = threads
    go_on(main=(5.0, 5.0))  # before the training
    watch = WaitWatch(folder)
    go_on(main=(1.0, 9.0))  # the first row
    watch.add_row(10, wait_seconds=0.0, seconds=10.0)
    go_on(main=(30.0, 0.0), worker=(10.0, 9.9))  # 9.9 of 49.9 s
    watch.add_row(20, wait_seconds=0.0, seconds=30.0)
    assert caplog.messages == []
    go_on(main=(15.0, 0.0), worker=(8.0, 7.0))  # 7 of 30 s
    watch.add_row(30, wait_seconds=0.0, seconds=30.0)
    (message,) = caplog.messages
    assert message.startswith("step 30: the threads waited for a core 23 %")
    assert "runtime.num_threads" in message


def test_threads_that_end_or_start_give_no_false_warning(threads, caplog):
    folder, go_on = threads
    go_on(main=(10.0, 0.0), worker=(500.0, 400.0))
    watch = WaitWatch(folder)
    watch.add_row(10, wait_seconds=0.0, seconds=10.0)
    # The times of a thread that has ended are gone.
    shutil.rmtree(folder / "worker")
    (folder / "new").mkdir()
    (folder / "new/schedstat").write_text("9000000000 1000000000 7\n")
    (folder / "main/schedstat").write_text("30000000000 1000000000 7\n")
    watch.add_row(20, wait_seconds=0.0, seconds=30.0)  # 2 of 31 s
    assert caplog.messages == []


def test_where_the_kernel_does_not_count_nothing_is_warned_of(tmp_path, caplog):
    assert thread_seconds(tmp_path / "missing") == {}
    (tmp_path / "thread").mkdir()
    assert thread_seconds(tmp_path) == {}
    watch = WaitWatch(tmp_path)
    for step in (1, 2, 3):
        watch.add_row(step, wait_seconds=0.0, seconds=30.0)
    assert caplog.messages == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
@pytest.mark.parametrize("core", ["alone", "shared"])
def test_the_kernel_counts_the_time_without_a_core(core):
    command = [sys.executable, "-c", SHARED_CORE, core]
    finished = subprocess.run(command, capture_output=True, check=True, text=True)
    computed, waited = json.loads(finished.stdout)
    if computed + waited < 0.5:
        pytest.skip("this kernel does not count the time")
    assert computed + waited == pytest.approx(1.0, abs=0.2)
    # Alone, other programs of this machine may still take some of it.
    if core == "shared":
        assert waited > 0.3
