"""Speakers of a diarized recording, to be linked: from the files of `diarize`, or from its result.

Letter: D embedding dimensions.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core.done import file_digest
from speakerlab.core.reading import keys, read_json
from speakerlab.data.tables import one_word
from speakerlab.diarization.regions import Turn, read_rttm
from speakerlab.inference.diarize import Diarization

log = logging.getLogger(__name__)
# In another folder: `diarize` would replace turns that were corrected by hand.
AGAIN = "diarize the recording again, with another --out than before"

Key = tuple[str, str]  # recording, and name of a speaker there

# What is read of the JSON file of a diarization.
SPEAKER_KEYS = keys(embedding=list[float], may={"match": dict[str, Any] | None})
RESULT_KEYS = keys(
    recording=str,
    model_sha256=str,
    speakers=dict[str, SPEAKER_KEYS],
    may={"rttm_sha256": str | None},
)


@dataclass(frozen=True, eq=False)
class LocalSpeaker:
    """Speaker of one recording."""

    recording: str
    name: str  # in this recording
    seconds: float  # of speech
    emb_D: np.ndarray = field(repr=False)  # mean embedding, of any length
    known_as: str = ""  # the name of an enrolled speaker, without blanks; "" if unknown

    @property
    def key(self) -> Key:
        return self.recording, self.name


@dataclass(frozen=True, eq=False)
class Result:
    """Files that `speakerlab diarize --out` has written for a recording."""

    path: Path  # of the JSON file
    recording: str
    model_sha256: str
    turns: Sequence[Turn]
    speakers: Sequence[LocalSpeaker]


def read_result(path: Path) -> Result:
    """Read NAME.json and the turns of NAME.rttm beside it.

    Turns may have been corrected by hand. The embeddings are still those of the turns before, so a
    warning says so. Speakers without a turn are left out. Raises ValueError, one line, if a file is
    damaged or an embedding is missing, and FileNotFoundError without NAME.rttm.
    """
    facts = read_json(path, like=RESULT_KEYS, fix=AGAIN)
    recording = facts["recording"]
    rttm = path.with_suffix(".rttm")
    turns = _read_turns(rttm, recording, facts.get("rttm_sha256"))
    seconds_of: dict[str, float] = {}
    for turn in turns:
        seconds_before = seconds_of.get(turn.speaker, 0.0)
        seconds_of[turn.speaker] = seconds_before + turn.end - turn.start

    speakers: list[LocalSpeaker] = []
    for name, row in facts["speakers"].items():
        name_in_rttm = one_word(name)
        if name_in_rttm not in seconds_of:
            continue
        match = row.get("match") or {}
        speaker = LocalSpeaker(
            recording=recording,
            name=name_in_rttm,
            seconds=seconds_of.pop(name_in_rttm),
            emb_D=np.array(row["embedding"], dtype=np.float32),
            known_as=_known_as(match.get("name"), match.get("is_known")),
        )
        check_embedding(speaker, where=str(path))
        speakers.append(speaker)
    # What remains are the speakers of turns for whom the JSON file has no embedding.
    if seconds_of:
        raise ValueError(
            f"{rttm}: has speaker {min(seconds_of)}, of whom {path.name} has no embedding;"
            f" use the names of its speakers, or {AGAIN}, --vad {rttm.name} and more"
            " --speakers"
        )
    return Result(
        path=path,
        recording=recording,
        model_sha256=facts["model_sha256"],
        turns=turns,
        speakers=speakers,
    )


def _read_turns(rttm: Path, recording: str, written_sha256: str | None) -> list[Turn]:
    """Read the turns of one recording; warn if the file was changed after the diarization.

    written_sha256: digest of the file that `diarize` has written, if that is known.
    """
    if not rttm.is_file():
        raise FileNotFoundError(f"{rttm}: does not exist; {AGAIN}")
    if written_sha256 not in (None, file_digest(rttm)):
        log.warning(
            "%s: was changed after the diarization; its turns are used, with the speakers'"
            " embeddings of the turns before",
            rttm,
        )
    name_in_rttm = one_word(recording)
    turns_of = read_rttm(rttm)
    others = turns_of.keys() - {name_in_rttm}
    if others:
        raise ValueError(
            f"{rttm}: has turns of recording {min(others)}, not of {name_in_rttm};"
            f" correct the name in its lines, or {AGAIN}"
        )
    # Without speech, the file is empty.
    return turns_of.get(name_in_rttm, [])


def speakers_of(diarization: Diarization) -> list[LocalSpeaker]:
    """Return the speakers of a diarization, for `link`."""
    rows = diarization.to_dict()["speakers"]
    speakers: list[LocalSpeaker] = []
    for name, emb_D in diarization.speakers.items():
        match = diarization.matches.get(name)
        speaker = LocalSpeaker(
            recording=diarization.recording,
            name=name,
            seconds=rows[name]["seconds"],
            emb_D=emb_D,
            known_as=_known_as(match.name, match.is_known) if match else "",
        )
        speakers.append(speaker)
    return speakers


def _known_as(name: Any, is_known: Any) -> str:
    """Return the name of an enrolled speaker as RTTM has it; "" if the match is not good enough.

    It may differ from the local name: who speaks on two channels of a call is "Ann" on one, and for
    example "channel2-Ann" on the other.
    """
    return one_word(str(name)) if is_known and name else ""


def check_embedding(speaker: LocalSpeaker, *, where: str) -> None:
    """Raise ValueError unless an embedding is a finite vector with a direction."""
    emb_D = speaker.emb_D
    is_vector = emb_D.ndim == 1 and np.isfinite(emb_D).all()
    if not (is_vector and emb_D.any()):
        raise ValueError(
            f"{where}: the embedding of {speaker.name} is empty, zero or not finite;"
            f" {AGAIN}"
        )
