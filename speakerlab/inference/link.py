"""One identity over many recordings: which speakers of diarized recordings are the same person.

Diarizations -> speakers with embeddings -> groups (diarization/linking.py) -> names. Names last: an
identity keeps the name that most of its speech had before.
Letters: N speakers of recordings, G identities, R recordings, D embedding dimensions.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from speakerlab.core.done import file_digest
from speakerlab.core.reading import keys, read_json, refuse_twins
from speakerlab.diarization.linking import (
    MIN_SECONDS,
    cosine_blocks,
    link_speakers,
    weighted_means,
)
from speakerlab.diarization.regions import Turn, read_rttm
from speakerlab.inference.diarize import (
    Diarization,
    Model,
    check_enrolled,
    match_enrolled,
    one_word,
)
from speakerlab.scoring.calibration import Calibration

log = logging.getLogger(__name__)
# A pair of people is doubtful from so much below the threshold.
DOUBTFUL_COSINE = 0.1
# With so many others, a person is expected to reach the threshold by chance.
FALSE_ALARMS_PER_PERSON = 0.05
MAX_ROUNDS = 5  # of choosing the threshold for the number of people
MAX_DOUBTFUL = 1000  # pairs, the most similar ones
IDENTITY = "identity"  # name of a person, with a number
UNKNOWN = "unknown"  # name of a speaker with too little speech, with a number
# Into another folder, because `diarize` would replace turns that were corrected by hand.
AGAIN = "diarize the recording again, with another --out than before"

Key = tuple[str, str]  # recording, and name of a speaker there
# In the JSON file of a diarization.
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
class Member:
    """Speaker of one recording, as part of an identity."""

    recording: str
    speaker: str
    seconds: float
    # Mean cosine with the other members, weighted by seconds; None without others.
    closeness: float | None


@dataclass(frozen=True, eq=False)
class Identity:
    """Person, with the speakers of recordings that are this person."""

    name: str
    members: Sequence[Member]  # in the order of the given speakers
    is_unknown: bool = False  # a single speaker with too little speech to say who it is

    @property
    def seconds(self) -> float:
        return sum(member.seconds for member in self.members)


@dataclass(frozen=True)
class DoubtfulPair:
    """Two identities whose similarity is near the threshold, and why they are two."""

    first: str
    second: str
    closeness: float  # mean cosine of their members, weighted by seconds
    is_apart: bool  # both speak in one recording, or have names of enrolled speakers


@dataclass(frozen=True, eq=False)
class Linked:
    """Identities of the speakers of recordings; iterable."""

    identities: Sequence[Identity]  # in order of appearance, unknown ones among them
    threshold: float | None  # None: the number of people was given, without a threshold
    far: float | None  # false-alarm rate of the threshold, if it is from a calibration
    doubtful: Sequence[DoubtfulPair]  # the most similar first
    last_numbers: Mapping[str, int]  # of identities and of unknown speakers

    def __iter__(self) -> Iterator[Identity]:
        return iter(self.identities)

    def __len__(self) -> int:
        return len(self.identities)

    @cached_property
    def names(self) -> dict[Key, str]:
        """(recording, speaker) -> name of the identity."""
        names: dict[Key, str] = {}
        for identity in self.identities:
            for member in identity.members:
                names[member.recording, member.speaker] = identity.name
        return names

    def rename(self, recording: str, turns: Iterable[Turn]) -> list[Turn]:
        """Return the turns of a recording with the names of identities."""
        names = self.names
        return [turn._replace(speaker=names[recording, turn.speaker]) for turn in turns]


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
    if not rttm.is_file():
        raise FileNotFoundError(f"{rttm}: does not exist; {AGAIN}")
    if facts.get("rttm_sha256") not in (None, file_digest(rttm)):
        log.warning(
            "%s: was changed after the diarization; its turns are used, with the speakers'"
            " embeddings of the turns before",
            rttm,
        )
    # Without speech, the file is empty.
    turns_of = read_rttm(rttm)
    others = turns_of.keys() - {one_word(recording)}
    if others:
        raise ValueError(
            f"{rttm}: has turns of recording {min(others)}, not of"
            f" {one_word(recording)}; correct the name in its lines, or {AGAIN}"
        )
    turns = turns_of.get(one_word(recording), [])
    seconds: dict[str, float] = {}
    for turn in turns:
        seconds[turn.speaker] = seconds.get(turn.speaker, 0.0) + turn.end - turn.start

    speakers: list[LocalSpeaker] = []
    for name, row in facts["speakers"].items():
        word = one_word(name)
        if word not in seconds:
            continue
        match = row.get("match") or {}
        speaker = LocalSpeaker(
            recording=recording,
            name=word,
            seconds=seconds.pop(word),
            emb_D=np.array(row["embedding"], dtype=np.float32),
            known_as=_known_as(match.get("name"), match.get("is_known")),
        )
        _check_embedding(speaker, where=str(path))
        speakers.append(speaker)
    if seconds:
        raise ValueError(
            f"{rttm}: has speaker {min(seconds)}, of whom {path.name} has no embedding; use"
            f" the names of its speakers, or {AGAIN}, --vad {rttm.name} and more --speakers"
        )
    return Result(
        path=path,
        recording=recording,
        model_sha256=facts["model_sha256"],
        turns=turns,
        speakers=speakers,
    )


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

    On two channels of a call, the speaker has another local name on the second.
    """
    return one_word(str(name)) if is_known and name else ""


