"""Check data directories (see `tables.py`) before training: report all faults at once.

Writes `utt2dur` and `rejected.tsv`. A directory with trials is a test set; without utt2spk (noise,
rooms) only the audio is checked.

Letters: N trials, M trials that may have a mirror, T of these that mirror an earlier trial.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.parallel import map_in_processes
from speakerlab.core.reading import describe_case_twins, refuse_twins
from speakerlab.core.trial_lines import LABELS, add_repeats, read_trial_lines
from speakerlab.data import audio, levels, tables

MIN_FILES_FOR_POOL = 500  # below this, starting processes costs more than it saves
MIN_SEGMENT_SECONDS = 0.025
DURATION_SLACK_SECONDS = 0.01  # a segment may end this much past its recording


@dataclass
class DataDir:
    """The tables of one directory; unreadable lines are left out."""

    folder: Path
    wavs: dict[str, str]
    segments: dict[str, tables.Segment]
    speakers: dict[str, str] | None
    num_unread_speakers: int  # lines of utt2spk
    trials: list[Path]
    models: dict[str, list[str]]  # of enrolment -> utterances
    # Utterance, or generated id of a file -> path, reason.
    rejected: dict[str, tables.Rejection]
    # Utterance -> duration, once the audio has been checked.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def utterances(self) -> Mapping[str, object]:
        """Return a table with a line for each utterance."""
        return self.segments or self.wavs

    @property
    def speaker_names(self) -> set[str]:
        if self.speakers is None:
            return set()
        return set(self.speakers.values())

    def speaker_of(self, enrol_id: str) -> str | None:
        """Return the speaker of an utterance or model; None if it has none, or several."""
        utterances = self.models.get(enrol_id, [enrol_id])
        speakers = self.speakers or {}
        names = {speakers.get(utterance) for utterance in utterances}
        return names.pop() if len(names) == 1 else None


@dataclass(frozen=True)
class ListedTrials:
    """The trials of a list: indices into the distinct ids, the label and the line of each.

    The ids of a side are in the order in which they appear.
    """

    path: Path
    enrol_ids: Sequence[str]
    test_ids: Sequence[str]
    enrol_N: NDArray[np.int32]
    test_N: NDArray[np.int32]
    is_target_N: NDArray[np.bool_]
    line_N: Sequence[int]

    def pair(self, number: int) -> tuple[str, str]:
        """Return the ids of a trial, counted from 0."""
        enrol = int(self.enrol_N[number])
        test = int(self.test_N[number])
        return self.enrol_ids[enrol], self.test_ids[test]

    def first_lines(self, index_N: NDArray[np.int32]) -> list[int]:
        """Return the first line of each id of a side, in the order of its ids.

        index_N: `enrol_N` or `test_N`.
        """
        _, first_trials = np.unique(index_N, return_index=True)
        return [self.line_N[trial] for trial in first_trials.tolist()]


def check_data_dirs(
    folders: Sequence[Path],
    *,
    sample_rate: int = 16000,
    decode: bool = False,
    allow_rejected: float = 0.0,
    num_workers: int = 1,
) -> list[str]:
    """Check directories that are used together; write utt2dur and rejected.tsv; return notes.

    decode: decode every file, which finds damage within it, instead of reading its header and its
    end alone.
    allow_rejected: the share of a directory's utterances whose audio may be missing or broken.
    Raises ValueError with every fault, FileNotFoundError where a directory has no wav.scp.
    """
    faults = Faults()
    notes: list[str] = []
    look = partial(_look, sample_rate=sample_rate, decode=decode)
    dirs = [_read_dir(folder, faults) for folder in folders]
    for data_dir in dirs:
        _check_tables(data_dir, faults)
    _check_overlap(dirs, faults)
    notes += _check_names(dirs, faults)
    for data_dir in dirs:
        notes += _check_audio(data_dir, faults, look, num_workers)
        _check_rejected(data_dir, faults, allow_rejected)
        _check_remaining(data_dir, faults)
        for trials in data_dir.trials:
            notes += _check_trials(data_dir, trials, faults)
    faults.raise_if_any(
        f"{', '.join(map(str, folders))}: refused, no utt2dur was written"
    )
    for data_dir in dirs:
        notes.append(_write(data_dir))
    return notes


def _read_dir(folder: Path, faults: Faults) -> DataDir:
    wavs = tables.read_table(folder / "wav.scp", faults)

    # Keep only the files that prepare.py has left out; the check itself writes the other rows.
    rejected: dict[str, tables.Rejection] = {}
    previous_rows = tables.read_rejected(folder)
    for name, row in previous_rows.items():
        is_nameless = name.startswith(tables.NAMELESS)
        if is_nameless and name not in wavs:
            rejected[name] = row

    segments = tables.read_segments(folder / "segments", faults)
    speakers: dict[str, str] | None = None
    unread = Faults()
    if (folder / "utt2spk").exists():
        speakers = _read_speakers(folder / "utt2spk", segments or wavs, unread)
        faults.extend(unread)
    return DataDir(
        folder=folder,
        wavs=wavs,
        segments=segments,
        speakers=speakers,
        num_unread_speakers=len(unread),
        trials=tables.list_trials(folder),
        models=tables.read_enroll(folder / tables.ENROLL_MAP, faults),
        rejected=rejected,
    )


def _read_speakers(
    path: Path, utterances: Container[str], faults: Faults
) -> dict[str, str] | None:
    """Return utterance -> speaker; None if the columns are in the wrong order."""
    # A speaker who comes first has several lines, each of which would be a duplicate.
    line_faults = Faults()
    speakers = tables.read_table(path, line_faults)
    has_utterances_first = any(utterance in utterances for utterance in speakers)
    if not has_utterances_first and any(
        speaker in utterances for speaker in speakers.values()
    ):
        columns = tables.columns_of(path.name)
        text = f"{path}: columns in the wrong order; write '{columns}'"
        faults.add("swapped columns", text)
        return None
    if line_faults:
        speakers = tables.read_table(path, faults)
    return speakers


def _check_tables(data_dir: DataDir, faults: Faults) -> None:
    wavs = f"{data_dir.folder}/wav.scp:"
    segments = f"{data_dir.folder}/segments:"
    if not data_dir.wavs:
        faults.add(
            "empty sets", f"{wavs} has no recordings; prepare the directory again"
        )
    for recording, path in data_dir.wavs.items():
        if path.endswith("|"):
            text = tables.command_fix(recording, path)
            faults.add("pipes", f"{wavs} {text}")
    for utterance, segment in data_dir.segments.items():
        recording = segment[0]
        if recording not in data_dir.wavs:
            text = (
                f"names recording {recording}, which is not in wav.scp; correct one of"
                " them"
            )
            faults.add("unknown recordings", f"{segments} {utterance} {text}")
    if data_dir.speakers is not None:
        _check_speakers(data_dir, data_dir.speakers, faults)
    _check_conditions(data_dir, faults)
    _check_models(data_dir, faults)


def _check_speakers(
    data_dir: DataDir, speakers: dict[str, str], faults: Faults
) -> None:
    where = f"{data_dir.folder}/utt2spk:"
    nameless = [name for name in data_dir.utterances if name not in speakers]
    # A line that could not be read may be that of an utterance, and was reported.
    if len(nameless) > data_dir.num_unread_speakers:
        for utterance in nameless:
            text = f"{where} {utterance} has no speaker; add its line"
            faults.add("utterances without speaker", text)
    without_audio = speakers.keys() - data_dir.utterances.keys()
    for utterance in sorted(without_audio):
        text = f"{where} {utterance} has no audio; add it to wav.scp or drop the line"
        faults.add("utterances without audio", text)
    distinct_speakers = set(speakers.values())
    if len(distinct_speakers) == 1:
        (speaker,) = distinct_speakers
        text = f"got only {speaker}; add others"
        faults.add("one-speaker sets", f"{where} needs at least 2 speakers, {text}")


def _check_conditions(data_dir: DataDir, faults: Faults) -> None:
    for name in tables.list_conditions(data_dir.folder):
        path = data_dir.folder / name
        if name.startswith("utt2"):
            kind = "utterance"
            ids = data_dir.utterances.keys()
        else:
            kind = "speaker"
            ids = data_dir.speaker_names
        table = tables.read_table(path, faults)
        for key, value in table.items():
            if key not in ids:
                line = f"{path}: unknown {kind} {key}; drop the line"
                faults.add("conditions of unknown ids", line)
            if len(value.split()) > 1:
                line = f"{path}: a condition must be one word, got '{value}' of {key}"
                faults.add(
                    "bad conditions", f"{line}; write '{tables.one_word(value)}'"
                )


def _check_models(data_dir: DataDir, faults: Faults) -> None:
    path = data_dir.folder / tables.ENROLL_MAP
    for model, rows in data_dir.models.items():
        for utterance in rows:
            if utterance not in data_dir.utterances:
                line = f"{path}: model {model} has the unknown utterance {utterance}"
                faults.add(
                    "unknown utterances", f"{line}; add it to wav.scp or drop it"
                )
        # An utterance that is there twice would count twice in the embedding of the model.
        distinct_rows = set(rows)
        if len(distinct_rows) < len(rows):
            line = f"{path}: model {model} repeats an utterance: {' '.join(rows)}"
            faults.add("utterances twice in a model", f"{line}; keep one of each")
        # Scoring would refuse it, after the training.
        speakers = data_dir.speakers or {}
        names = {speakers[utterance] for utterance in rows if utterance in speakers}
        if len(names) > 1:
            got = ", ".join(sorted(names))
            line = f"{path}: model {model} must be of one speaker, got {got}"
            faults.add("models of several speakers", f"{line}; correct it or utt2spk")


def _check_overlap(dirs: Sequence[DataDir], faults: Faults) -> None:
    """Report speakers and utterances that are both trained on and tested."""
    train_dirs: list[DataDir] = []
    test_dirs: list[DataDir] = []
    for data_dir in dirs:
        if data_dir.speakers is None:  # noise or rooms
            continue
        if data_dir.trials:
            test_dirs.append(data_dir)
        else:
            train_dirs.append(data_dir)

    for train, test in product(train_dirs, test_dirs):
        where = f"{train.folder} and {test.folder}:"
        shared_speakers = train.speaker_names & test.speaker_names
        for speaker in sorted(shared_speakers):
            text = (
                f"speaker {speaker} is in training and test; remove it from one of them"
            )
            faults.add("speakers in training and test", f"{where} {text}")

        # An utterance of a shared speaker is not reported again.
        train_speakers = train.speakers or {}
        shared_utterances = train.utterances.keys() & test.utterances.keys()
        for utterance in sorted(shared_utterances):
            if train_speakers.get(utterance) in shared_speakers:
                continue
            text = f"utterance {utterance} is in training and test; rename or drop one"
            faults.add("utterances in both", f"{where} {text}")


def _check_names(dirs: Sequence[DataDir], faults: Faults) -> list[str]:
    """Report speakers of several directories that look alike; return a note on their case."""
    names: set[str] = set()
    folders: list[str] = []
    for data_dir in dirs:
        if data_dir.speakers is not None:
            names |= data_dir.speaker_names
            folders.append(str(data_dir.folder))
    where = " and ".join(folders)
    # Reading has compared the speakers of each directory.
    if len(folders) > 1:
        try:
            refuse_twins(names, where=where, kind="speakers")
        except ValueError as error:
            faults.add("speakers that look alike", str(error))
    return describe_case_twins(names, where=where, kind="speakers")


# Path of a recording -> its header, or the problem in one line.
Look = Callable[[str], audio.AudioInfo | str]


def _look(path: str, *, sample_rate: int, decode: bool) -> audio.AudioInfo | str:
    """Return length and format of a recording, or the problem in one line."""
    try:
        return audio.read_info(path, sample_rate=sample_rate, decode=decode)
    except (ValueError, FileNotFoundError) as error:
        return str(error)


def _check_audio(
    data_dir: DataDir, faults: Faults, look: Look, num_workers: int
) -> list[str]:
    """Set the duration or the rejection of every utterance; return notes on unusual formats."""
    folder = data_dir.folder
    # A path that ends in "|" is a command, which `_check_tables` refuses.
    paths = {
        recording: path
        for recording, path in data_dir.wavs.items()
        if not path.endswith("|")
    }
    if len(paths) < MIN_FILES_FOR_POOL:
        num_workers = 1
    results = map_in_processes(look, paths.values(), num_workers, chunk=64)
    infos = dict(zip(paths, results))

    for utterance in data_dir.utterances:
        # Without segments, an utterance is a whole recording of its id.
        recording = utterance
        start = 0.0
        end = None
        if data_dir.segments:
            recording, start, end = data_dir.segments[utterance]

        # No info: the recording is not in wav.scp, or is a command. Both are refused already.
        info = infos.get(recording)
        if isinstance(info, str):
            problem = info
            data_dir.rejected[utterance] = (paths[recording], problem)
        elif info is not None:
            where = f"{folder}/segments: {utterance}"
            seconds = info.seconds
            if end is None:
                end = seconds
            last_second = min(end, seconds)
            data_dir.seconds[utterance] = last_second - start
            if end > seconds + DURATION_SLACK_SECONDS or start >= seconds:
                line = (
                    f"{where} ends after its recording, at {end} of {seconds:.2f} s;"
                    " correct it"
                )
                faults.add("bad segments", line)
            elif data_dir.segments and 0 < end - start < MIN_SEGMENT_SECONDS:
                line = f"{where} is shorter than a frame: {end - start:g} s; drop it"
                faults.add("bad segments", line)

    notes = _note_formats(folder, infos)
    # Noise and rooms have levels that speech has not.
    if data_dir.speakers is not None:
        notes += _note_levels(folder, infos)
    return notes


def _note_formats(
    folder: Path, infos: Mapping[str, audio.AudioInfo | str]
) -> list[str]:
    """Return a note for each unusual property of recordings."""
    stereo: list[str] = []
    without_index: list[str] = []
    for recording, info in infos.items():
        if isinstance(info, str):
            continue
        if info.num_channels > 1:
            stereo.append(recording)
        if not info.has_index:
            without_index.append(recording)

    notes: list[str] = []
    if stereo:
        number = count_of(len(stereo), "recording")
        text = f"with several channels: {_first_of(stereo)}; the first channel is read"
        notes.append(f"{folder}: {number} {text}")
    if without_index:
        number = count_of(len(without_index), "recording")
        text = f"to decode from the start for every crop: {_first_of(without_index)}"
        fix = "training is faster from shards (speakerlab pack) or from wav or flac"
        notes.append(f"{folder}: {number} {text}; {fix}")
    return notes


def _note_levels(folder: Path, infos: Mapping[str, audio.AudioInfo | str]) -> list[str]:
    """Return a note for each kind of recordings that may be no speech."""
    kind_of: dict[str, str] = {}
    for recording, info in infos.items():
        if not isinstance(info, str) and info.level_fault is not None:
            kind_of[recording] = info.level_fault
    return levels.describe_kinds(
        kind_of,
        len(infos),
        where=str(folder),
        unit="recordings",
    )


def _first_of(recordings: Sequence[str]) -> str:
    """Return the first id, and whether there are others."""
    others = " and others" if len(recordings) > 1 else ""
    return f"{recordings[0]}{others}"


def _check_rejected(data_dir: DataDir, faults: Faults, allow_rejected: float) -> None:
    """Report broken recordings if all are broken, or a larger share than `allow_rejected`."""
    # Sound files that were left out on purpose count for neither side.
    rejected: dict[str, tables.Rejection] = {}
    for name, row in data_dir.rejected.items():
        if not name.startswith(tables.NOT_USED):
            rejected[name] = row
    # Includes the nameless files, which are rejected but are no utterances.
    all_ids = data_dir.utterances.keys() | rejected.keys()
    num_files = len(all_ids)
    num_rejected = len(rejected)
    if not rejected:
        return
    if num_rejected == num_files or num_rejected / num_files > allow_rejected:
        # Several segments of a recording have the same reason.
        reasons = {reason for _, reason in rejected.values()}
        for reason in sorted(reasons):
            faults.add("broken recordings", reason)
        num_allowed = int(allow_rejected * num_files)
        faults.add(
            "sets with too many broken recordings",
            f"{data_dir.folder}: {num_rejected} of {num_files} recordings are broken"
            f" ({num_rejected / num_files:.1%}), {num_rejected - num_allowed} more than"
            f" --allow-rejected {allow_rejected:g} allows; repair them, or raise it",
        )


def _check_remaining(data_dir: DataDir, faults: Faults) -> None:
    """Report a set of which the broken recordings have left a single speaker."""
    remaining = _remaining_speakers(data_dir)
    if len(remaining) == 1 and len(data_dir.speaker_names) > 1:
        (speaker,) = remaining
        faults.add(
            "one-speaker sets",
            f"{data_dir.folder}: needs recordings of at least 2 speakers, got only those"
            f" of {speaker} unbroken; repair others",
        )


def _remaining_speakers(data_dir: DataDir) -> set[str]:
    """Return the speakers of the utterances whose audio is good."""
    speakers = data_dir.speakers or {}
    return {speakers[name] for name in data_dir.seconds if name in speakers}


def _check_trials(data_dir: DataDir, path: Path, faults: Faults) -> list[str]:
    """Check the utterances, labels and pairs of a list; return notes on pairs of no use."""
    try:
        listed = _read_trials(path, faults)
    except ValueError as error:
        faults.add("unreadable lists", str(error))
        return []
    # Scoring would refuse a pair that is listed twice, after the training.
    add_repeats(
        faults,
        path,
        ids=(listed.enrol_ids, listed.test_ids),
        enrol_N=listed.enrol_N,
        test_N=listed.test_N,
        line_N=listed.line_N,
    )
    _check_labels(data_dir, listed, faults)
    _check_utterances(data_dir, listed, faults)
    return _note_pairs(data_dir, listed)


def _read_trials(path: Path, faults: Faults) -> ListedTrials:
    """Read a trial list; lines that cannot be read go to `faults`, or raise ValueError."""
    # Id -> index, in order of appearance.
    enrol_index = defaultdict[str, int](count().__next__)
    test_index = defaultdict[str, int](count().__next__)
    enrol_N = array("i")
    test_N = array("i")
    is_target_N = bytearray()
    line_N = array("i")
    for number, enrol_id, test_id, is_target in read_trial_lines(path, faults):
        enrol_N.append(enrol_index[enrol_id])
        test_N.append(test_index[test_id])
        is_target_N.append(is_target)
        line_N.append(number)
    return ListedTrials(
        path,
        enrol_ids=list(enrol_index),
        test_ids=list(test_index),
        enrol_N=np.array(enrol_N, np.int32),
        test_N=np.array(test_N, np.int32),
        is_target_N=np.frombuffer(is_target_N, np.bool_),
        line_N=line_N,
    )


def _check_utterances(data_dir: DataDir, listed: ListedTrials, faults: Faults) -> None:
    """Report trials of utterances that are unknown, or have broken audio."""
    # Utterance -> number of the first line that needs it.
    utterance_lines: dict[str, int] = {}
    for test_id, number in zip(listed.test_ids, listed.first_lines(listed.test_N)):
        utterance_lines[test_id] = number
    # An enrolment id is an utterance, or a model of several utterances.
    for enrol_id, number in zip(listed.enrol_ids, listed.first_lines(listed.enrol_N)):
        utterances = data_dir.models.get(enrol_id, [enrol_id])
        for utterance in utterances:
            first_number = utterance_lines.get(utterance, number)
            utterance_lines[utterance] = min(number, first_number)

    # Faults in the order of the lines, so that the list can be corrected from its start.
    numbered_utterances = sorted(utterance_lines.items(), key=itemgetter(1))
    for utterance, number in numbered_utterances:
        if utterance in data_dir.rejected:
            _, reason = data_dir.rejected[utterance]
            line = f"{listed.path}: {utterance} has broken audio; {reason}"
            faults.add("trials without audio", line)
        elif utterance not in data_dir.utterances:
            line = f"{listed.path}:{number}: unknown utterance {utterance}"
            faults.add(
                "unknown utterances", f"{line}; add it to wav.scp or drop the trial"
            )


def _check_labels(data_dir: DataDir, listed: ListedTrials, faults: Faults) -> None:
    """Report labels that contradict the speakers: scoring would refuse them, after the training."""
    # A number for each speaker, -1 for an id without one, which is reported elsewhere.
    number_of: dict[str | None, int] = {}
    for speaker in sorted(data_dir.speaker_names):
        number_of[speaker] = len(number_of)
    enrol_speakers = [data_dir.speaker_of(name) for name in listed.enrol_ids]
    speakers = data_dir.speakers or {}
    test_speakers = [speakers.get(name) for name in listed.test_ids]
    enrol_numbers = np.array([number_of.get(name, -1) for name in enrol_speakers], int)
    test_numbers = np.array([number_of.get(name, -1) for name in test_speakers], int)
    enrol_speaker_N = enrol_numbers[listed.enrol_N]
    test_speaker_N = test_numbers[listed.test_N]
    has_speakers_N = (enrol_speaker_N >= 0) & (test_speaker_N >= 0)
    is_same_speaker_N = enrol_speaker_N == test_speaker_N
    is_wrong_N = has_speakers_N & (is_same_speaker_N != listed.is_target_N)
    wrong_numbers = np.flatnonzero(is_wrong_N)
    if not len(wrong_numbers):
        return

    def describe() -> Iterator[str]:
        for index in wrong_numbers:
            number = int(index)
            enrol_id, test_id = listed.pair(number)
            label = LABELS[int(listed.is_target_N[number])]
            yield (
                f"{listed.path}:{listed.line_N[number]}: is a {label}, but {enrol_id} is"
                f" of {data_dir.speaker_of(enrol_id)} and {test_id} of"
                f" {speakers[test_id]}; correct the list or utt2spk"
            )

    kind = "trials that contradict the speakers"
    faults.add_first(kind, describe(), len(wrong_numbers))


def _note_pairs(data_dir: DataDir, listed: ListedTrials) -> list[str]:
    """Return notes on pairs that are listed in both orders, and of an utterance with itself."""
    # The indices of each id on the other side, -1 for an id that occurs on one side only. A model
    # is no utterance, even under the same name.
    test_index = {name: index for index, name in enumerate(listed.test_ids)}
    enrol_index: dict[str, int] = {}
    for index, name in enumerate(listed.enrol_ids):
        if name not in data_dir.models:
            enrol_index[name] = index
        else:
            test_index.pop(name, None)
    as_test = np.array([test_index.get(name, -1) for name in listed.enrol_ids], int)
    as_enrol = np.array([enrol_index.get(name, -1) for name in listed.test_ids], int)

    # The mirror of each trial: the same two utterances with their sides exchanged.
    mirror_enrol_N = as_enrol[listed.test_N]
    mirror_test_N = as_test[listed.enrol_N]
    is_self_N = mirror_test_N == listed.test_N
    may_have_mirror_N = (mirror_enrol_N >= 0) & (mirror_test_N >= 0) & ~is_self_N
    number_M = np.flatnonzero(may_have_mirror_N)
    num_test = len(listed.test_ids)
    pair_M = listed.enrol_N[number_M].astype(np.int64) * num_test
    pair_M += listed.test_N[number_M]
    mirror_M = mirror_enrol_N[number_M] * num_test + mirror_test_N[number_M]

    # Both orders get the same key. Equal keys become neighbours, in the order of their lines.
    key_M = np.minimum(pair_M, mirror_M)
    order_M = np.argsort(key_M, kind="stable")
    is_equal = np.diff(key_M[order_M]) == 0
    earlier_T = number_M[order_M[:-1][is_equal]]
    later_T = number_M[order_M[1:][is_equal]]
    notes = _note_selves(listed, is_self_N)
    notes += _note_mirrors(listed, earlier_T, later_T)
    return notes


def _note_selves(listed: ListedTrials, is_self_N: NDArray[np.bool_]) -> list[str]:
    """Return a note on trials of an utterance with itself, [] without any."""
    if not is_self_N.any():
        return []
    first = int(is_self_N.argmax())
    number = count_of(int(is_self_N.sum()), "trial")
    utterance, _ = listed.pair(first)
    return [
        f"{listed.path}:{listed.line_N[first]}: {number} of an utterance with itself,"
        f" the first of {utterance}; they are too easy, remove them"
    ]


def _note_mirrors(
    listed: ListedTrials, earlier_T: NDArray[np.int64], later_T: NDArray[np.int64]
) -> list[str]:
    """Return a note on trials that mirror earlier ones, [] without any."""
    if not len(later_T):
        return []
    first = int(later_T.argmin())
    later = int(later_T[first])
    earlier = int(earlier_T[first])
    number = count_of(len(later_T), "trial")
    pair = " ".join(listed.pair(later))
    return [
        f"{listed.path}:{listed.line_N[later]}: {number} of the pair of an earlier trial"
        f" in the other order, the first {pair} of line {listed.line_N[earlier]}; they"
        " count twice, keep one of them"
    ]


def _write(data_dir: DataDir) -> str:
    """Write utt2dur and rejected.tsv; return a one-line summary of the directory."""
    folder = data_dir.folder
    rejected = data_dir.rejected
    # A microsecond is less than a sample, so rounding to samples finds the exact length again.
    durations: dict[str, str] = {}
    for utterance, seconds in data_dir.seconds.items():
        durations[utterance] = f"{seconds:.6f}"
    tables.write_table(folder / "utt2dur", durations)
    tables.write_rejected(folder, rejected)

    num_speakers = len(_remaining_speakers(data_dir))
    total_seconds = sum(data_dir.seconds.values())
    hours = total_seconds / 3600
    summary = f"{count_of(len(data_dir.seconds), 'utterance')}, {hours:.2f} h"
    if num_speakers:
        summary = f"{count_of(num_speakers, 'speaker')}, {summary}"
    if rejected:
        summary += f"; {len(rejected)} left out, see {folder}/rejected.tsv"
    if data_dir.trials and data_dir.speakers is None:
        summary += "; no utt2spk, so no speakers: `speakerlab score` needs it"
    return f"{folder}: {summary}"
