"""Out of memory during a step: a single rank saves, several ranks exit together."""

import pytest
import torch
from toy_task import make_state

from speakerlab.core import process
from speakerlab.training import rescue as module
from speakerlab.training.checkpoint import list_checkpoints
from speakerlab.training.rescue import OutOfMemoryStop, Rescue, is_out_of_memory

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")


@pytest.fixture
def state(tmp_path):
    state = make_state(tmp_path / "checkpoints")
    state.resume()
    state.step = 7
    return state


def test_a_single_rank_saves_the_state_before_the_step(state, tmp_path):
    rescue = Rescue(state, tmp_path, 16)
    mean = state.task.embedder[1].running_mean
    state.updater.before_step()
    mean.add_(1.0)  # the forward pass moves BatchNorm's statistics
    expected = "step 7: out of memory on rank 0"
    with pytest.raises(OutOfMemoryStop, match=expected) as end:
        rescue.handle(OUT_OF_MEMORY)
    assert "allocate" not in str(end.value)  # one line
    assert not bool(mean.any())
    assert (tmp_path / process.MEMORY_NOTE).read_text() == "16\n"
    (checkpoint,) = list_checkpoints(state.writer.folder)
    assert checkpoint.name == "step_00000007"


class Store:
    """The store that ranks share, in which another rank may have asked all to exit."""

    def __init__(self, *, is_called: bool = False) -> None:
        self.is_called = is_called
        self.checks = 0

    def check(self, keys) -> bool:
        self.checks += 1
        return self.is_called

    def set(self, key, value) -> None:
        self.is_called = True


@pytest.fixture
def join(state, tmp_path, monkeypatch):
    """join(store) -> the rescue of a rank among several, whose process is not ended."""

    def make(store: Store) -> Rescue:
        monkeypatch.setattr(module, "shared_store", lambda ranks: store)
        monkeypatch.setattr(module, "LAST_SECONDS", 0.0)
        monkeypatch.setattr(Rescue, "_watch", lambda self: None)
        return Rescue(state, tmp_path, 16)

    return make


def test_one_of_several_ranks_calls_the_others_and_does_not_save(join, state, tmp_path):
    store = Store()
    with pytest.raises(OutOfMemoryStop):
        join(store).handle(OUT_OF_MEMORY)
    assert store.is_called
    assert not list_checkpoints(state.writer.folder)  # another rank may have no state


def test_after_another_error_a_rank_only_checks_whether_it_was_called(join):
    store = Store()
    error = RuntimeError("shapes differ")
    join(store).handle(error)
    assert store.checks == 1  # whether a rank that is out of memory caused it
    assert not store.is_called


def test_a_rank_ends_its_process_when_another_one_calls(state, tmp_path, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(module, "shared_store", lambda ranks: Store(is_called=True))
    monkeypatch.setattr(module, "LAST_SECONDS", 0.0)
    monkeypatch.setattr(module.process, "leave", ended.append)
    rescue = Rescue(state, tmp_path, 32)
    # The thread must have ended here: later, it would end the process of the tests.
    rescue.watcher.join(timeout=60)
    assert ended == [process.EXIT_MEMORY]
    assert (tmp_path / process.MEMORY_NOTE).read_text() == "32\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OUT_OF_MEMORY, True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate"), True),
        (RuntimeError("CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("GET was unable to find an engine to execute this"), True),
        (RuntimeError("FIND was unable to find an engine to execute this"), True),
        (RuntimeError("Unable to find a valid cuDNN algorithm to run"), True),
        (RuntimeError("CUDNN_STATUS_BAD_PARAM"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) == expected
