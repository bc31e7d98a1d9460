"""One identity over many recordings: which speakers of diarized recordings are the same person.

Speakers with embeddings (diarized_speakers.py) -> groups (diarization/linking.py) -> names
(identity_names.py).
Letters: N speakers of recordings, G identities, R recordings, P pairs of identities, D embedding
dimensions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from speakerlab.core.reading import refuse_twins
from speakerlab.diarization.clustering import number_by_appearance
from speakerlab.diarization.linking import (
    MIN_SECONDS,
    cosine_blocks,
    link_speakers,
    weighted_means,
)
from speakerlab.diarization.regions import Turn
from speakerlab.inference.diarized_speakers import (
    Key,
    LocalSpeaker,
    Result,
    check_embedding,
    read_result,
    speakers_of,
)
from speakerlab.inference.identity_names import name_enrolled, name_groups
from speakerlab.inference.known_speakers import Model, check_enrolled
from speakerlab.scoring.calibration import Calibration

# `Key`, `LocalSpeaker`, `Result`, `read_result` and `speakers_of` are for callers of `link`.
__all__ = [
    "DoubtfulPair",
    "Identity",
    "Key",
    "Linked",
    "LocalSpeaker",
    "Member",
    "Result",
    "choose_threshold",
    "link",
    "read_result",
    "speakers_of",
]

# A pair of people is doubtful if its cosine is less than this below the threshold.
DOUBTFUL_COSINE = 0.1
# With so many others, a person is expected to reach the threshold by chance.
FALSE_ALARMS_PER_PERSON = 0.05
MAX_ROUNDS = 5  # of choosing the threshold for the number of people
MAX_DOUBTFUL = 1000  # pairs, the most similar ones


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
    names, numbers = name_groups(
        speakers,
        group_N,
        unknown=unknown,
        enrolled=name_enrolled(speakers, group_N, mean_GD, model, threshold),
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
    """Raise ValueError if nothing decides, or `far` stands beside another threshold."""
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
        """Group the speakers with enough speech, then let the others join them; return group_N."""
        is_known_N = np.array([bool(speaker.known_as) for speaker in self.speakers])
        is_long_N = (self.seconds_N >= self.min_seconds) | is_known_N
        long_rows = np.flatnonzero(is_long_N)
        short_rows = np.flatnonzero(~is_long_N)
        if self.num_people is not None:
            _check_number(self.speakers, long_rows, self.num_people)

        # Who is in no group is alone: the numbers from N on are of no group of `link_speakers`.
        num_speakers = len(self.speakers)
        group_N = num_speakers + np.arange(num_speakers)
        if len(long_rows):
            group_N[long_rows] = link_speakers(
                self.unit_ND[long_rows],
                self.seconds_N[long_rows],
                csr_array(self.apart[long_rows]),
                # Without a threshold, the number alone decides, and this value is not used.
                threshold=1.0 if threshold is None else threshold,
                start_N=self._start_groups(long_rows),
                num_groups=self.num_people,
            )
            if threshold is not None and len(short_rows):
                self._attach_short(short_rows, long_rows, group_N, threshold)
        return number_by_appearance(group_N)

    def _start_groups(self, rows: np.ndarray) -> NDArray[np.int64]:
        """Return the groups to begin with: one for each enrolled name and each other speaker."""
        group_of: dict[str | Key, int] = {}
        groups: list[int] = []
        for row in rows.tolist():
            speaker = self.speakers[row]
            person = speaker.known_as or speaker.key
            group = group_of.setdefault(person, len(group_of))
            groups.append(group)
        return np.array(groups)

    def _attach_short(
        self,
        short_rows: np.ndarray,
        long_rows: np.ndarray,
        group_N: NDArray[np.int64],
        threshold: float,
    ) -> None:
        """Give short speakers the group with the highest mean cosine that reaches the threshold.

        group_N is changed in place; a short speaker that joins no group keeps its number from N on.
        """
        mean_GD, _ = weighted_means(
            self.unit_ND[long_rows],
            self.seconds_N[long_rows],
            group_N[long_rows],
        )
        # Of S short speakers. The most similar pair comes first: two of a recording may want the
        # same group.
        cosine_SG = self.unit_ND[short_rows] @ mean_GD.T
        places, groups = np.nonzero(cosine_SG >= threshold)
        best_first = np.argsort(-cosine_SG[places, groups], kind="stable")

        # A speaker may not join a group that has one of its columns of `apart`.
        columns_of_group: dict[int, set[int]] = {}
        for row in long_rows.tolist():
            columns = columns_of_group.setdefault(int(group_N[row]), set())
            columns.update(self._columns(row))
        for pair in best_first.tolist():
            row = int(short_rows[places[pair]])
            group = int(groups[pair])
            columns = self._columns(row)
            is_attached = group_N[row] < len(group_N)
            if not is_attached and columns.isdisjoint(columns_of_group[group]):
                group_N[row] = group
                columns_of_group[group] |= columns

    def _columns(self, row: int) -> set[int]:
        """Return the columns of `apart` that a speaker has."""
        return set(self.apart[[row]].indices.tolist())


def _check_speakers(speakers: Sequence[LocalSpeaker]) -> None:
    """Raise ValueError, one line, for speakers that cannot be compared."""
    seen: set[Key] = set()
    for speaker in speakers:
        where = f"{speaker.recording}: {speaker.name}"
        check_embedding(speaker, where=where)
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


def _apart(
    speakers: Sequence[LocalSpeaker], *, allow_same_recording: bool
) -> csr_array:
    """Return the sparse matrix (N, R + 1): speakers with a common column are different people.

    Column 0 is of the speakers with the name of an enrolled one (those of one name are one group
    already), the others are of the recordings.
    """
    rows: list[int] = []
    columns: list[int] = []
    column_of: dict[str, int] = {}
    for row, speaker in enumerate(speakers):
        if speaker.known_as:
            rows.append(row)
            columns.append(0)
        column = column_of.setdefault(speaker.recording, len(column_of) + 1)
        if not allow_same_recording:
            rows.append(row)
            columns.append(column)
    shape = (len(speakers), len(column_of) + 1)
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
    """Return the mean cosine with the others of the group, (N), NaN without others.

    Weighted by seconds. For example, a speaker of 10 s in a group of 30 s has the mean cosine 0.8
    with all of it: a sum of 24. Without the cosine with itself, 1 for 10 s, 14 remain for the 20 s
    of the others: 0.7.
    """
    with_all_N = np.einsum("nd,nd->n", unit_ND, mean_GD[group_N])
    group_seconds_N = weight_G[group_N]
    sum_of_others_N = group_seconds_N * with_all_N - seconds_N
    seconds_of_others_N = group_seconds_N - seconds_N

    is_alone_N = np.bincount(group_N)[group_N] == 1
    divisor_N = np.where(is_alone_N, 1, seconds_of_others_N)
    return np.where(is_alone_N, np.nan, sum_of_others_N / divisor_N)


def _doubtful(
    mean_GD: np.ndarray,
    apart: csr_array,
    group_N: NDArray[np.int64],
    names: Sequence[str],
    threshold: float,
) -> list[DoubtfulPair]:
    """Return the most similar pairs of identities that are near the threshold or above it."""
    # The columns of `apart` that a group has by any of its speakers.
    num_speakers = len(group_N)
    speaker_N = np.arange(num_speakers)
    ones_N = np.ones(num_speakers)
    member_GN = coo_array(
        (ones_N, (group_N, speaker_N)),
        shape=(len(names), num_speakers),
    ).tocsr()
    apart_of_groups = csr_array(member_GN @ apart)
    pairs: list[DoubtfulPair] = []
    for first, second, closeness in _similar_pairs(mean_GD, threshold):
        first_columns = set(apart_of_groups[[first]].indices)
        second_columns = set(apart_of_groups[[second]].indices)
        pair = DoubtfulPair(
            first=names[first],
            second=names[second],
            closeness=closeness,
            is_apart=not first_columns.isdisjoint(second_columns),
        )
        pairs.append(pair)
    return pairs


def _similar_pairs(
    mean_GD: np.ndarray, threshold: float
) -> list[tuple[int, int, float]]:
    """Return the pairs of groups with a cosine near the threshold or above it, and this cosine.

    At most MAX_DOUBTFUL pairs, the most similar first.
    """
    # Above 0, which `np.triu` puts into the other triangle.
    lowest_cosine = max(threshold - DOUBTFUL_COSINE, 1e-6)
    pair_P2 = np.zeros((0, 2), dtype=np.int64)
    cosine_P = np.zeros(0, dtype=np.float32)
    for start, cosine_BG in cosine_blocks(mean_GD):
        # Each pair once, in the triangle above the diagonal. A block has the groups from `start`
        # on, in its rows and in its columns.
        upper_BG = np.triu(cosine_BG, k=1)
        rows, columns = np.nonzero(upper_BG >= lowest_cosine)
        new_pairs = start + np.stack([rows, columns], axis=1)
        pair_P2 = np.concatenate([pair_P2, new_pairs])
        cosine_P = np.concatenate([cosine_P, cosine_BG[rows, columns]])
        # Only the most similar so far, so that memory stays small.
        order = np.argsort(-cosine_P, kind="stable")[:MAX_DOUBTFUL]
        pair_P2 = pair_P2[order]
        cosine_P = cosine_P[order]
    pairs: list[tuple[int, int, float]] = []
    for (first, second), cosine in zip(pair_P2.tolist(), cosine_P.tolist()):
        pairs.append((first, second, cosine))
    return pairs
