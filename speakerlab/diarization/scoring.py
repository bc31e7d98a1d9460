"""Diarization and Jaccard error rate: turns of a reference and of a hypothesis in, errors out.

Equal to NIST's md-eval-22.pl: speakers are mapped on all regions to score, and only then the collar
and, if asked, overlapped speech are left out. The Jaccard error rate (Ryant et al., "The Second
DIHARD Diarization Challenge", 2019) is that of dscore: on frames of 10 ms, never with a collar, and
all speakers of all recordings weigh alike in a total.

Letters: S speakers of the reference, H of the hypothesis, K pieces of time between two bounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from speakerlab.core.faults import Faults
from speakerlab.diarization.regions import Region, Turn, merge_turns


@dataclass(frozen=True)
class Errors:
    """Errors of a recording or of several, in seconds of speaker time."""

    scored: float  # of the reference; two who speak at once count twice
    missed: float
    false_alarm: float
    confusion: float
    jaccard: tuple[float, ...]  # Jaccard error of each speaker of the reference
    num_speakers: int  # of the reference
    num_found: int  # of the hypothesis
    speech: float  # seconds with speech in the reference, collars and overlap included
    overlapped: float  # seconds of them in which two or more speak

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(**{name: value + getattr(other, name) for name, value in vars(self).items()})

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
        return sum(self.jaccard) / len(self.jaccard) if self.jaccard else None

    @property
    def overlap(self) -> float:
        """Return the share of the speech in which two or more speak; 0 without speech."""
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

    regions: what to score, by default the extent of both. collar: seconds before and after each
    bound of a reference turn that are not scored. skip_overlap: leave out where two or more
    speakers of the reference speak. Overlapping turns of one speaker are merged.
    """
    pieces = _cut(reference, hypothesis, regions, collar=collar, skip_overlap=skip_overlap)
    bounds_K, seconds_K, scored_K, ref_SK, hyp_HK, num_correct_K = pieces
    frames_K = np.diff(np.ceil(np.round(bounds_K * 100, 6))) * (seconds_K > 0)  # of 10 ms
    num_ref_K, num_hyp_K = ref_SK.sum(axis=0), hyp_HK.sum(axis=0)
    return Errors(
        scored=float(scored_K @ num_ref_K),
        missed=float(scored_K @ np.maximum(num_ref_K - num_hyp_K, 0)),
        false_alarm=float(scored_K @ np.maximum(num_hyp_K - num_ref_K, 0)),
        confusion=float(scored_K @ (np.minimum(num_ref_K, num_hyp_K) - num_correct_K)),
        jaccard=_jaccard_errors(ref_SK, hyp_HK, frames_K),
        num_speakers=int(np.count_nonzero(ref_SK @ seconds_K)),
        num_found=int(np.count_nonzero(hyp_HK @ seconds_K)),
        speech=float(seconds_K @ (num_ref_K > 0)),
        overlapped=float(seconds_K @ (num_ref_K > 1)),
    )


def errors_by_minute(
    reference: Sequence[Turn],
    hypothesis: Sequence[Turn],
    *,
    regions: Sequence[Region] | None = None,
    **protocol: Any,
) -> NDArray[np.float64]:
    """Return the seconds of errors in each minute of a recording. protocol: of `score`."""
    pieces = _cut(reference, hypothesis, regions, **protocol)
    bounds_K, _, scored_K, ref_SK, hyp_HK, num_correct_K = pieces
    wrong_K = scored_K * (np.maximum(ref_SK.sum(axis=0), hyp_HK.sum(axis=0)) - num_correct_K)
    if not len(bounds_K):
        return np.zeros(0)
    edges = np.arange(0.0, bounds_K[-1] + 60.0, 60.0)
    return np.diff(np.interp(edges, bounds_K, np.append(0.0, wrong_K.cumsum())))


