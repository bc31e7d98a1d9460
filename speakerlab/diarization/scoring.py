"""Diarization and Jaccard error rate. In: turns of reference and hypothesis. Out: errors.

The DER equals NIST's md-eval-22.pl: speakers are mapped on all regions to score; only then the
collar and, on request, overlapped speech are left out. The Jaccard error rate (Ryant et al., "The
Second DIHARD Diarization Challenge", 2019) equals dscore's: it is computed on frames of 10 ms,
always without a collar, and all speakers of all recordings have equal weights in a total.

Letters: S speakers of the reference, H of the hypothesis, K pieces of time between two bounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speakerlab.core.faults import Faults
from speakerlab.diarization.regions import Region, Turn, merge_turns


@dataclass(frozen=True)
class Errors:
    """Errors of one or more recordings, in seconds of speaker time."""

    scored: float  # speaker time of the reference; overlapped speech counts once per speaker
    missed: float
    false_alarm: float
    confusion: float
    jaccard: tuple[float, ...]  # Jaccard error of each speaker of the reference
    num_speakers: int  # in the reference
    num_found: int  # in the hypothesis
    speech: float  # seconds with speech in the reference, collars and overlap included
    overlapped: float  # the part of `speech` with two or more speakers

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(
            scored=self.scored + other.scored,
            missed=self.missed + other.missed,
            false_alarm=self.false_alarm + other.false_alarm,
            confusion=self.confusion + other.confusion,
            # Concatenate the tuples of speakers.
            jaccard=self.jaccard + other.jaccard,
            num_speakers=self.num_speakers + other.num_speakers,
            num_found=self.num_found + other.num_found,
            speech=self.speech + other.speech,
            overlapped=self.overlapped + other.overlapped,
        )

    @property
    def wrong(self) -> float:
        return self.missed + self.false_alarm + self.confusion

    @property
    def der(self) -> float | None:
        """Return the diarization error rate, which can exceed 1; None if no speech is scored."""
        return self.wrong / self.scored if self.scored else None

    @property
    def jer(self) -> float | None:
        """Return the Jaccard error rate, from 0 to 1; None without speech in the reference."""
        if not self.jaccard:
            return None
        return sum(self.jaccard) / len(self.jaccard)

    @property
    def overlap(self) -> float:
        """Return the share of the speech with two or more speakers; 0 without speech."""
        return self.overlapped / self.speech if self.speech else 0.0


def score(
    reference: Sequence[Turn],
    hypothesis: Sequence[Turn],
    *,
    regions: Sequence[Region] | None = None,
    collar: float = 0.0,
    skip_overlap: bool = False,
) -> Errors:
    """Score the turns of one recording.

    regions: the regions to score, by default the extent of both. collar: seconds before and after
    each bound of a reference turn that are not scored. skip_overlap: do not score times with two or
    more speakers in the reference. Overlapping turns of one speaker are merged.
    """
    pieces = _cut_time(
        reference,
        hypothesis,
        regions,
        collar=collar,
        skip_overlap=skip_overlap,
    )
    num_ref_K = pieces.ref_SK.sum(axis=0)
    num_hyp_K = pieces.hyp_HK.sum(axis=0)

    # In a piece, the difference in the number of speakers counts as missed or false alarms; the
    # other speakers are correct or confused.
    num_missed_K = np.maximum(num_ref_K - num_hyp_K, 0)
    num_false_K = np.maximum(num_hyp_K - num_ref_K, 0)
    num_paired_K = np.minimum(num_ref_K, num_hyp_K)
    num_confused_K = num_paired_K - pieces.num_correct_K

    # Number of 10 ms frames that start in a piece; round first, so that 0.07 s is frame 7, not 8.
    seconds_K = pieces.seconds_K
    frame_bounds = np.ceil(np.round(pieces.bounds * 100, 6))
    is_in_region_K = seconds_K > 0
    frames_K = np.diff(frame_bounds) * is_in_region_K

    # Speaking time within the regions to score.
    ref_seconds_S = pieces.ref_SK @ seconds_K
    hyp_seconds_H = pieces.hyp_HK @ seconds_K

    scored_K = pieces.scored_K
    return Errors(
        scored=float(scored_K @ num_ref_K),
        missed=float(scored_K @ num_missed_K),
        false_alarm=float(scored_K @ num_false_K),
        confusion=float(scored_K @ num_confused_K),
        jaccard=_jaccard_errors(pieces.ref_SK, pieces.hyp_HK, frames_K),
        num_speakers=int(np.count_nonzero(ref_seconds_S)),
        num_found=int(np.count_nonzero(hyp_seconds_H)),
        speech=float(seconds_K @ (num_ref_K > 0)),
        overlapped=float(seconds_K @ (num_ref_K > 1)),
    )


def errors_by_minute(
    reference: Sequence[Turn],
    hypothesis: Sequence[Turn],
    *,
    regions: Sequence[Region] | None = None,
    collar: float = 0.0,
    skip_overlap: bool = False,
) -> NDArray[np.float64]:
    """Return the seconds of errors in each minute of a recording; parameters as for `score`."""
    pieces = _cut_time(
        reference,
        hypothesis,
        regions,
        collar=collar,
        skip_overlap=skip_overlap,
    )
    bounds = pieces.bounds
    if not len(bounds):
        return np.zeros(0)
    # Sum of misses, false alarms and confusions: the larger number minus the correct speakers.
    num_ref_K = pieces.ref_SK.sum(axis=0)
    num_hyp_K = pieces.hyp_HK.sum(axis=0)
    num_wrong_K = np.maximum(num_ref_K, num_hyp_K) - pieces.num_correct_K
    wrong_K = pieces.scored_K * num_wrong_K

    # Cumulative errors: within a piece, they grow linearly.
    wrong_until = np.append(0.0, wrong_K.cumsum())
    minutes = np.arange(0.0, bounds[-1] + 60.0, 60.0)
    wrong_until_minute = np.interp(minutes, bounds, wrong_until)
    return np.diff(wrong_until_minute)


class _Pieces(NamedTuple):
    """Pieces of time with constant speakers and constant scoring."""

    bounds: np.ndarray  # seconds; (K + 1), or empty if there is nothing to cut
    seconds_K: np.ndarray  # within the regions to score
    # The seconds that are also outside collars and skipped overlap.
    scored_K: np.ndarray
    ref_SK: NDArray[np.bool_]  # speakers active in the reference
    hyp_HK: NDArray[np.bool_]  # speakers active in the hypothesis
    # Number of active speakers of the reference whose mapped speaker is also active.
    num_correct_K: np.ndarray


def _cut_time(
    reference: Sequence[Turn],
    hypothesis: Sequence[Turn],
    regions: Sequence[Region] | None,
    *,
    collar: float,
    skip_overlap: bool,
) -> _Pieces:
    """Cut time at all bounds of turns, regions and collars, and map the speakers."""
    ref_S = _regions_by_speaker(reference)
    hyp_H = _regions_by_speaker(hypothesis)
    if regions is None:
        regions = extent([*reference, *hypothesis])
    collars: list[Region] = []
    if collar:
        for time in _bounds_of(ref_S):
            collars.append((time - collar, time + collar))
    all_bounds = _bounds_of([*ref_S, *hyp_H, regions, collars])
    bounds = np.unique(all_bounds)

    ref_SK = _find_active(ref_S, bounds)
    hyp_HK = _find_active(hyp_H, bounds)
    in_region_K, in_collar_K = _find_active([regions, collars], bounds)
    seconds_K = np.diff(bounds) * in_region_K

    # Map speakers before collars and overlap are left out, as md-eval does.
    shared_SH = (ref_SK * seconds_K) @ hyp_HK.T
    rows, columns = _assign(shared_SH, maximize=True)
    is_correct_SK = ref_SK[rows] & hyp_HK[columns]

    scored_K = seconds_K * ~in_collar_K
    if skip_overlap:
        num_ref_K = ref_SK.sum(axis=0)
        scored_K = scored_K * (num_ref_K < 2)
    return _Pieces(
        bounds=bounds,
        seconds_K=seconds_K,
        scored_K=scored_K,
        ref_SK=ref_SK,
        hyp_HK=hyp_HK,
        num_correct_K=is_correct_SK.sum(axis=0),
    )


def score_recordings(
    reference: Mapping[str, Sequence[Turn]],
    hypothesis: Mapping[str, Sequence[Turn]],
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    collar: float = 0.0,
    skip_overlap: bool = False,
) -> dict[str, Errors]:
    """Score the recordings of the reference, and recordings of the hypothesis with regions.

    collar, skip_overlap: as for `score`. All speech of a recording without hypothesis counts as
    missed. Raises ValueError for recordings with neither reference nor regions and, if regions are
    given, for recordings of the reference without regions.
    """
    faults = Faults()
    recordings = set(reference)
    if regions is not None:
        recordings |= set(regions)
    unknown_names = hypothesis.keys() - recordings
    for name in sorted(unknown_names):
        faults.add(
            "unknown recordings",
            f"{name}: is in the hypothesis, not in the reference; add its reference or"
            " remove it",
        )
    without_regions: set[str] = set()
    if regions is not None:
        without_regions = reference.keys() - regions.keys()
    for name in sorted(without_regions):
        faults.add(
            "recordings without regions",
            f"{name}: is in the reference, but has no regions to score; add them to the"
            " UEM file, or remove the recording",
        )
    faults.raise_if_any()

    errors: dict[str, Errors] = {}
    # A recording with regions but without reference or hypothesis has nothing to score.
    scored_names = reference.keys() | (hypothesis.keys() & recordings)
    for name in sorted(scored_names):
        errors[name] = score(
            reference.get(name, ()),
            hypothesis.get(name, ()),
            regions=None if regions is None else regions[name],
            collar=collar,
            skip_overlap=skip_overlap,
        )
    return errors


def total(errors: Iterable[Errors]) -> Errors:
    """Return the sum of the errors of one or more recordings."""
    return reduce(add, errors)


def extent(turns: Iterable[Turn]) -> list[Region]:
    """Return one region from the first start to the last end; [] without turns."""
    turns = list(turns)
    if not turns:
        return []
    start = min(turn.start for turn in turns)
    end = max(turn.end for turn in turns)
    return [(start, end)]


def _regions_by_speaker(turns: Iterable[Turn]) -> list[list[Region]]:
    """Return the regions of each speaker, in order of first turns."""
    merged_turns, _num_merged = merge_turns(turns)
    regions_of: dict[str, list[Region]] = {}
    for start, end, speaker in merged_turns:
        regions = regions_of.setdefault(speaker, [])
        regions.append((start, end))
    return list(regions_of.values())


def _bounds_of(groups: Iterable[Iterable[Region]]) -> list[float]:
    """Return the starts and ends of all regions of all groups, in seconds."""
    bounds: list[float] = []
    for regions in groups:
        for region in regions:
            bounds.extend(region)
    return bounds


def _assign(
    weight_SH: NDArray[Any],
    *,
    maximize: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the one-to-one pairs of rows and columns with the smallest or largest sum."""
    # Imported here, because the import takes a third of a second.
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(weight_SH, maximize=maximize)