def choose_threshold(calibration: Calibration, num_people: int) -> tuple[float, float]:
    """Return a false-alarm rate that fits a number of people, and its threshold.

    At the rate F, each of K people is expected to reach the threshold with F (K - 1) of the others,
    so F = 0.05 / (K - 1). Between the stored rates, the threshold is interpolated over the
    logarithm of the rate; a rate outside of them becomes the nearest one. Raises ValueError if the
    calibration has no rates.
    """
    stored = calibration.threshold_at_far
    if not stored:
        raise ValueError(
            "calibration: has no threshold for a false-alarm rate, it is from too few"
            " speakers; calibrate with more, or give a threshold"
        )
    rates = sorted(map(float, stored))
    wanted = FALSE_ALARMS_PER_PERSON / max(num_people - 1, 1)
    rate = float(np.clip(wanted, rates[0], rates[-1]))
    thresholds = [calibration.threshold_at(stored_rate) for stored_rate in rates]
    threshold = np.interp(np.log(rate), np.log(rates), thresholds)
    return rate, float(threshold)


def link(
    speakers: Sequence[LocalSpeaker],
    *,
    threshold: float | None = None,
    calibration: Calibration | None = None,
    far: float | None = None,
    num_people: int | None = None,
    allow_same_recording: bool = False,
    min_seconds: float = MIN_SECONDS,
    earlier: Mapping[Key, str] | None = None,
    last_numbers: Mapping[str, int] | None = None,
    model: Model = None,
) -> Linked:
    """Find which speakers of different recordings are the same person.

    One of threshold, calibration and num_people is needed; without a threshold, the calibration
    chooses one by `choose_threshold`: for as many people as speakers, and again for as many people
    as were found, while their number falls, at most five times.

    speakers: of all recordings, with embeddings (D,) of one model, of any length; their order
        decides the order of the result.
    threshold: mean cosine from which two groups are one person.
    calibration: of the model.
    far: false-alarm rate stored with the calibration, whose threshold is used.
    num_people: if known; people are then linked at any similarity until so many remain, and a
        threshold is only for short speakers.
    allow_same_recording: two speakers of one recording may be one person.
    min_seconds: speakers with less speech do not decide who is one person: each joins the person
        whose mean cosine is highest and reaches the threshold, or is unknown.
    earlier, last_numbers: `names` and `last_numbers` of an earlier result; an identity keeps the
        name that the largest part of its speech had.
    model: with enrolled speakers; identities are named after those that reach the threshold
        (`match_enrolled`). Speakers with the same name of an enrolled speaker (`known_as`) are
        always one person, with different ones never.
    Raises ValueError, one line, without a threshold, calibration or number, for two speakers of the
    same recording and name, embeddings of different dimensions, of length 0 or not finite, and for
    a recording with more speakers than `num_people`.
    """
    _check_arguments(threshold, calibration, far, num_people)
    _check_speakers(speakers)
    if model is not None:
        check_enrolled(model)
    if not speakers:
        return Linked([], threshold, None, [], dict(last_numbers or {}))

    emb_ND = np.stack([speaker.emb_D for speaker in speakers]).astype(np.float64)
    comparison = _Comparison(
        speakers=speakers,
        unit_ND=emb_ND / np.linalg.norm(emb_ND, axis=1, keepdims=True),
        seconds_N=np.array([speaker.seconds for speaker in speakers]),
        apart=_apart(speakers, allow_same_recording=allow_same_recording),
        num_people=num_people,
        min_seconds=min_seconds,
    )
    if threshold is None and calibration is not None:
        far, threshold = comparison.choose(calibration, far)
    group_N = comparison.groups(threshold)

    mean_GD, weight_G = weighted_means(
        comparison.unit_ND, comparison.seconds_N, group_N
    )
    unknown = _unknown_groups(speakers, group_N, min_seconds)
    names, numbers = _name_groups(
        speakers,
        group_N,
        unknown=unknown,
        enrolled=_name_enrolled(speakers, group_N, mean_GD, model, threshold),
        earlier=earlier or {},
        last_numbers=last_numbers or {},
    )
    members_of = _members(comparison, group_N, mean_GD, weight_G)
    identities: list[Identity] = []
    for group, name in enumerate(names):
        identities.append(Identity(name, members_of[group], group in unknown))
    doubtful: list[DoubtfulPair] = []
    if threshold is not None:
        doubtful = _doubtful(mean_GD, comparison.apart, group_N, names, threshold)
    return Linked(identities, threshold, far, doubtful, numbers)


