"""Cleaning of a data directory: wrong speakers, split speakers, copies of a recording.

In: embeddings and audio of a checked data directory. Out: findings, and a data directory of the
remaining utterances.
Letters: N utterances, D dimensions, S speakers or samples.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speakerlab.core import done
from speakerlab.core.atomic import replacing_folder, write_text
from speakerlab.core.counting import count_of
from speakerlab.data.columns import copy_rate
from speakerlab.data.manifest import Manifest
from speakerlab.data.shards import without_readers
from speakerlab.data.tables import (
    list_conditions,
    read_about,
    read_segments,
    read_table,
    write_data_dir,
)
from speakerlab.scoring.pair_scores import unit_rows
from speakerlab.scoring.speaker_labels import Judgement, Pair, group_speakers, judge

RECORD = ".cleaned"  # of a finished cleaning, in the directory that it has written
FINDINGS = "findings.tsv"  # beside it
COLUMNS = "id kind speaker suggested match score threshold action"
# Kinds of findings.
OTHER_SPEAKER = "other-speaker"
DUPLICATE = "duplicate"
SAME_PERSON = "same-person"
NOT_JUDGED = "not-judged"
MIN_LENGTH = 1e-6  # of a centred embedding


@dataclass(frozen=True)
class Finding:
    """Line of findings.tsv; empty fields are written as "-"."""

    id: str  # utterance or speaker
    kind: str
    speaker: str
    action: str
    suggested: str = ""  # speaker
    match: str = ""  # utterance or speaker that it was compared with
    score: float | None = None
    threshold: float | None = None

    def line(self) -> str:
        """Return the fields in the order of COLUMNS, with tabs between."""
        fields: list[str] = []
        for name in COLUMNS.split():
            value = getattr(self, name)
            if isinstance(value, float):
                value = f"{value:.2f}"
            fields.append(value or "-")
        return "\t".join(fields)


@dataclass(frozen=True)
class Cleaning:
    """Outcome of looking through a data directory."""

    findings: Sequence[Finding]  # sorted by kind and id
    speakers: Mapping[str, str]  # remaining utterance -> speaker
    names: Mapping[str, str]  # speaker -> name in the cleaned directory
    judgement: Judgement


def find_copies(manifest: Manifest, *, num_threads: int) -> list[list[int]]:
    """Return the rows of utterances with the same samples, sorted by id; no row is alone.

    Raises ValueError or FileNotFoundError, one line, where audio is missing or damaged.
    """
    # Only utterances of the same length can have the same samples.
    _, length_N, count_L = np.unique(
        manifest.num_samples_N,
        return_inverse=True,
        return_counts=True,
    )
    num_of_this_length_N = count_L[length_N]
    rows = np.flatnonzero(num_of_this_length_N > 1).tolist()

    def digest_of(row: int) -> bytes:
        num_samples = int(manifest.num_samples_N[row])
        wave_S = manifest.read(row, 0, num_samples)
        return hashlib.blake2b(wave_S.tobytes(), digest_size=16).digest()

    rows_of: dict[bytes, list[int]] = {}
    # Decoders and hashes release the interpreter's lock.
    with ThreadPoolExecutor(num_threads) as pool:
        for row, digest in zip(rows, pool.map(digest_of, rows)):
            rows_of.setdefault(digest, []).append(row)
    ids = manifest.ids
    copies: list[list[int]] = []
    for equal_rows in rows_of.values():
        if len(equal_rows) > 1:
            copies.append(sorted(equal_rows, key=lambda row: ids[row]))
    return copies


def look_through(
    ids: Sequence[str],
    speakers: Sequence[str],
    emb_ND: np.ndarray,
    copies: Sequence[Sequence[int]],
    *,
    far: float,
    joins_speakers: bool = False,
) -> Cleaning:
    """Judge the labels of a data directory; return findings and the remaining utterances.

    ids, speakers: of each utterance, (N). emb_ND: their embeddings, of any length. copies: rows
    with the same audio, sorted by id. far: share of the good utterances that may be dropped.
    joins_speakers: give speakers who are probably one person one name, the first of theirs.
    Raises ValueError, one line, for fewer than two speakers with two different utterances.
    """
    copy_of = _copies_of_first(copies, speakers)
    # Sorted by id, which in most corpora begins with the session: the halves of a speaker are then
    # of different sessions.
    rows = [row for row in range(len(ids)) if row not in copy_of]
    rows.sort(key=lambda row: ids[row])
    judged_ids = [ids[row] for row in rows]
    judged_speakers = [speakers[row] for row in rows]
    names_S, speaker_N = np.unique(judged_speakers, return_inverse=True)
    names = names_S.tolist()
    num_with_several = int((np.bincount(speaker_N) > 1).sum())
    if num_with_several < 2:
        raise ValueError(
            f"utt2spk: {num_with_several} of {count_of(len(names), 'speaker')} with two"
            " different utterances, cleaning needs two; add utterances"
        )
    unit_ND = _centred(unit_rows(emb_ND[rows], judged_ids))
    judgement = judge(unit_ND, speaker_N, far=far)

    score_of = dict(zip(rows, judgement.own_score_N.tolist()))
    _keep_best_labels(copies, copy_of, score_of)
    new_names = _join(judgement.pairs, names) if joins_speakers else {}

    # A copy whose label is wrong is dropped as a copy.
    findings = _duplicates(copy_of, ids, speakers)
    copied_ids = {finding.id for finding in findings}
    for finding in _other_speakers(judgement, judged_ids, names, speaker_N):
        if finding.id not in copied_ids:
            findings.append(finding)
    dropped = {finding.id for finding in findings}
    findings += _same_persons(judgement, names, new_names)
    for finding in _not_judged(judgement, judged_ids, judged_speakers):
        if finding.id not in dropped:
            findings.append(finding)

    remaining: dict[str, str] = {}
    for utterance, speaker in zip(ids, speakers):
        if utterance not in dropped:
            remaining[utterance] = new_names.get(speaker, speaker)
    findings.sort(key=lambda finding: (finding.kind, finding.id, finding.match))
    return Cleaning(findings, remaining, new_names, judgement)


def _copies_of_first(
    copies: Sequence[Sequence[int]], speakers: Sequence[str]
) -> dict[int, int]:
    """Return row -> first row with the same audio and label, of all but the first."""
    copy_of: dict[int, int] = {}
    for rows in copies:
        first_of: dict[str, int] = {}
        for row in rows:
            first = first_of.setdefault(speakers[row], row)
            if first != row:
                copy_of[row] = first
    return copy_of


def _duplicates(
    copy_of: Mapping[int, int], ids: Sequence[str], speakers: Sequence[str]
) -> list[Finding]:
    """Return a finding for each copy that is dropped."""
    findings: list[Finding] = []
    for row, remaining_row in copy_of.items():
        finding = Finding(
            id=ids[row],
            kind=DUPLICATE,
            speaker=speakers[row],
            action="drop",
            suggested=speakers[remaining_row],
            match=ids[remaining_row],
        )
        findings.append(finding)
    return findings


def _keep_best_labels(
    copies: Sequence[Sequence[int]],
    copy_of: dict[int, int],
    score_of: Mapping[int, float],
) -> None:
    """Keep one of the copies with several labels: the one that is most like its speaker."""
    for rows in copies:
        labelled = [row for row in rows if row not in copy_of]
        # NaN, of a speaker without other utterances, is worse than any score.
        scores = np.nan_to_num([score_of[row] for row in labelled], nan=-np.inf)
        best = labelled[int(scores.argmax())]  # of equal scores, the first
        for row in rows:
            if row != best:
                copy_of[row] = best


def _other_speakers(
    judgement: Judgement,
    ids: Sequence[str],
    names: Sequence[str],
    speaker_N: np.ndarray,
) -> list[Finding]:
    """Return a finding for each utterance that does not sound like its speaker."""
    findings: list[Finding] = []
    for index in np.flatnonzero(judgement.is_suspect_N).tolist():
        # Suggest a speaker only if the utterance is as like that one as good utterances are.
        suggested = ""
        if judgement.other_score_N[index] >= judgement.threshold:
            suggested = names[int(judgement.nearest_speaker_N[index])]
        finding = Finding(
            id=ids[index],
            kind=OTHER_SPEAKER,
            speaker=names[int(speaker_N[index])],
            action="drop",
            suggested=suggested,
            score=float(judgement.own_score_N[index]),
            threshold=judgement.threshold,
        )
        findings.append(finding)
    return findings


def _not_judged(
    judgement: Judgement, ids: Sequence[str], speakers: Sequence[str]
) -> list[Finding]:
    """Return a finding for each utterance whose speaker has no other to compare it with."""
    findings: list[Finding] = []
    for index in np.flatnonzero(np.isnan(judgement.own_score_N)).tolist():
        finding = Finding(
            id=ids[index],
            kind=NOT_JUDGED,
            speaker=speakers[index],
            action="keep",
        )
        findings.append(finding)
    return findings


def _join(pairs: Sequence[Pair], names: Sequence[str]) -> dict[str, str]:
    """Return the new name of each speaker who gets one, the first name of a group."""
    group_S = group_speakers(pairs, len(names))
    first_of: dict[int, str] = {}
    new_names: dict[str, str] = {}
    for name, group in zip(names, group_S.tolist()):
        first = first_of.setdefault(group, name)
        if first != name:
            new_names[name] = first
    return new_names


def _same_persons(
    judgement: Judgement, names: Sequence[str], new_names: Mapping[str, str]
) -> list[Finding]:
    """Return a finding for each pair of speakers who are probably one person."""
    findings: list[Finding] = []
    for pair in judgement.pairs:
        first = names[pair.first]
        second = names[pair.second]
        finding = Finding(
            id=second,
            kind=SAME_PERSON,
            speaker=second,
            action="join" if new_names else "list",
            suggested=new_names.get(second, first),
            match=first,
            score=pair.score,
            threshold=judgement.pair_threshold,
        )
        findings.append(finding)
    return findings


def _centred(unit_ND: np.ndarray) -> NDArray[np.float64]:
    """Return unit vectors again, without what all have in common."""
    centred_ND = unit_ND - unit_ND.mean(axis=0, dtype=np.float64)
    length_N1 = np.linalg.norm(centred_ND, axis=1, keepdims=True)
    return centred_ND / np.maximum(length_N1, MIN_LENGTH)


def write_cleaned(
    folder: Path,
    out: Path,
    cleaning: Cleaning,
    inputs: Mapping[str, Any],
) -> None:
    """Write the remaining utterances of a checked data directory, its findings and the record.

    Conditions and facts are kept, trial lists and enrolment models are not. `out` is replaced whole
    or not at all.
    """
    speakers = cleaning.speakers
    seconds = read_table(folder / "utt2dur")
    wavs = read_table(folder / "wav.scp")
    all_segments = read_segments(folder / "segments")
    segments = None
    recordings = set(speakers)
    if all_segments:
        segments = {utterance: all_segments[utterance] for utterance in speakers}
        recordings = {segment[0] for segment in segments.values()}

    columns = _conditions(folder, speakers, cleaning.names)
    columns["spk2utt"] = _utterances_of(speakers)
    # The durations mark the directory as checked: it has the same audio.
    columns["utt2dur"] = {utterance: seconds[utterance] for utterance in speakers}

    lines = [COLUMNS.replace(" ", "\t")]
    lines += [finding.line() for finding in cleaning.findings]
    # No process may be reading shards that `speakerlab pack` has written there.
    with without_readers(out), replacing_folder(out) as fresh:
        write_data_dir(
            fresh,
            wavs={recording: wavs[recording] for recording in recordings},
            speakers=speakers,
            segments=segments,
            columns=columns,
            about=read_about(folder),
        )
        copy_rate(folder, fresh)
        write_text(fresh / FINDINGS, "\n".join(lines) + "\n")
        done.record(fresh / RECORD, inputs, outputs=["wav.scp", "utt2spk", FINDINGS])


def _utterances_of(speakers: Mapping[str, str]) -> dict[str, str]:
    """Return the lines of spk2utt: speaker -> utterances. speakers: of each utterance."""
    lines: dict[str, str] = {}
    for utterance in sorted(speakers):
        speaker = speakers[utterance]
        if speaker in lines:
            lines[speaker] += f" {utterance}"
        else:
            lines[speaker] = utterance
    return lines


def _conditions(
    folder: Path, speakers: Mapping[str, str], new_names: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the conditions of the remaining utterances and speakers, by the name of the table."""
    remaining_speakers = set(speakers.values())
    columns: dict[str, dict[str, str]] = {}
    for name in list_conditions(folder):
        values = read_table(folder / name)
        column: dict[str, str] = {}
        for key in sorted(values):
            if name.startswith("utt2"):
                is_left = key in speakers
                new_key = key
            else:
                new_key = new_names.get(key, key)
                is_left = new_key in remaining_speakers
            # Of joined speakers, the first that has a value.
            if is_left:
                column.setdefault(new_key, values[key])
        columns[name] = column
    return columns
