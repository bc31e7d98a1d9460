"""Of many sources, each bad one is reported by its row, and the others are embedded."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models_on_disk import publish_xvector
from voices import RATE, make_wave

import speakerlab
from speakerlab.data import audio

GOOD_S = make_wave(0, 0, 1.0)


class Hostile:
    """An object all whose attributes raise an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no attribute {name}")


class Lies:
    """An object that says that it is a tensor."""

    dtype = "float32"

    def detach(self) -> "Lies":
        return self


def raise_it(error: BaseException) -> Any:
    raise error


def garbage() -> Iterator[Any]:
    yield "garbage"
    raise RuntimeError("garbage")


@pytest.fixture
def model(tmp_path):
    return speakerlab.load(publish_xvector(tmp_path / "exp"), device="cpu")


def bad_sources(folder: Path) -> dict[str, Any]:
    """Return kind -> source; none of them can be embedded."""
    cut = folder / "cut.wav"
    audio.write(cut, GOOD_S, RATE)
    cut.write_bytes(cut.read_bytes()[:5000])
    text = folder / "text.wav"
    text.write_text("no audio")
    empty = folder / "empty.wav"
    empty.write_bytes(b"")
    closed = text.open("rb")
    closed.close()
    with_nan_S = GOOD_S / 2**15
    with_nan_S[7] = np.nan
    return {
        "None": None,
        "a number": 7,
        "an object": object(),
        "a class": Hostile,
        "hostile attributes": Hostile(),
        "a lie": Lies(),
        "a list": [0.1, 0.2],
        "a list of arrays": [GOOD_S],
        "a dict": {"a.wav": 1},
        "a set": {1},
        "a generator": garbage(),
        "a text file": text.open(),
        "a closed file": closed,
        "an array without samples": GOOD_S[:0],
        "an array of no shape": np.float32(0.1),
        "three directions": GOOD_S.reshape(10, 10, -1),
        "a batch": np.stack([GOOD_S] * 5),
        "a wide batch": np.stack([GOOD_S] * 40),
        "NaN": with_nan_S,
        "infinity": np.full(RATE, np.inf),
        "another scale": GOOD_S * 1.0,
        "silence": np.zeros(RATE),
        "objects": np.array([object()] * 9),
        "text in an array": np.array(["a.wav"]),
        "complex values": GOOD_S.astype(np.complex64),
        "16 bits as uint16": GOOD_S.astype(np.uint16),
        "a tensor on no device": torch.zeros(RATE, device="meta"),
        "a sparse tensor": torch.zeros(2, RATE).to_sparse(),
        "a missing file": folder / "missing.wav",
        "a folder": folder,
        "no path": "",
        "a path with a zero": "a\0b.wav",
        "a long name": "a" * 5000,
        "a device": "/dev/null",
        "a text": text,
        "an empty file": empty,
        "a cut file": cut,
        "bytes that are no audio": b"RIFF0000WAVE",
        "no bytes": b"",
        "a function that fails": lambda: raise_it(KeyError("a")),
        "a function that ends": lambda: raise_it(StopIteration()),
        "a function without memory": lambda: raise_it(MemoryError()),
        "a function of libsndfile": lambda: raise_it(
            audio.soundfile.LibsndfileError(1, "prefix ")
        ),
        "a function of torch": lambda: torch.zeros(2) @ torch.zeros(3),
        "a function with arguments": lambda a: a,
        "a function that gives None": lambda: None,
        "a function that gives a function": lambda: lambda: GOOD_S,
    }


def test_each_kind_is_reported_by_its_row(model, tmp_path):
    # A file without permission is not tried, because root may read it.
    bad = bad_sources(tmp_path)
    sources: list[Any] = []
    for source in bad.values():
        sources += [source, GOOD_S]
    results = dict(model.embed_each(sources))
    assert sorted(results) == list(range(len(sources)))
    wanted_D = model.embed(GOOD_S)
    for number, kind in enumerate(bad):
        error = results[2 * number]
        # As the commands report them, without a traceback.
        assert isinstance(error, ValueError | OSError), kind
        assert str(error).strip(), kind
        assert "\n" not in str(error), kind
        assert np.allclose(results[2 * number + 1], wanted_D, rtol=1e-5, atol=1e-6)


def test_the_first_one_is_raised_for_many(model, tmp_path):
    for source in bad_sources(tmp_path).values():
        with pytest.raises((ValueError, OSError)):
            model.embed_many([GOOD_S, source])
    with pytest.raises(KeyboardInterrupt):
        model.embed_many([GOOD_S, lambda: raise_it(KeyboardInterrupt())])


