"""Check data directories (see `tables.py`) before training: report all faults at once.

Writes `utt2dur` and `rejected.tsv`. A directory with trials is a test set; without utt2spk (noise,
rooms) only the audio is checked.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from speakerlab.core.faults import Faults
from speakerlab.core.process import map_in_processes
from speakerlab.core.reading import open_text
from speakerlab.data import audio, tables

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
    models: dict[str, list[str]]  # of enrolment -> utterances
    rejected: dict[str, tuple[str, str]]  # utterance, or made-up id of a file -> path, reason
    seconds: dict[str, float] = field(default_factory=dict)  # utterance -> duration

    @property
    def utterances(self) -> Mapping[str, object]:
        return self.segments or self.wavs


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
    look = partial(_look, sample_rate=sample_rate, decode=decode)
    dirs = [_read_dir(folder, faults) for folder in folders]
    for data_dir in dirs:
        _check_tables(data_dir, faults)
    _check_overlap(dirs, faults)
    for data_dir in dirs:
        notes += _check_audio(data_dir, faults, look, num_workers)
        _check_rejected(data_dir, faults, allow_rejected)
        for trials in data_dir.trials:
            _check_trials(data_dir, trials, faults)
    faults.raise_if_any(f"{', '.join(map(str, folders))}: refused, no utt2dur was written")
    for data_dir in dirs:
        notes.append(_write(data_dir))
    return notes


def _read_dir(folder: Path, faults: Faults) -> DataDir:
    utt2spk, wavs = folder / "utt2spk", tables.read_table(folder / "wav.scp", faults)
    left_out = tables.read_rejected(folder).items()
    return DataDir(
        folder=folder,
        wavs=wavs,
        segments=tables.read_segments(folder / "segments", faults),
        speakers=tables.read_table(utt2spk, faults) if utt2spk.exists() else None,
        trials=sorted(folder.glob("trials*")),
        models=tables.read_enroll(folder / tables.ENROLL_MAP, faults),
        rejected={u: row for u, row in left_out if u.startswith(tables.NAMELESS) and u not in wavs},
    )


def _check_tables(data_dir: DataDir, faults: Faults) -> None:
    folder = data_dir.folder
    wavs, segments = f"{folder}/wav.scp:", f"{folder}/segments:"
    if not data_dir.wavs:
        faults.add("empty sets", f"{wavs} has no recordings; run stage 1 again")
    for recording, path in data_dir.wavs.items():
        if path.endswith("|"):
            text = f"run `{path.rstrip('| ')} > {recording}.wav` once and put the file's path there"
            faults.add("pipes", f"{wavs} {recording} is a command: '{path}'; {text}")
    for utterance, (recording, _, _) in data_dir.segments.items():
        if recording not in data_dir.wavs:
            text = f"names recording {recording}, which is not in wav.scp; correct one of them"
            faults.add("unknown recordings", f"{segments} {utterance} {text}")
    if data_dir.speakers is not None:
        _check_speakers(data_dir, data_dir.speakers, faults)
    _check_conditions(data_dir, faults)
    _check_models(data_dir, faults)


def _check_speakers(data_dir: DataDir, speakers: dict[str, str], faults: Faults) -> None:
    where = f"{data_dir.folder}/utt2spk:"
    for utterance in data_dir.utterances:
        if utterance not in speakers:
            text = f"{where} {utterance} has no speaker; add its line"
            faults.add("utterances without speaker", text)
    for utterance in sorted(speakers.keys() - data_dir.utterances.keys()):
        text = f"{where} {utterance} has no audio; add it to wav.scp or drop the line"
        faults.add("utterances without audio", text)
    if len(set(speakers.values())) == 1:
        text = f"got only {next(iter(speakers.values()))}; add others"
        faults.add("one-speaker sets", f"{where} needs at least 2 speakers, {text}")


def _check_conditions(data_dir: DataDir, faults: Faults) -> None:
    speakers = set((data_dir.speakers or {}).values())
    for name in tables.list_conditions(data_dir.folder):
        path, kind, known = data_dir.folder / name, "speaker", speakers
        if name.startswith("utt2"):
            kind, known = "utterance", data_dir.utterances
        for key, value in tables.read_table(path, faults).items():
            if key not in known:
                line = f"{path}: unknown {kind} {key}; drop the line"
                faults.add("conditions of unknown ids", line)
            if len(value.split()) > 1:
                line = f"{path}: a condition must be one word, got '{value}' of {key}"
                faults.add("bad conditions", f"{line}; write '{tables.one_word(value)}'")


def _check_models(data_dir: DataDir, faults: Faults) -> None:
    path = data_dir.folder / tables.ENROLL_MAP
    for model, rows in data_dir.models.items():
        for utterance in rows:
            if utterance not in data_dir.utterances:
                line = f"{path}: model {model} has the unknown utterance {utterance}"
                faults.add("unknown utterances", f"{line}; add it to wav.scp or drop it")
        if len(set(rows)) < len(rows):
            line = f"{path}: model {model} repeats an utterance: {' '.join(rows)}"
            faults.add("utterances twice in a model", f"{line}; keep one of each")


def _check_overlap(dirs: Sequence[DataDir], faults: Faults) -> None:
    """Report speakers and utterances that are both trained on and tested."""
    train = [d for d in dirs if d.speakers is not None and not d.trials]
    test = [d for d in dirs if d.speakers is not None and d.trials]
    for a, b in product(train, test):
        where, owner = f"{a.folder} and {b.folder}:", a.speakers or {}
        shared = set(owner.values()) & set((b.speakers or {}).values())
        for speaker in sorted(shared):
            text = f"speaker {speaker} is in training and test; remove it from one of them"
            faults.add("speakers in training and test", f"{where} {text}")
        both = a.utterances.keys() & b.utterances.keys()
        for utterance in sorted(u for u in both if owner.get(u) not in shared):
            text = f"utterance {utterance} is in training and test; rename or drop one"
            faults.add("utterances in both", f"{where} {text}")


Look = Callable[[str], audio.AudioInfo | str]


def _look(path: str, *, sample_rate: int, decode: bool) -> audio.AudioInfo | str:
    """Return the header, or the problem in one line; decode: after reading the file to its end."""
    try:
        info = audio.read_info(path, sample_rate=sample_rate)
        if decode:
            with audio.stream(path) as (_, blocks):
                deque(blocks, maxlen=0)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return info


def _check_audio(data_dir: DataDir, faults: Faults, look: Look, num_workers: int) -> list[str]:
    """Set the duration or the rejection of every utterance; return a note on stereo files."""
    folder, wavs = data_dir.folder, data_dir.wavs
    recordings = [key for key, path in wavs.items() if not path.endswith("|")]
    workers = num_workers if len(recordings) >= MIN_FILES_FOR_POOL else 1
    looked = map_in_processes(look, (wavs[key] for key in recordings), workers, chunk=64)
    found = dict(zip(recordings, looked))
    for utterance in data_dir.utterances:
        recording, start, end = data_dir.segments.get(utterance, (utterance, 0.0, None))
        info = found.get(recording)
        if isinstance(info, str):
            data_dir.rejected[utterance] = (wavs[recording], info)
        elif info is not None:
            seconds, where = info.seconds, f"{folder}/segments: {utterance}"
            end = seconds if end is None else end
            data_dir.seconds[utterance] = min(end, seconds) - start
            if end > seconds + DURATION_SLACK_SECONDS or start >= seconds:
                line = f"{where} ends after its recording, at {end} of {seconds:.2f} s; correct it"
                faults.add("bad segments", line)
            elif data_dir.segments and 0 < end - start < MIN_SEGMENT_SECONDS:
                line = f"{where} is shorter than a frame: {end - start:g} s; drop it"
                faults.add("bad segments", line)
    stereo = [key for key, info in found.items() if getattr(info, "num_channels", 1) > 1]
    if not stereo:
        return []
    others = " and others" if len(stereo) > 1 else ""
    text = f"{len(stereo)} recordings have several channels: {stereo[0]}{others}"
    return [f"{folder}: {text}; the first channel is read"]


def _check_rejected(data_dir: DataDir, faults: Faults, allow_rejected: float) -> None:
    num_rejected = len(data_dir.rejected)
    num_files = len(data_dir.utterances.keys() | data_dir.rejected.keys())
    if num_rejected == num_files or num_rejected / num_files > allow_rejected:
        for reason in sorted({reason for _, reason in data_dir.rejected.values()}):
            faults.add("broken recordings", reason)


def _check_trials(data_dir: DataDir, path: Path, faults: Faults) -> None:
    """Check that test ids are utterances, enrolment ids utterances or models, with good audio."""
    enrol, first = dict[str, int](), dict[str, int]()  # id -> the first line that needs it
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            if len(words) != 3 or words[2] not in ("target", "nontarget"):
                text = f"{path}:{number}: is not 'enrol test target|nontarget'"
                faults.add("bad lines", f"{text}, got '{line.strip()}'; correct it")
                continue
            enrol.setdefault(words[0], number)
            first.setdefault(words[1], number)
    for name, number in enrol.items():
        for utterance in data_dir.models.get(name, [name]):
            first[utterance] = min(number, first.get(utterance, number))
    for utterance in sorted(first, key=first.__getitem__):
        if utterance in data_dir.rejected:
            line = f"{path}: {utterance} has broken audio; {data_dir.rejected[utterance][1]}"
            faults.add("trials without audio", line)
        elif utterance not in data_dir.utterances:
            line = f"{path}:{first[utterance]}: unknown utterance {utterance}"
            faults.add("unknown utterances", f"{line}; add it to wav.scp or drop the trial")


def _write(data_dir: DataDir) -> str:
    folder, rejected = data_dir.folder, data_dir.rejected
    tables.write_table(folder / "utt2dur", {k: f"{s:.6f}" for k, s in data_dir.seconds.items()})
    tables.write_rejected(folder, rejected)
    speakers = len(set((data_dir.speakers or {}).values()))
    hours = sum(data_dir.seconds.values()) / 3600
    who = f"{speakers} speakers, " if speakers else ""
    what = f"{folder}: {who}{len(data_dir.seconds)} utterances, {hours:.2f} h"
    return f"{what}; {len(rejected)} left out, see {folder}/rejected.tsv" if rejected else what
