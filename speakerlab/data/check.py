"""Check data directories (see `tables.py`) before training: report all faults at once.

Writes `utt2dur` and `rejected.tsv`. A directory with trials is a test set; without utt2spk (noise,
rooms) only the audio is checked. `check_tables.py` checks conditions, models and trials.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from shlex import quote

from speakerlab.core.faults import Faults
from speakerlab.core.process import die_with_parent
from speakerlab.data import audio, check_tables, tables
from speakerlab.data.columns import store_columns

MIN_FILES_FOR_POOL = 500  # below this, starting processes costs more than it saves
MIN_SEGMENT_SECONDS = 0.025
DURATION_SLACK_SECONDS = 0.01  # a segment may end this much past its recording


@dataclass
class DataDir:
    """The tables of one directory; unreadable lines are left out."""

    folder: Path
    wavs: dict[str, str]
    segments: dict[str, tuple[str, float, float]]
    speakers: dict[str, str] | None
    trials: list[Path]
    seconds: dict[str, float] = field(default_factory=dict)  # utterance -> duration
    rejected: dict[str, str] = field(default_factory=dict)  # utterance -> reason
    nameless: dict[str, tuple[str, str]] = field(default_factory=dict)  # made-up id -> path, reason
    models: dict[str, list[str]] = field(default_factory=dict)  # of enrolment -> utterances

    @property
    def utterances(self) -> Iterable[str]:
        return self.segments or self.wavs

    def recording_of(self, utterance: str) -> str:
        return self.segments[utterance][0] if self.segments else utterance


def check_data_dirs(
    folders: Sequence[Path],
    *,
    sample_rate: int = 16000,
    decode: bool = False,
    allow_rejected: float = 0.0,
    num_workers: int = 1,
) -> list[str]:
    """Check directories that are used together; write utt2dur and rejected.tsv; return notes.

    decode: read every file to its end (finds truncated ones) instead of its header alone.
    allow_rejected: the share of a directory's utterances whose audio may be missing or broken.
    Raises ValueError with every fault, FileNotFoundError where a directory has no wav.scp.
    """
    faults, notes = Faults(), list[str]()
    dirs = [_read_dir(folder, faults) for folder in folders]
    for data_dir in dirs:
        _check_tables(data_dir, faults)
    _check_overlap(dirs, faults)
    for data_dir in dirs:
        notes += _check_audio(data_dir, faults, sample_rate, decode, num_workers)
        _check_rejected(data_dir, faults, allow_rejected)
        for trials in data_dir.trials:
            check_tables.check_trials(
                trials,
                utterances=set(data_dir.utterances),
                models=data_dir.models,
                faults=faults,
            )
    faults.raise_if_any(f"{', '.join(map(str, folders))}: refused, no utt2dur was written")
    for data_dir in dirs:
        notes.append(_write(data_dir, sample_rate))
    return notes


def _read_dir(folder: Path, faults: Faults) -> DataDir:
    utt2spk, wavs = folder / "utt2spk", tables.read_table(folder / "wav.scp", faults)
    left_out = tables.read_rejected(folder).items()
    nameless = {u: row for u, row in left_out if u.startswith(tables.NAMELESS) and u not in wavs}
    return DataDir(
        folder=folder,
        wavs=wavs,
        segments=tables.read_segments(folder / "segments", faults),
        speakers=tables.read_table(utt2spk, faults) if utt2spk.exists() else None,
        trials=sorted(folder.glob("trials*")),
        nameless=nameless,
    )


def _check_tables(data_dir: DataDir, faults: Faults) -> None:
    folder, utterances = data_dir.folder, set(data_dir.utterances)
    wavs, segments = f"{folder}/wav.scp:", f"{folder}/segments:"
    if not data_dir.wavs:
        faults.add("empty sets", f"{wavs} has no recordings; run stage 1 again")
    for recording, path in data_dir.wavs.items():
        if path.endswith("|"):
            text = f"run `{path.rstrip('| ')} > {recording}.wav` once and put the file's path there"
            faults.add("pipes", f"{wavs} {recording} is a command: '{path}'; {text}")
    for utterance, (recording, start, end) in data_dir.segments.items():
        if recording not in data_dir.wavs:
            text = f"names recording {recording}, not in wav.scp; correct one of them"
            faults.add("unknown recordings", f"{segments} {utterance} {text}")
        if not 0 <= start < end:
            text = f"must have 0 <= start < end, got {start} {end}; correct it"
            faults.add("bad segments", f"{segments} {utterance} {text}")
    if data_dir.speakers is not None:
        _check_speakers(data_dir, data_dir.speakers, faults)
    known = set((data_dir.speakers or {}).values())
    check_tables.check_conditions(folder, utterances=utterances, speakers=known, faults=faults)
    data_dir.models = check_tables.read_models(folder, utterances=utterances, faults=faults)


def _check_speakers(data_dir: DataDir, speakers: dict[str, str], faults: Faults) -> None:
    utterances = set(data_dir.utterances)
    where = f"{data_dir.folder}/utt2spk:"
    for utterance in data_dir.utterances:
        if utterance not in speakers:
            text = f"{where} {utterance} has no speaker; add its line"
            faults.add("utterances without speaker", text)
    for utterance in sorted(speakers.keys() - utterances):
        text = f"{where} {utterance} has no audio; add it to wav.scp or drop the line"
        faults.add("utterances without audio", text)
    if len(set(speakers.values())) == 1:
        text = f"got only {next(iter(speakers.values()))}; add others"
        faults.add("one-speaker sets", f"{where} needs at least 2 speakers, {text}")


def _check_overlap(dirs: Sequence[DataDir], faults: Faults) -> None:
    """No speaker and no utterance may be both trained on and tested."""
    train = [d for d in dirs if d.speakers is not None and not d.trials]
    test = [d for d in dirs if d.speakers is not None and d.trials]
    for a, b in product(train, test):
        where, owner = f"{a.folder} and {b.folder}:", a.speakers or {}
        shared = set(owner.values()) & set((b.speakers or {}).values())
        for speaker in sorted(shared):
            text = f"speaker {speaker} is in training and test; remove it from one of them"
            faults.add("speakers in training and test", f"{where} {text}")
        both = set(a.utterances) & set(b.utterances)
        for utterance in sorted(u for u in both if owner.get(u) not in shared):
            text = f"utterance {utterance} is in training and test; rename or drop one"
            faults.add("utterances in both", f"{where} {text}")


def _check_audio(
    data_dir: DataDir, faults: Faults, sample_rate: int, decode: bool, num_workers: int
) -> list[str]:
    """Set durations and rejections of every utterance; return notes on stereo files."""
    recordings = {key: path for key, path in data_dir.wavs.items() if not path.endswith("|")}
    look = partial(_look, decode=decode)
    found = dict(zip(recordings, _map(look, list(recordings.values()), num_workers)))
    stereo = [
        key for key, info in found.items() if not isinstance(info, str) and info.num_channels > 1
    ]
    for recording, info in found.items():
        if not isinstance(info, str) and info.sample_rate != sample_rate:
            path = recordings[recording]
            found[recording] = (
                f"{path}: must have {sample_rate} Hz, got {info.sample_rate}; convert it: "
                f"ffmpeg -i {quote(path)} -ar {sample_rate} OUT.wav (or set frontend.sample_rate)"
            )
    for utterance in data_dir.utterances:
        info = found.get(data_dir.recording_of(utterance))
        if isinstance(info, str):
            data_dir.rejected[utterance] = info
        elif info is not None:
            _note_duration(data_dir, utterance, info, faults)
    if not stereo:
        return []
    return [
        f"{data_dir.folder}: {len(stereo)} recordings have several channels: {stereo[0]}"
        f"{' and others' if len(stereo) > 1 else ''}; the first channel is read"
    ]


def _note_duration(
    data_dir: DataDir, utterance: str, info: audio.AudioInfo, faults: Faults
) -> None:
    data_dir.seconds[utterance] = info.seconds
    if data_dir.segments:
        _, start, end = data_dir.segments[utterance]
        data_dir.seconds[utterance] = min(end, info.seconds) - start
        if end > info.seconds + DURATION_SLACK_SECONDS or start >= info.seconds:
            line = f"{data_dir.folder}/segments: {utterance} ends after its recording"
            faults.add("bad segments", f"{line}, at {end} of {info.seconds:.2f} s; correct it")
        elif 0 < end - start < MIN_SEGMENT_SECONDS:
            line = f"{data_dir.folder}/segments: {utterance} is shorter than a frame"
            faults.add("bad segments", f"{line}: {end - start:g} s; drop it")


def _check_rejected(data_dir: DataDir, faults: Faults, allow_rejected: float) -> None:
    reasons = [*data_dir.rejected.values(), *(reason for _, reason in data_dir.nameless.values())]
    num_files = len(list(data_dir.utterances)) + len(data_dir.nameless)
    if len(reasons) == num_files or len(reasons) / num_files > allow_rejected:
        for reason in sorted(set(reasons)):
            faults.add("broken recordings", reason)
    for trials in data_dir.trials if data_dir.rejected else []:
        named = check_tables.utterances_of(trials, data_dir.models)
        for utterance in sorted(named & data_dir.rejected.keys()):
            line = f"{trials}: {utterance} has broken audio"
            faults.add("trials without audio", f"{line}; {data_dir.rejected[utterance]}")


def _look(path: str, *, decode: bool) -> audio.AudioInfo | str:
    """Return the header, or the problem in one line; decode: after reading the file to its end."""
    try:
        info = audio.read_info(path)
        if decode:
            with audio.stream(path) as stream:
                deque(stream.blocks, maxlen=0)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    if info.num_samples == 0:
        return f"{path}: is empty (0 samples); record it again or drop it"
    return info


def _map(
    function: Callable[[str], audio.AudioInfo | str], paths: Sequence[str], num_workers: int
) -> list[audio.AudioInfo | str]:
    if num_workers < 2 or len(paths) < MIN_FILES_FOR_POOL:
        return list(map(function, paths))
    with ProcessPoolExecutor(num_workers, initializer=die_with_parent) as pool:
        return list(pool.map(function, paths, chunksize=64))


def _write(data_dir: DataDir, sample_rate: int) -> str:
    """Write the results; return a summary line."""
    folder = data_dir.folder
    tables.write_table(folder / "utt2dur", {k: f"{s:.6f}" for k, s in data_dir.seconds.items()})
    rejected = {
        utterance: (data_dir.wavs[data_dir.recording_of(utterance)], reason)
        for utterance, reason in data_dir.rejected.items()
    }
    rejected |= data_dir.nameless
    tables.write_rejected(folder, rejected)
    store_columns(folder, sample_rate=sample_rate)
    speakers = len(set((data_dir.speakers or {}).values()))
    hours = sum(data_dir.seconds.values()) / 3600
    who = f"{speakers} speakers, " if speakers else ""
    what = f"{folder}: {who}{len(data_dir.seconds)} utterances, {hours:.2f} h"
    return f"{what}; {len(rejected)} left out, see {folder}/rejected.tsv" if rejected else what