@pytest.mark.parametrize("sample_rate", [0, 16, -RATE, 1e9, 0.5, "16000", float("nan")])
def test_a_wrong_rate_is_an_error_of_each_array(model, tmp_path, sample_rate):
    results = dict(model.embed_each([GOOD_S, GOOD_S], sample_rate))
    assert sorted(results) == [0, 1]
    for error in results.values():
        assert isinstance(error, ValueError)
        assert repr(sample_rate) in str(error)


def test_a_library_is_named_in_one_line(model):
    error = RuntimeError("first line\nsecond line")
    results = dict(model.embed_each([lambda: raise_it(error)]))
    assert isinstance(results[0], ValueError)
    assert results[0].__cause__ is error
    assert "RuntimeError: first line second line" in str(results[0])


def test_a_source_that_the_network_refuses_does_not_stop_its_batch(model, monkeypatch):
    """Of four waves in a batch, one is refused, as by a GPU without memory for all."""
    embed_window = model.runtime.embed_window
    waves = [make_wave(speaker, 0, 1.0) for speaker in range(4)]
    marked = waves[2][100] / 2**15

    def refuse(wave_BS):
        if (wave_BS[:, 100] == marked).any():
            raise torch.OutOfMemoryError("out of memory")
        return embed_window(wave_BS)

    wanted_ND = model.embed_many(waves)
    monkeypatch.setattr(model.runtime, "embed_window", refuse)
    results = dict(model.embed_each(waves))
    error = results.pop(2)
    assert isinstance(error, ValueError)
    assert "OutOfMemoryError: out of memory" in str(error)
    for row, emb_D in results.items():
        assert np.allclose(emb_D, wanted_ND[row], rtol=1e-5, atol=1e-6)


class Lazy:
    """A sequence that loads its recordings; `missing` has none, and without `last` it is cut."""

    def __init__(self, num: int, *, missing: int = -1, last: int = 99) -> None:
        self.num = num
        self.missing = missing
        self.last = last

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, row: int) -> np.ndarray:
        if row == self.missing:
            raise RuntimeError("is not there")
        if row > self.last:
            raise IndexError(row)
        return make_wave(row, 0, 1.0)


class LazyIterable:
    """A collection whose iterator fails at its third recording."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[np.ndarray]:
        yield make_wave(0, 0, 1.0)
        yield make_wave(1, 0, 1.0)
        raise RuntimeError("is not there")


@pytest.mark.parametrize(
    ("sources", "bad"),
    [
        (Lazy(4, missing=1), {1: "RuntimeError: is not there"}),
        (Lazy(3, last=1), {2: "IndexError"}),
        (LazyIterable(), {2: "RuntimeError: is not there", 3: "end after 3 of 4"}),
    ],
)
def test_a_collection_that_fails_is_reported_by_row(model, sources, bad):
    results = dict(model.embed_each(sources))
    assert sorted(results) == list(range(len(sources)))
    for row, result in results.items():
        if row in bad:
            assert isinstance(result, ValueError)
            assert str(result).startswith("sources")
            assert bad[row] in str(result)
        else:
            wanted_D = model.embed(make_wave(row, 0, 1.0))
            assert np.allclose(result, wanted_D, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="sources"):
        model.embed_many(sources)


def test_a_generator_may_be_closed_by_the_thread_that_reads(model):
    """As by the garbage collector, which runs in any thread."""
    errors: list[BaseException] = []

    def close() -> np.ndarray:
        try:
            results.close()  # pyright: ignore[reportAttributeAccessIssue]
        except BaseException as error:
            errors.append(error)
        return GOOD_S

    # A group has 64 s: the second one is read after the first result.
    is_suspended = threading.Event()
    sources = [make_wave(0, 0, 65.0), lambda: is_suspended.wait(20) and close()]
    results = model.embed_each(sources)
    assert next(results)[0] == 0
    is_suspended.set()
    thread_ended = threading.Event()
    for _ in range(200):
        if errors or results.gi_frame is None:  # pyright: ignore[reportAttributeAccessIssue]
            break
        thread_ended.wait(0.05)
    assert not errors
    assert results.gi_frame is None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_pipe_without_a_writer_does_not_hang(model, tmp_path):
    pipe = tmp_path / "pipe.wav"
    os.mkfifo(pipe)
    results: dict[int, Any] = {}
    thread = threading.Thread(
        target=lambda: results.update(model.embed_each([pipe, GOOD_S])),
        daemon=True,
    )
    thread.start()
    thread.join(20)
    assert isinstance(results[0], ValueError | OSError)
    assert results[1].shape == (16,)
