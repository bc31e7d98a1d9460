"""Joining the short utterances of each speaker and genre into new FLAC files.

Files joined by an earlier run are kept: an interrupted run continues.
Shape suffix: U utterances of one speaker and genre, ordered by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from egs.common.corpus.archives import progress_bar
from speakerlab.core.atomic import replacing
from speakerlab.core.parallel import map_in_processes
from speakerlab.data import audio

TOLERANCE_SECONDS = (
    1e-5  # of sums: choose_utts_to_combine.py:89 of the recipe that README names
)
SPEAKERS_PER_TASK = 4


@dataclass
class Training:
    """Training utterances of one or more speakers after joining."""

    wavs: dict[str, Path] = field(default_factory=dict)  # utterance -> file
    made_of: dict[str, list[str]] = field(
        default_factory=dict
    )  # joined utterance -> its parts
    broken: list[str] = field(
        default_factory=list
    )  # errors of files that could not be joined

    def add(self, other: "Training") -> None:
        """Add the utterances of `other`."""
        self.wavs |= other.wavs
        self.made_of |= other.made_of
        self.broken += other.broken


def join_all(
    recordings: Sequence[Sequence[Path]],
    folder: Path,
    *,
    min_seconds: float,
    num_jobs: int,
) -> Training:
    """Join utterances shorter than `min_seconds` into files below `folder`.

    recordings: one list per speaker, named `<speaker>/<genre>-<session>-<number>.flac`.
    Outdated files of earlier runs are removed.
    """
    join = partial(join_speaker, folder=folder, min_seconds=min_seconds)
    everything = Training()
    results = map_in_processes(join, recordings, num_jobs, chunk=SPEAKERS_PER_TASK)
    total, name = len(recordings), f"{folder}: join"
    for result in progress_bar(results, total=total, desc=name, unit=" speakers"):
        everything.add(result)
    wanted = {everything.wavs[name] for name in everything.made_of}
    for path in set(folder.rglob("*.flac")) - wanted:
        path.unlink()
    return everything


def join_speaker(
    paths: Sequence[Path], *, folder: Path, min_seconds: float
) -> Training:
    """Join the short recordings of one speaker, genre by genre.

    Unreadable files are kept as they are: the check of the data directory reports them.
    """
    result = Training()
    genres: dict[tuple[str, int], list[tuple[Path, audio.AudioInfo]]] = {}
    for path in sorted(paths):
        try:
            info = audio.read_info(path)
        except (ValueError, FileNotFoundError) as error:
            _keep(result, [path], str(error))
        else:
            genres.setdefault((genre_of(path), info.sample_rate), []).append(
                (path, info)
            )
    for members in genres.values():
        seconds_U = [info.seconds for _, info in members]
        for run in group_short(seconds_U, min_seconds=min_seconds):
            _join([members[u] for u in run], folder, result)
    return result


def _keep(result: Training, paths: Sequence[Path], fault: str | None = None) -> None:
    """Add recordings unjoined, with the error that prevented joining if there is one."""
    result.wavs |= {name_of(path): path for path in paths}
    if fault is not None:
        result.broken.append(fault)


def _join(
    members: Sequence[tuple[Path, audio.AudioInfo]], folder: Path, result: Training
) -> None:
    """Add a single recording, or the file joined from several, to `result`."""
    paths = [path for path, _ in members]
    if len(paths) == 1:
        _keep(result, paths)
        return
    # The name that WeSpeaker uses: choose_utts_to_combine.py:378-381.
    name = f"{name_of(paths[0])}-comb{len(paths)}"
    target = folder / f"{name}.flac"
    num_samples = sum(info.num_samples for _, info in members)
    try:
        if not _is_done(target, num_samples):
            wave_S = np.concatenate([audio.read(path, whole=True) for path in paths])
            with replacing(target) as unfinished:
                unfinished.write_bytes(
                    audio.encode(wave_S, members[0][1].sample_rate, "FLAC")
                )
    except ValueError as error:
        _keep(result, paths, str(error))
        return
    result.wavs[name] = target
    result.made_of[name] = [name_of(path) for path in paths]


def _is_done(target: Path, num_samples: int) -> bool:
    """Return whether an earlier run completed this file."""
    try:
        return audio.read_info(target).num_samples == num_samples
    except (ValueError, FileNotFoundError):
        return False


def name_of(path: Path) -> str:
    """Return the id of a training utterance: `<speaker>/<genre>-<session>-<number>`."""
    return f"{path.parent.name}/{path.stem}"


def genre_of(path: Path) -> str:
    """Return the genre in a file name, up to a '-' (prepare_data.sh and combine_utt.sh:41)."""
    return path.stem.partition("-")[0]


def group_short(seconds_U: Sequence[float], *, min_seconds: float) -> list[range]:
    """Group consecutive utterances into runs of at least `min_seconds`, as short as possible.

    The last short run is merged with a neighbour until no run is short or one run is left. It is
    merged with the run before it if there is none after it or that is longer than `min_seconds`;
    with the shorter neighbour if the one after it has exactly `min_seconds` and the one before
    makes it long enough; else with the run after it. The groups equal those of WeSpeaker's recipe,
    examples/cnceleb/v2/local/choose_utts_to_combine.py:108-210 at dfa7419.
    """
    runs = {
        u: (u + 1, seconds) for u, seconds in enumerate(seconds_U)
    }  # first -> (end, seconds)
    first_of = {u + 1: u for u in runs}  # end of a run -> its first utterance
    short = [u for u in runs if _is_less(seconds_U[u], min_seconds)]
    while short:
        first = short.pop()
        if first not in runs or not _is_less(runs[first][1], min_seconds):
            continue  # already merged
        end, seconds = runs[first]
        before = runs[first_of[first]][1] if first in first_of else None
        after = runs[end][1] if end in runs else None
        if before is None and after is None:
            break
        if _takes_before(before, seconds, after, min_seconds):
            first, second = first_of[first], first
        else:
            second = end
            short.append(first)  # it may still be short
        end, seconds = runs.pop(second)
        runs[first] = (end, runs[first][1] + seconds)
        first_of.pop(second)
        first_of[end] = first
    return [range(first, runs[first][0]) for first in sorted(runs)]


def _takes_before(
    before: float | None, seconds: float, after: float | None, min_seconds: float
) -> bool:
    """Return whether to merge a short run with the run before it, not with the one after."""
    if before is None:
        return False
    if after is None or _is_less(min_seconds, after):
        return True
    return not _is_less(before + seconds, min_seconds) and _is_less(before, after)


def _is_less(a: float, b: float) -> bool:
    return a < b - TOLERANCE_SECONDS