def _find_active(
    groups: Sequence[Sequence[Region]],
    bounds: np.ndarray,
) -> NDArray[np.bool_]:
    """Return whether each piece is in a region of each group, (groups, K).

    bounds: ascending; they include all starts and ends of the regions.
    """
    # The change of the number of open regions at each bound: +1 for each region that starts there,
    # -1 for each region that ends. The regions 0-2 and 2-5 of one group have, at the bounds 0, 2, 4
    # and 5, the changes 1, 0, 0 and -1; the cumulative sum says that 1 is open in all three pieces.
    change = np.zeros((len(groups), len(bounds)), dtype=np.int32)
    for group, regions in enumerate(groups):
        starts = [start for start, _ in regions]
        ends = [end for _, end in regions]
        start_places = np.searchsorted(bounds, starts)
        end_places = np.searchsorted(bounds, ends)
        # Not `+=`, which counts regions with a common bound only once.
        np.add.at(change[group], start_places, 1)
        np.add.at(change[group], end_places, -1)
    num_open = change.cumsum(axis=1)
    return num_open[:, :-1] > 0  # no piece follows the last bound


def _jaccard_errors(
    ref_SK: np.ndarray,
    hyp_HK: np.ndarray,
    frames_K: np.ndarray,
) -> tuple[float, ...]:
    """Return 1 - intersection / union, in frames, of each reference speaker and its mapped speaker.

    Reference speakers without frames are left out; the error of an unmapped speaker is 1.
    """
    has_frames_S = (ref_SK @ frames_K) > 0
    ref_SK = ref_SK[has_frames_S]
    ref_frames_S = ref_SK @ frames_K
    hyp_frames_H = hyp_HK @ frames_K
    intersection_SH = (ref_SK * frames_K) @ hyp_HK.T
    union_SH = ref_frames_S[:, None] + hyp_frames_H - intersection_SH
    errors_SH = 1 - intersection_SH / union_SH

    rows, columns = _assign(errors_SH)
    errors_S = np.ones(len(ref_SK))
    errors_S[rows] = errors_SH[rows, columns]
    return tuple(errors_S.tolist())