def _check_arguments(
    threshold: float | None,
    calibration: Calibration | None,
    far: float | None,
    num_people: int | None,
) -> None:
    """Raise ValueError, one line, unless something decides, and it is one thing."""
    if threshold is None and calibration is None and num_people is None:
        raise ValueError(
            "link: needs a threshold, a calibration or the number of people; give one"
        )
    if far is not None and (threshold is not None or calibration is None):
        raise ValueError(
            "far: is a rate of the calibration; give one, and no threshold"
        )
    if threshold is not None and not -1 <= threshold <= 1:
        raise ValueError(
            f"threshold: must be a cosine from -1 to 1, got {threshold}; correct it"
        )


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Speakers to link, with what does not depend on the threshold."""

    speakers: Sequence[LocalSpeaker]
    unit_ND: np.ndarray
    seconds_N: np.ndarray
    apart: csr_array  # see `_apart`
    num_people: int | None
    min_seconds: float

    def choose(
        self, calibration: Calibration, far: float | None
    ) -> tuple[float | None, float | None]:
        """Return a false-alarm rate and its threshold: of `far`, or for the number of people.

        The most similar groups are merged first, so a threshold decides about the people that
        remain: it is for their number, which is unknown at first. The threshold falls with the
        number, and the number with the threshold, so both settle, mostly at once.
        """
        if far is not None:
            return far, calibration.threshold_at(far)
        if self.num_people is not None:
            # Only short speakers need a threshold, and are unknown without one.
            if not calibration.threshold_at_far:
                return None, None
            return choose_threshold(calibration, self.num_people)
        rate, threshold = choose_threshold(calibration, len(self.speakers))
        for _ in range(MAX_ROUNDS):
            group_N = self.groups(threshold)
            unknown = _unknown_groups(self.speakers, group_N, self.min_seconds)
            num_people = int(group_N.max()) + 1 - len(unknown)
            rate, lower_threshold = choose_threshold(calibration, num_people)
            if lower_threshold >= threshold:
                break
            threshold = lower_threshold
        return rate, threshold

    def groups(self, threshold: float | None) -> NDArray[np.int64]:
        """Return group_N: first of those with enough speech, then the others join them."""
        is_known_N = np.array([bool(speaker.known_as) for speaker in self.speakers])
        is_long_N = (self.seconds_N >= self.min_seconds) | is_known_N
        long_rows = np.flatnonzero(is_long_N)
        short_rows = np.flatnonzero(~is_long_N)
        if self.num_people is not None:
            _check_number(self.speakers, long_rows, self.num_people)

        # Speakers of one enrolled name are one group from the start.
        start_of: dict[Any, int] = {}
        start: list[int] = []
        for row in long_rows.tolist():
            speaker = self.speakers[row]
            name = speaker.known_as or speaker.key
            start.append(start_of.setdefault(name, len(start_of)))
        group_N = np.arange(len(self.speakers)) + len(self.speakers)
        if len(long_rows):
            group_N[long_rows] = link_speakers(
                self.unit_ND[long_rows],
                self.seconds_N[long_rows],
                csr_array(self.apart[long_rows]),
                # Without a threshold, the number alone decides, and this value is not used.
                threshold=1.0 if threshold is None else threshold,
                start_N=np.array(start),
                num_groups=self.num_people,
            )
            if threshold is not None and len(short_rows):
                _attach(
                    short_rows,
                    long_rows,
                    group_N,
                    self.unit_ND,
                    self.seconds_N,
                    self.apart,
                    threshold,
                )
        # Numbered in order of appearance.
        _, first_N, number_N = np.unique(
            group_N, return_index=True, return_inverse=True
        )
        return np.argsort(np.argsort(first_N))[number_N]


def _check_speakers(speakers: Sequence[LocalSpeaker]) -> None:
    """Raise ValueError, one line, for speakers that cannot be compared."""
    seen: set[Key] = set()
    for speaker in speakers:
        where = f"{speaker.recording}: {speaker.name}"
        _check_embedding(speaker, where=where)
        if speaker.emb_D.shape != speakers[0].emb_D.shape:
            raise ValueError(
                f"{where}: has an embedding of {len(speaker.emb_D)} dimensions, others of"
                f" {len(speakers[0].emb_D)}; use one model"
            )
        if not 0 < speaker.seconds < np.inf:
            raise ValueError(
                f"{where}: has {speaker.seconds} seconds of speech; must be above 0"
            )
        if speaker.key in seen:
            raise ValueError(f"{where}: is given twice; give each speaker once")
        seen.add(speaker.key)
    recordings = {speaker.recording for speaker in speakers}
    refuse_twins(recordings, where="link", kind="recordings")


def _check_embedding(speaker: LocalSpeaker, *, where: str) -> None:
    """Raise ValueError unless an embedding is a finite vector with a direction."""
    emb_D = speaker.emb_D
    if emb_D.ndim != 1 or not np.isfinite(emb_D).all() or not emb_D.any():
        raise ValueError(
            f"{where}: the embedding of {speaker.name} is empty, zero or not finite;"
            f" {AGAIN}"
        )


def _apart(
    speakers: Sequence[LocalSpeaker], *, allow_same_recording: bool
) -> csr_array:
    """Return the sparse matrix (N, R + 1): speakers with a common column are different people."""
    rows: list[int] = []
    columns: list[int] = []
    # Speakers with the name of an enrolled one share a column; those of one name are one group.
    number_of: dict[str, int] = {}
    for row, speaker in enumerate(speakers):
        if speaker.known_as:
            rows.append(row)
            columns.append(0)
        number = number_of.setdefault(speaker.recording, len(number_of) + 1)
        if not allow_same_recording:
            rows.append(row)
            columns.append(number)
    shape = (len(speakers), len(number_of) + 1)
    values = np.ones(len(rows))
    return coo_array((values, (rows, columns)), shape=shape).tocsr()


def _check_number(
    speakers: Sequence[LocalSpeaker], long_rows: np.ndarray, num_people: int
) -> None:
    """Raise ValueError if a recording has more speakers than there are people."""
    if num_people < 1:
        raise ValueError(f"speakers: must be at least 1, got {num_people}")
    count_in: dict[str, int] = {}
    for row in long_rows.tolist():
        recording = speakers[row].recording
        count_in[recording] = count_in.get(recording, 0) + 1
    for recording, count in count_in.items():
        if count > num_people:
            raise ValueError(
                f"speakers: {num_people} requested, but {recording} alone has {count};"
                " raise the number, or diarize it with fewer"
            )


def _attach(
    short_rows: np.ndarray,
    long_rows: np.ndarray,
    group_N: NDArray[np.int64],
    unit_ND: np.ndarray,
    seconds_N: np.ndarray,
    apart: csr_array,
    threshold: float,
) -> None:
    """Give short speakers the group with the highest mean cosine that reaches the threshold."""
    mean_GD, _ = weighted_means(
        unit_ND[long_rows], seconds_N[long_rows], group_N[long_rows]
    )
    cosine_SG = unit_ND[short_rows] @ mean_GD.T
    places, groups = np.nonzero(cosine_SG >= threshold)
    # The most similar pair first: two short speakers of a recording may want the same group.
    order = np.argsort(-cosine_SG[places, groups], kind="stable")
    columns_of: dict[int, set[int]] = {}
    for row in long_rows.tolist():
        columns = columns_of.setdefault(int(group_N[row]), set())
        columns.update(apart[[row]].indices.tolist())
    for place, group in zip(places[order].tolist(), groups[order].tolist()):
        row = int(short_rows[place])
        columns = set(apart[[row]].indices.tolist())
        is_attached = group_N[row] < len(group_N)
        if not is_attached and not columns & columns_of[group]:
            group_N[row] = group
            columns_of[group] |= columns


def _unknown_groups(
    speakers: Sequence[LocalSpeaker], group_N: NDArray[np.int64], min_seconds: float
) -> set[int]:
    """Return the groups of a single short speaker, who is not known."""
    count_G = np.bincount(group_N)
    unknown: set[int] = set()
    for speaker, group in zip(speakers, group_N.tolist()):
        is_short = speaker.seconds < min_seconds and not speaker.known_as
        if is_short and count_G[group] == 1:
            unknown.add(group)
    return unknown


def _name_enrolled(
    speakers: Sequence[LocalSpeaker],
    group_N: NDArray[np.int64],
    mean_GD: np.ndarray,
    model: Model,
    threshold: float | None,
) -> dict[int, str]:
    """Return the names of groups after enrolled speakers: given already, or found by the model."""
    enrolled: dict[int, str] = {}
    for speaker, group in zip(speakers, group_N.tolist()):
        if speaker.known_as:
            enrolled[group] = speaker.known_as
    if model is None:
        return enrolled
    embeddings: dict[str, np.ndarray] = {}
    for group, mean_D in enumerate(mean_GD):
        if group not in enrolled:
            embeddings[str(group)] = mean_D
    given = set(enrolled.values())
    matches = match_enrolled(embeddings, model, threshold=threshold)
    for group, match in matches.items():
        name = one_word(match.name)
        if match.is_known and name not in given:
            enrolled[int(group)] = name
    return enrolled


def _name_groups(
    speakers: Sequence[LocalSpeaker],
    group_N: NDArray[np.int64],
    *,
    unknown: set[int],
    enrolled: Mapping[int, str],
    earlier: Mapping[Key, str],
    last_numbers: Mapping[str, int],
) -> tuple[list[str], dict[str, int]]:
    """Return the name of each group, and the last numbers in use: earlier names are kept."""
    num_groups = int(group_N.max()) + 1
    kind_of = [UNKNOWN if group in unknown else IDENTITY for group in range(num_groups)]
    common: dict[tuple[int, str], float] = {}  # group, earlier name -> seconds
    for speaker, group in zip(speakers, group_N.tolist()):
        name = earlier.get(speaker.key, "")
        if re.fullmatch(rf"{kind_of[group]}\d+", name):
            pair = (group, name)
            common[pair] = common.get(pair, 0.0) + speaker.seconds
    names = dict(enrolled)
    taken = set(enrolled.values())
    # The sort is stable: of equal seconds, the first in order of appearance.
    for group, name in sorted(common, key=lambda pair: -common[pair]):
        if group not in names and name not in taken:
            names[group] = name
            taken.add(name)

    numbers = {IDENTITY: 0, UNKNOWN: 0, **last_numbers}
    for name in earlier.values():
        match = re.fullmatch(rf"({IDENTITY}|{UNKNOWN})(\d+)", name)
        if match:
            numbers[match[1]] = max(numbers[match[1]], int(match[2]))
    for group in range(num_groups):
        kind = kind_of[group]
        while group not in names:
            numbers[kind] += 1
            name = f"{kind}{numbers[kind]}"
            # An enrolled speaker may have such a name.
            if name not in taken:
                names[group] = name
    return [names[group] for group in range(num_groups)], numbers


def _members(
    comparison: _Comparison,
    group_N: NDArray[np.int64],
    mean_GD: np.ndarray,
    weight_G: np.ndarray,
) -> list[list[Member]]:
    """Return the members of each group, in the order of the speakers."""
    closeness_N = _closeness(
        comparison.unit_ND, comparison.seconds_N, group_N, mean_GD, weight_G
    )
    members_of: list[list[Member]] = [[] for _ in mean_GD]
    rows = zip(comparison.speakers, group_N.tolist(), closeness_N.tolist())
    for speaker, group, closeness in rows:
        member = Member(
            recording=speaker.recording,
            speaker=speaker.name,
            seconds=speaker.seconds,
            closeness=None if np.isnan(closeness) else closeness,
        )
        members_of[group].append(member)
    return members_of


def _closeness(
    unit_ND: np.ndarray,
    seconds_N: np.ndarray,
    group_N: NDArray[np.int64],
    mean_GD: np.ndarray,
    weight_G: np.ndarray,
) -> NDArray[np.float64]:
    """Return the mean cosine with the others of the group, (N), NaN without others."""
    with_mean_N = np.einsum("nd,nd->n", unit_ND, mean_GD[group_N])
    # Without the cosine of a speaker with itself, which is 1.
    others_N = weight_G[group_N] - seconds_N
    with_others_N = weight_G[group_N] * with_mean_N - seconds_N
    is_alone_N = np.bincount(group_N)[group_N] == 1
    return np.where(
        is_alone_N, np.nan, with_others_N / np.where(is_alone_N, 1, others_N)
    )


def _doubtful(
    mean_GD: np.ndarray,
    apart: csr_array,
    group_N: NDArray[np.int64],
    names: Sequence[str],
    threshold: float,
) -> list[DoubtfulPair]:
    """Return the most similar pairs of identities that are near the threshold or above it."""
    lowest = threshold - DOUBTFUL_COSINE
    places = np.zeros((0, 2), dtype=np.int64)
    values = np.zeros(0, dtype=np.float32)
    for start, cosine_BG in cosine_blocks(mean_GD):
        # Each pair once, in the triangle above the diagonal.
        firsts, seconds = np.nonzero(np.triu(cosine_BG, k=1) >= max(lowest, 1e-6))
        places = np.concatenate([places, start + np.stack([firsts, seconds], axis=1)])
        values = np.concatenate([values, cosine_BG[firsts, seconds]])
        order = np.argsort(-values, kind="stable")[:MAX_DOUBTFUL]
        places, values = places[order], values[order]

    membership = coo_array(
        (np.ones(len(group_N)), (group_N, np.arange(len(group_N)))),
        shape=(len(names), len(group_N)),
    ).tocsr()
    columns = csr_array(membership @ apart)
    pairs: list[DoubtfulPair] = []
    for (first, second), closeness in zip(places.tolist(), values.tolist()):
        shared = set(columns[[first]].indices) & set(columns[[second]].indices)
        pairs.append(DoubtfulPair(names[first], names[second], closeness, bool(shared)))
    return pairs