def _cut(
    reference: Sequence[Turn],
    hypothesis: Sequence[Turn],
    regions: Sequence[Region] | None,
    *,
    collar: float = 0.0,
    skip_overlap: bool = False,
) -> tuple[np.ndarray, ...]:
    """Cut time at all bounds; return them and, of each piece between two, five facts.

    Its seconds within the regions, those of them that are scored, who speaks in the reference
    (S, K) and in the hypothesis (H, K), and how many of them are mapped to each other.
    """
    ref_S, hyp_H = _by_speaker(reference), _by_speaker(hypothesis)
    if regions is None:
        regions = extent([*reference, *hypothesis])
    bounds = [bound for spoken in ref_S for region in spoken for bound in region]
    near = [(bound - collar, bound + collar) for bound in bounds] if collar else []
    groups = [*ref_S, *hyp_H, regions, near]
    bounds_K = np.unique([bound for group in groups for region in group for bound in region])
    ref_SK, hyp_HK = _active(ref_S, bounds_K), _active(hyp_H, bounds_K)
    in_region_K, near_K = _active([regions, near], bounds_K)
    seconds_K = np.diff(bounds_K) * in_region_K
    speakers_S, found_S = linear_sum_assignment((ref_SK * seconds_K) @ hyp_HK.T, maximize=True)
    num_correct_K = (ref_SK[speakers_S] & hyp_HK[found_S]).sum(axis=0)
    scored_K = seconds_K * ~near_K * (ref_SK.sum(axis=0) < 2 if skip_overlap else 1)
    return bounds_K, seconds_K, scored_K, ref_SK, hyp_HK, num_correct_K


def score_recordings(
    reference: Mapping[str, Sequence[Turn]],
    hypothesis: Mapping[str, Sequence[Turn]],
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    **protocol: Any,
) -> dict[str, Errors]:
    """Score the recordings of the reference, and those of the hypothesis that have regions.

    protocol: of `score`. A recording that the hypothesis lacks is missed. Raises ValueError for
    others that the reference lacks, and, if regions are given, for those of the reference that have
    none.
    """
    faults, known = Faults(), reference.keys() | (regions or {}).keys()
    for name in sorted(hypothesis.keys() - known):
        faults.add(
            "unknown recordings",
            f"{name}: is in the hypothesis, not in the reference; add its reference or remove it",
        )
    for name in sorted(reference.keys() - regions.keys()) if regions is not None else ():
        faults.add(
            "recordings without regions",
            f"{name}: is in the reference, but has no regions to score; add them to the UEM file, "
            "or remove the recording",
        )
    faults.raise_if_any()
    scored = sorted(reference.keys() | (hypothesis.keys() & known))
    own = dict.fromkeys(scored) if regions is None else regions
    return {
        name: score(
            reference.get(name, ()), hypothesis.get(name, ()), regions=own[name], **protocol
        )
        for name in scored
    }


def total(errors: Iterable[Errors]) -> Errors:
    """Return the errors of several recordings, of at least one, together."""
    return reduce(add, errors)


def extent(turns: Iterable[Turn]) -> list[Region]:
    """Return one region from the first start to the last end; none without turns."""
    turns = list(turns)
    return [(min(turn.start for turn in turns), max(turn.end for turn in turns))] if turns else []


def _by_speaker(turns: Iterable[Turn]) -> list[list[Region]]:
    regions: dict[str, list[Region]] = {}
    for start, end, speaker in merge_turns(turns)[0]:
        regions.setdefault(speaker, []).append((start, end))
    return list(regions.values())


def _active(groups: Sequence[Sequence[Region]], bounds_K: np.ndarray) -> NDArray[np.bool_]:
    """Return which pieces lie in a region of each group, (groups, K)."""
    change = np.zeros((len(groups), len(bounds_K)), dtype=np.int32)
    for row, regions in zip(change, groups):
        for side, step in ((0, 1), (1, -1)):
            np.add.at(row, np.searchsorted(bounds_K, [region[side] for region in regions]), step)
    return change.cumsum(axis=1)[:, :-1] > 0


def _jaccard_errors(
    ref_SK: np.ndarray, hyp_HK: np.ndarray, frames_K: np.ndarray
) -> tuple[float, ...]:
    """Return 1 - intersection / union, in frames, of each speaker and the one mapped to them."""
    ref_SK = ref_SK[ref_SK @ frames_K > 0]
    joint_SH = (ref_SK * frames_K) @ hyp_HK.T
    union_SH = (ref_SK @ frames_K)[:, None] + hyp_HK @ frames_K - joint_SH
    errors_SH, errors_S = 1 - joint_SH / union_SH, np.ones(len(ref_SK))
    speakers_S, found_S = linear_sum_assignment(errors_SH)
    errors_S[speakers_S] = errors_SH[speakers_S, found_S]
    return tuple(errors_S.tolist())
