"""Embeddings of recordings as files, bytes or arrays, of any length and number.

A recording that cannot be used never stops the others, a group of recordings is read while another
one is embedded, and waves of equal length share a batch.

Letters: B rows, S samples, N recordings, D embedding dimensions, C channels, W windows, T frames,
F values of a frame.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from speakerlab.core.bars import progress_bar
from speakerlab.core.faults import Faults
from speakerlab.core.system import return_freed_memory
from speakerlab.core.windows import embed_in_windows, group_rows, window_bounds
from speakerlab.data.audio import name_of
from speakerlab.data.convert import (
    Channels,
    read_channels,
    read_wave,
    spool_channels,
    spool_wave,
    warn_of_levels,
)
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS, cut_windows

if TYPE_CHECKING:  # each imports its runtime
    from speakerlab.inference.onnx_model import OnnxModel
    from speakerlab.inference.torch_model import TorchModel

# Row of `sources`, and its embedding or the error.
Result = tuple[int, np.ndarray | Exception]
Windows = tuple[np.ndarray, np.ndarray]  # times_W2 and emb_WD
# Audio in a group of recordings: one group is read while another is embedded.
READ_AHEAD_SECONDS = 64
# Audio between two returns of freed memory, which take about 0.1 s.
RETURN_MEMORY_SECONDS = 120


class Loaded(NamedTuple):
    """A source whose turn has come, and its wave or the error."""

    row: int
    source: Any
    wave: np.ndarray | Exception


class RecordingEmbedder:
    """Embeds recordings with a model: whole, in groups, in windows and frame by frame.

    A recording is a path, bytes, an open binary file, a numpy array or a torch tensor, at any
    sample rate, or a function that returns one of these; see `read_wave`. The argument
    `sample_rate` is the rate of arrays, by default the model's. `channels` is the number of the
    channel to use, from 1, or "mix", their mean; None: the first one, with a warning if another one
    has other sound.
    """

    def __init__(self, runtime: "TorchModel | OnnxModel") -> None:
        self.runtime = runtime
        # Attributes of both runtimes.
        self.sample_rate = runtime.sample_rate
        self.embed_dim = runtime.embed_dim
        self.seconds_embedded = 0.0  # since freed memory was returned

    def embed(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        channels: Channels | Literal["each"] = None,
    ) -> np.ndarray:
        """Return emb_D, float32, of one recording of any length; channels="each": emb_CD."""
        if channels == "each":
            source = audio() if callable(audio) else audio
            wave_CS = read_channels(
                source,
                sample_rate=self.sample_rate,
                source_rate=sample_rate,
            )
            return self.embed_many(list(wave_CS), check_levels=False)
        emb_1D = self.embed_many([audio], sample_rate, channels=channels)
        return emb_1D[0]

    def embed_many(
        self,
        sources: Sequence[Any],
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
        check_levels: bool = True,
        progress: bool = False,
        unit: str = "recordings",
    ) -> np.ndarray:
        """Return emb_ND, float32, in the order of `sources`.

        progress: show a bar on a terminal or in a notebook, in this unit. Raises the error of the
        first recording that cannot be embedded, and ValueError if `sources` is a single recording.
        check_levels: False for parts of recordings, which may be silent; see `read_wave`.
        """
        # `embed_each` yields in any order, because it batches recordings of equal length.
        embedded: dict[int, np.ndarray] = {}
        results = self.embed_each(
            sources,
            sample_rate,
            channels=channels,
            check_levels=check_levels,
            progress=progress,
            unit=unit,
        )
        for row, result in results:
            if isinstance(result, Exception):
                raise result
            embedded[row] = result
        if not embedded:
            return np.zeros((0, self.embed_dim), dtype=np.float32)
        in_order = [embedded[row] for row in sorted(embedded)]
        return np.array(in_order, dtype=np.float32)

    def embed_each(
        self,
        sources: Sequence[Any],
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
        check_levels: bool = True,
        progress: bool = False,
        unit: str = "recordings",
    ) -> Iterator[Result]:
        """Yield (row of `sources`, its emb_D or the error), in any order.

        Every row is yielded, whatever its source is: an error of a library is a ValueError of one
        line. progress: show a bar on a terminal or in a notebook, in this unit. check_levels: as in
        `embed_many`.
        """
        # An open file is an iterator too, but a single recording.
        is_iterator = isinstance(sources, Iterator) and not hasattr(sources, "read")
        if is_iterator:
            raise ValueError(
                f"sources: must be a list of recordings, got {type(sources).__name__};"
                " make a list of it with list(...)"
            )
        # Text and bytes have a length too, but are a single recording.
        has_length = hasattr(sources, "__len__")
        if not has_length or isinstance(sources, str | Path | bytes):
            raise ValueError(
                f"sources: must be a list of recordings, not one ({name_of(sources)});"
                " put it in a list, or use embed"
            )
        bar = progress_bar(total=len(sources), unit=unit, shown=progress)
        # A single thread reads, because the groups are consecutive parts of `numbered`.
        numbered = enumerate(_each(sources))
        read = partial(
            self._read,
            sample_rate=sample_rate,
            channels=channels,
            check_levels=check_levels,
        )
        read_group = partial(self._read_group, numbered, read)
        reader = ThreadPoolExecutor(1)
        try:
            with bar:
                pending = reader.submit(read_group)
                while True:
                    group = pending.result()
                    if not group:
                        return
                    # The thread reads the next group while this one is embedded.
                    pending = reader.submit(read_group)
                    for row, result in self._embed_group(group):
                        yield row, result
                        bar.update()
        finally:
            # Without waiting: the garbage collector may close this generator in any thread, even
            # in the one that reads.
            reader.shutdown(wait=False, cancel_futures=True)

    @overload
    def embed_windows(
        self,
        audio: Any,
        sample_rate: int | None = ...,
        *,
        window: float = ...,
        step: float = ...,
        channels: Channels = ...,
        progress: bool = ...,
    ) -> Windows: ...

    @overload
    def embed_windows(
        self,
        audio: Any,
        sample_rate: int | None = ...,
        *,
        window: float = ...,
        step: float = ...,
        channels: Literal["each"],
        progress: bool = ...,
    ) -> list[Windows]: ...

    def embed_windows(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        window: float = WINDOW_SECONDS,
        step: float = STEP_SECONDS,
        channels: Channels | Literal["each"] = None,
        progress: bool = False,
    ) -> Windows | list[Windows]:
        """Return (times_W2, emb_WD) of the windows of one recording; channels="each": of each.

        times_W2, float64: start and end of each window in seconds; emb_WD, float32: row w is the
        embedding of these samples alone. window, step: in seconds, rounded to whole samples. The
        last window ends with the recording; a shorter recording is one shorter window. Windows of
        digital silence are left out. A model with a VAD removes silence within each window. A file
        of any length needs little memory besides the result.
        Raises ValueError for windows that leave gaps, and if every window is silent (with "each",
        such a channel has no windows).
        """
        source = audio() if callable(audio) else audio
        where = name_of(source)
        if channels == "each":
            waves = spool_channels(
                source,
                sample_rate=self.sample_rate,
                source_rate=sample_rate,
            )
            windows_of_channels: list[Windows] = []
            for number, wave_S in enumerate(waves, start=1):
                windows = self._embed_windows_of(
                    wave_S,
                    window,
                    step,
                    where=f"{where}, channel {number}",
                    progress=progress,
                )
                windows_of_channels.append(windows)
            return windows_of_channels
        wave_S = self._read_long(source, sample_rate, channels)
        times_W2, emb_WD = self._embed_windows_of(
            wave_S,
            window,
            step,
            where=where,
            progress=progress,
        )
        if not len(times_W2):
            raise ValueError(
                f"{where}: is silent in every window; give a recording of a voice"
            )
        return times_W2, emb_WD

    def frames(
        self,
        audio: Any,
        sample_rate: int | None = None,
        *,
        channels: Channels = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (times_T, frames_TF) of one recording: what the model pools into its embedding.

        times_T, float64: the middle of each frame in seconds; frames are 10 to 80 ms apart, which
        depends on the network. frames_TF, float32: the input of its pooling; F is the number of
        channels (of maps: channels x bins), and the values have no unit. A model with a VAD has no
        frames of the silence that it removes. Longer than `max_seconds`, a recording is cut into
        equal windows as for its embedding, and a frame sees its window only.
        Raises ValueError for an `.onnx` file, for a network without a `Pooling` (SimAM-ResNet), and
        for a recording that is too short for a frame.
        """
        wave_S = self._read(audio, sample_rate=sample_rate, channels=channels)
        seconds_S = np.arange(len(wave_S)) / self.sample_rate
        if self.runtime.vad is not None:
            # The samples that are kept have other places in the recording.
            is_kept_S = self.runtime.vad.speech_mask(wave_S)
            wave_S = wave_S[is_kept_S]
            seconds_S = seconds_S[is_kept_S]
        min_samples = self.runtime.min_samples
        if len(wave_S) < min_samples:
            raise ValueError(
                f"{name_of(audio)}: has {len(wave_S) / self.sample_rate:.3f} s, a frame"
                f" needs {min_samples / self.sample_rate:.3f} s; give a longer recording"
            )
        times: list[np.ndarray] = []
        frames: list[np.ndarray] = []
        bounds = window_bounds(len(wave_S), max_samples=self.runtime.max_samples)
        for first, end in bounds:
            wave_1S = wave_S[None, first:end]
            middle_T, frames_TF = self.runtime.frames_of_window(wave_1S)
            window_seconds_S = seconds_S[first:end]
            times.append(window_seconds_S[middle_T])
            frames.append(frames_TF)
        return np.concatenate(times), np.concatenate(frames)

    def _read(
        self,
        source: Any,
        *,
        sample_rate: int | None,
        channels: Channels,
        check_levels: bool = True,
    ) -> np.ndarray:
        """Read a recording at the model's rate."""
        # A function reads a recording when its turn comes.
        if callable(source):
            source = source()
        return read_wave(
            source,
            sample_rate=self.sample_rate,
            source_rate=sample_rate,
            channels=channels,
            check_levels=check_levels,
        )

    def _read_long(
        self, source: Any, sample_rate: int | None, channels: Channels
    ) -> np.ndarray:
        """Return wave_S at the model's rate: of a file int16, without holding it in memory."""
        # An array is in memory already, and may have more digits than 16 bits.
        is_array = hasattr(source, "dtype")
        if is_array:
            return read_wave(
                source,
                sample_rate=self.sample_rate,
                source_rate=sample_rate,
                channels=channels,
                check_levels=False,
            )
        return spool_wave(
            source,
            sample_rate=self.sample_rate,
            source_rate=sample_rate,
            channels=channels,
        )

    def _read_group(
        self,
        numbered: Iterator[tuple[int, Any]],
        read: Callable[[Any], np.ndarray],
    ) -> list[Loaded]:
        """Read about a minute of recordings at the model's rate; empty if none is left."""
        group: list[Loaded] = []
        seconds = 0.0
        vad = self.runtime.vad
        for row, source in numbered:
            # A recording that cannot be read must not stop the others, whatever is wrong with it.
            try:
                if isinstance(source, Exception):
                    raise source
                wave_S = read(source)
                # The VAD takes the whole recording, because its thresholds depend on all levels.
                if vad is not None:
                    wave_S = vad(wave_S)
                seconds += len(wave_S) / self.sample_rate
                group.append(Loaded(row, source, wave_S))
            except Exception as error:
                group.append(Loaded(row, source, _error_of(source, error)))
            # The whole group is in memory, so its size is limited.
            if seconds >= READ_AHEAD_SECONDS:
                break
        return group

    def _embed_group(self, group: Sequence[Loaded]) -> Iterator[Result]:
        """Embed waves in batches of equal length, window by window; yield errors unchanged."""
        loaded: list[Loaded] = []
        waves: list[np.ndarray] = []
        for recording in group:
            if isinstance(recording.wave, Exception):
                yield recording.row, recording.wave
            else:
                loaded.append(recording)
                waves.append(recording.wave)

        # Only waves of equal length share a batch: padding would change their embeddings.
        num_samples = [len(wave_S) for wave_S in waves]
        for batch in group_rows(num_samples):
            batch_waves = [waves[index] for index in batch]
            results = self._embed_batch(batch_waves)
            for index, result in zip(batch, results):
                row, source, _ = loaded[index]
                if isinstance(result, Exception):
                    result = _error_of(source, result)
                elif not np.isfinite(result).all():
                    text = "the embedding has NaN; check the audio and the model"
                    result = ValueError(f"{_safe_name(source)}: {text}")
                yield row, result

    def _embed_batch(
        self, waves: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray | Exception]:
        """Return emb_D or the error of each of several waves of equal length."""
        # A single recording is not copied, because it may be an hour long.
        wave_BS = waves[0][None] if len(waves) == 1 else np.stack(waves)
        try:
            emb_BD = embed_in_windows(
                wave_BS,
                self.runtime.embed_window,
                min_samples=self.runtime.min_samples,
                max_samples=self.runtime.max_samples,
            )
        except Exception as error:
            if len(waves) == 1:
                return [error]
            # For example, too many for the memory of a GPU.
            results: list[np.ndarray | Exception] = []
            for wave_S in waves:
                results += self._embed_batch([wave_S])
            return results
        self._return_memory(wave_BS.size / self.sample_rate)
        return list(emb_BD)

    def _return_memory(self, seconds: float) -> None:
        """Return freed memory to the system from time to time; seconds: of audio just embedded.

        Each length needs blocks of other sizes, between which ever more free memory would remain.
        """
        self.seconds_embedded += seconds
        if self.seconds_embedded >= RETURN_MEMORY_SECONDS:
            self.seconds_embedded = 0.0
            return_freed_memory()

    def _embed_all(self, sources: Sequence[Any]) -> np.ndarray:
        """Return emb_ND of all sources; if some cannot be embedded, one error lists them."""
        # By row, because recordings of similar length are embedded together.
        results = sorted(
            self.embed_each(sources, check_levels=False),
            key=lambda result: result[0],
        )
        errors: list[Exception] = []
        embeddings: list[np.ndarray] = []
        for _, result in results:
            if isinstance(result, Exception):
                errors.append(result)
            else:
                embeddings.append(result)
        # A single error keeps its type, such as FileNotFoundError.
        if len(errors) == 1:
            raise errors[0]
        faults = Faults()
        for error in errors:
            faults.add("recordings that cannot be used", str(error))
        faults.raise_if_any()
        return np.stack(embeddings)

    def _embed_windows_of(
        self,
        wave_S: np.ndarray,
        window: float,
        step: float,
        *,
        where: str,
        progress: bool,
    ) -> Windows:
        """Return (times_W2, emb_WD) of a wave; no windows if it is digital silence."""
        rate = self.sample_rate
        warn_of_levels(wave_S, sample_rate=rate, where=where)
        times: list[tuple[float, float]] = []
        reads: list[Callable[[], np.ndarray]] = []
        bounds = _window_samples(len(wave_S), window, step, sample_rate=rate)
        for first, end in bounds:
            samples = slice(first, end)
            window_S = wave_S[samples]
            # Digital silence has no embedding.
            if window_S.min() != window_S.max():
                times.append((first / rate, end / rate))
                # Reads from the temporary file when its turn comes.
                reads.append(partial(wave_S.__getitem__, samples))
        emb_WD = self.embed_many(
            reads,
            check_levels=False,
            progress=progress,
            unit="windows",
        )
        times_W2 = np.array(times, dtype=np.float64).reshape(-1, 2)
        return times_W2, emb_WD


