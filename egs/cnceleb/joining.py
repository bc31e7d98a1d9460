"""Joins the short utterances of each speaker and genre into new FLAC files.

In: the recordings of speakers, and how long an utterance must be. Out: what to train on, utterance
by utterance; new files in a folder of their own, and which utterances each of them is made of. A
file that was joined before is not made again, so a run that was cut off goes on.

Letters: U utterances of one speaker and genre, in the order of their names.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from egs.common.progress import Progress
from speakerlab.core.atomic import replacing
from speakerlab.core.process import die_with_parent
from speakerlab.data import audio

TOLERANCE_SECONDS = 1e-5  # of sums: choose_utts_to_combine.py:89 of the recipe that README names
SPEAKERS_AT_ONCE = 4  # that a process is handed


@dataclass
class Training:
    """What becomes of recordings: one speaker's at first, in the end everybody's."""

    wavs: dict[str, Path] = field(default_factory=dict)  # utterance -> file
    made_of: dict[str, list[str]] = field(default_factory=dict)  # joined one -> its utterances
    broken: list[str] = field(default_factory=list)  # lines about files that were not joined

    def add(self, other: "Training") -> None:
        """Take over what another one holds."""
        self.wavs |= other.wavs
        self.made_of |= other.made_of
        self.broken += other.broken


def join_all(
    recordings: Sequence[Sequence[Path]], folder: Path, *, min_seconds: float, num_jobs: int
) -> Training:
    """Join what is shorter than `min_seconds` into files below `folder`.

    recordings: each speaker's, named `<speaker>/<genre>-<session>-<number>.flac`.
    Files of earlier runs that are not wanted any more are removed.
    """
    join = partial(join_speaker, folder=folder, min_seconds=min_seconds)
    progress = Progress(f"{folder}: joined", total=len(recordings), unit="speakers")
    everything = Training()
    with ProcessPoolExecutor(num_jobs, initializer=die_with_parent) as pool:
        parallel = partial(pool.map, chunksize=SPEAKERS_AT_ONCE)
        results = (map if num_jobs == 1 else parallel)(join, recordings)
        for done, result in enumerate(results, 1):
            everything.add(result)
            progress.at(done)
    wanted = {everything.wavs[name] for name in everything.made_of}
    for path in set(folder.rglob("*.flac")) - wanted:
        path.unlink()
    return everything


def join_speaker(paths: Sequence[Path], *, folder: Path, min_seconds: float) -> Training:
    """The recordings of one speaker, the short ones joined genre by genre.

    What cannot be read stands alone as it is: checking the data directory will name it.
    """
    result = Training()
    genres: dict[tuple[str, int], list[tuple[Path, audio.AudioInfo]]] = {}
    for path in sorted(paths):
        try:
            info = audio.read_info(path)
        except (ValueError, FileNotFoundError) as error:
            _keep(result, [path], str(error))
        else:
            genres.setdefault((genre_of(path), info.sample_rate), []).append((path, info))
    for members in genres.values():
        seconds_U = [info.seconds for _, info in members]
        for run in group_short(seconds_U, min_seconds=min_seconds):
            _join([members[u] for u in run], folder, result)
    return result


def _keep(result: Training, paths: Sequence[Path], fault: str | None = None) -> None:
    """Take recordings as they are, because of a fault if there is one."""
    result.wavs |= {name_of(path): path for path in paths}
    if fault is not None:
        result.broken.append(fault)


def _join(members: Sequence[tuple[Path, audio.AudioInfo]], folder: Path, result: Training) -> None:
    """Put one recording, or the file that several are joined into, into `result`."""
    paths = [path for path, _ in members]
    if len(paths) == 1:
        _keep(result, paths)
        return
    # The name that WeSpeaker gives it: choose_utts_to_combine.py:378-381.
    name = f"{name_of(paths[0])}-comb{len(paths)}"
    target = folder / f"{name}.flac"
    num_samples = sum(info.num_samples for _, info in members)
    try:
        if not _is_done(target, num_samples):
            wave_S = np.concatenate([audio.read(path, whole=True) for path in paths])
            with replacing(target) as unfinished:
                unfinished.write_bytes(audio.to_flac(wave_S, members[0][1].sample_rate))
    except ValueError as error:
        _keep(result, paths, str(error))
        return
    result.wavs[name] = target
    result.made_of[name] = [name_of(path) for path in paths]


def _is_done(target: Path, num_samples: int) -> bool:
    """Whether an earlier run made this file: of the same length, under a name that is whole."""
    try:
        return audio.read_info(target).num_samples == num_samples
    except (ValueError, FileNotFoundError):
        return False


def name_of(path: Path) -> str:
    """The id of a training utterance: `<speaker>/<genre>-<session>-<number>`."""
    return f"{path.parent.name}/{path.stem}"


def genre_of(path: Path) -> str:
    """The genre in the name of a recording (prepare_data.sh and combine_utt.sh:41: up to a '-')."""
    return path.stem.partition("-")[0]


def group_short(seconds_U: Sequence[float], *, min_seconds: float) -> list[range]:
    """Runs of consecutive utterances of at least `min_seconds` each, one utterance where it can.

    The last short run is joined with a neighbour until none is short, or one run is left: with the
    one before it where there is none after it, or where that is longer than `min_seconds`. Where
    the one after it has just `min_seconds`, and the one before makes it long enough, with the
    shorter of the two; else with the one after it. These are the groups of WeSpeaker's recipe,
    examples/cnceleb/v2/local/choose_utts_to_combine.py:108-210 at dfa7419.
    """
    runs = {u: (u + 1, seconds) for u, seconds in enumerate(seconds_U)}  # first -> (end, seconds)
    first_of = {u + 1: u for u in runs}  # end of a run -> its first utterance
    short = [u for u in runs if _is_less(seconds_U[u], min_seconds)]
    while short:
        first = short.pop()
        if first not in runs or not _is_less(runs[first][1], min_seconds):
            continue  # joined in the meantime
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
    """Whether a short run is joined with the one before it, not with the one after it."""
    if before is None:
        return False
    if after is None or _is_less(min_seconds, after):
        return True
    return not _is_less(before + seconds, min_seconds) and _is_less(before, after)


def _is_less(a: float, b: float) -> bool:
    return a < b - TOLERANCE_SECONDS