def _window_samples(
    num_samples: int, window: float, step: float, *, sample_rate: int
) -> list[tuple[int, int]]:
    """Return (first sample, end) of each window of a recording."""
    lengths: dict[str, int] = {}
    for name, seconds in (("window", window), ("step", step)):
        is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
        # The comparison is also false for nan.
        if not is_number or not 1 <= seconds * sample_rate < np.inf:
            raise ValueError(
                f"{name}: must be seconds, at least one sample, got {seconds!r}; correct"
                " it"
            )
        lengths[name] = round(seconds * sample_rate)
    if step > window:
        raise ValueError(
            f"step: windows of {window:g} s every {step:g} s leave gaps; give a step of"
            " at most the window"
        )
    # In samples instead of seconds, so that the times of windows are exact.
    windows = cut_windows(
        [(0, num_samples)],
        window_seconds=lengths["window"],
        step_seconds=lengths["step"],
    )
    return [(round(first), round(end)) for first, end in windows]


def _each(sources: Iterable[Any] | Sized) -> Iterator[Any]:
    """Yield as many sources as there are, or the error of getting one."""
    num_sources = len(sources)  # pyright: ignore[reportArgumentType]
    # A sequence by its indices: its iterator ends at the first error of its `__getitem__`.
    is_indexed = isinstance(sources, Sequence) or not hasattr(sources, "__iter__")
    iterator: Iterator[Any] | None = None
    if not is_indexed:
        iterator = iter(sources)  # pyright: ignore
    for row in range(num_sources):
        try:
            if iterator is None:
                yield sources[row]  # pyright: ignore
            else:
                yield next(iterator)
        except StopIteration:
            yield ValueError(
                f"sources: end after {row} of {num_sources} recordings; give a list"
            )
        except Exception as error:
            yield _error_of(f"sources[{row}]", error)


def _error_of(source: Any, error: Exception) -> Exception:
    """Return the error of a source as one for users: that of a library in one line."""
    if isinstance(error, ValueError | OSError | ImportError):
        return error
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    line = f"{_safe_name(source)}: cannot be used ({reason}); check the recording"
    in_one_line = ValueError(line)
    in_one_line.__cause__ = error
    return in_one_line


def _safe_name(source: Any) -> str:
    """Return the name of a source for messages, also of one whose attributes raise errors."""
    try:
        return name_of(source)
    except Exception:
        return f"audio ({type(source).__name__})"
