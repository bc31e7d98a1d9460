"""Recordings that teach nothing about a speaker: silent, short or clipped ones, and copies.

A copy has the samples of another recording. Within a speaker the first of them is kept; if several
speakers have the same recording, nobody knows whose it is, and all are left out.
Letters: S samples, C channels.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from egs.common.corpus.archives import progress_bar
from egs.common.corpus.convert_audio import FILES_PER_TASK, MIN_FILES_FOR_POOL
from speakerlab.core.parallel import map_in_processes
from speakerlab.data import audio, levels
from speakerlab.data.convert import differ_from
from speakerlab.data.tables import one_line

MIN_SECONDS = 0.3
# Half the range of the int16 samples, -78 dB of full scale: dither, or a constant.
SILENT_RANGE = 4
# Clipping cuts the peaks flat: three samples and more in a row at the limit.
MAX_FLAT = 0.005  # of the samples
FLAT_SAMPLES = 3
FLAT_FROM = 1000  # quieter waves have flat peaks because the samples are integers
SILENT, SHORT, CLIPPED = "silent", f"shorter than {MIN_SECONDS:g} s", "clipped"
COPIES, SHARED = "copied", "copied across speakers"


@dataclass(frozen=True)
class Facts:
    """What is known of the samples of a recording."""

    fault: str  # one of the kinds, or ""
    channel: int  # the first that is not silent, from 0
    digest: str  # of the samples of this channel
    differs: bool  # another channel has other sound
    sample_rate: int  # of the file
    doubt: str | None  # why this channel may be no speech


@dataclass
class Unfit:
    """Recordings to leave out, by utterance."""

    reasons: dict[str, str] = field(default_factory=dict)  # one line each
    num_of_kind: Counter[str] = field(default_factory=Counter)
    # Every recording has copies, so that none of them could be kept.
    are_all_copies: bool = False

    def add(self, utterance: str, path: Path, kind: str, reason: str) -> None:
        self.reasons[utterance] = f"{one_line(path)}: {reason}"
        self.num_of_kind[kind] += 1


def find_unfit(
    facts_of: Mapping[str, Facts],
    *,
    sources: Mapping[str, Path],
    speakers: Mapping[str, str],
) -> Unfit:
    """Return the recordings to leave out; all arguments are by utterance."""
    unfit = Unfit()
    utterances_of: dict[str, list[str]] = {}  # digest -> utterances, sorted
    for name in sorted(facts_of):
        facts = facts_of[name]
        if facts.fault:
            unfit.add(name, sources[name], facts.fault, f"is {facts.fault}")
        else:
            utterances_of.setdefault(facts.digest, []).append(name)

    copies = Unfit()
    for utterances in utterances_of.values():
        owners = sorted({speakers[name] for name in utterances})
        first = utterances[0]
        if len(owners) > 1:
            reason = f"is the same recording for the speakers {', '.join(owners)}"
            for name in utterances:
                copies.add(name, sources[name], SHARED, reason)
        else:
            for name in utterances[1:]:
                copies.add(name, sources[name], COPIES, f"is a copy of {first}")
    num_sound = sum(map(len, utterances_of.values()))
    if copies.reasons and len(copies.reasons) == num_sound:
        unfit.are_all_copies = True
        return unfit
    unfit.reasons |= copies.reasons
    unfit.num_of_kind += copies.num_of_kind
    return unfit


def examine_all(
    files: Mapping[str, Path], *, num_jobs: int
) -> tuple[dict[str, Facts], dict[str, str]]:
    """Return (utterance -> facts, utterance -> why it cannot be read)."""
    workers = num_jobs if len(files) >= MIN_FILES_FOR_POOL else 1
    results = map_in_processes(examine, files.values(), workers, chunk=FILES_PER_TASK)
    bar = progress_bar(results, total=len(files), desc="examine", unit=" files")
    facts_of: dict[str, Facts] = {}
    broken: dict[str, str] = {}
    for name, facts in zip(files, bar):
        if isinstance(facts, Facts):
            facts_of[name] = facts
        else:
            broken[name] = facts
    return facts_of, broken


def examine(path: Path) -> Facts | str:
    """Return the facts of a recording, or why it cannot be read, in one line."""
    try:
        with audio.stream(path, all_channels=True) as (rate, blocks):
            wave_SC = np.concatenate(list(blocks) or [audio.NO_SAMPLES[:, None]])
    except (ValueError, OSError) as error:
        return str(error).replace(str(path), one_line(path))
    channel = 0
    fault = fault_of(wave_SC[:, 0], sample_rate=rate)
    while fault == SILENT and channel + 1 < wave_SC.shape[1]:
        channel += 1
        fault = fault_of(wave_SC[:, channel], sample_rate=rate)
    if fault == SILENT:
        channel = 0
    wave_S = np.ascontiguousarray(wave_SC[:, channel])
    doubt = None
    if not fault:
        measured = levels.measure(wave_S, sample_rate=rate)
        doubt = levels.find_fault(wave_S, measured, sample_rate=rate)
    return Facts(
        fault=fault,
        channel=channel,
        digest=hashlib.blake2b(wave_S.tobytes(), digest_size=16).hexdigest(),
        differs=has_other_sound(wave_SC, channel),
        sample_rate=rate,
        doubt=doubt,
    )


def has_other_sound(wave_SC: np.ndarray, channel: int) -> bool:
    """Return whether another channel is more than a louder or quieter copy of this one."""
    wave_CS = wave_SC.T.astype(np.float32) / audio.FULL_SCALE
    differs_C = differ_from(
        channel,
        power_C=np.einsum("cs,cs->c", wave_CS, wave_CS),
        product_C=wave_CS @ wave_CS[channel],
        peak_C=np.abs(wave_CS).max(axis=1, initial=0.0),
    )
    return bool(differs_C.any())


def fault_of(wave_S: np.ndarray, *, sample_rate: int) -> str:
    """Return SILENT, SHORT, CLIPPED or "" for wave_S, int16."""
    if len(wave_S) < MIN_SECONDS * sample_rate:
        return SHORT
    lowest = int(wave_S.min())
    highest = int(wave_S.max())
    if highest - lowest <= 2 * SILENT_RANGE:
        return SILENT
    if max(highest, -lowest) >= FLAT_FROM:
        num_flat = count_flat(wave_S == highest) + count_flat(wave_S == lowest)
        if num_flat > MAX_FLAT * len(wave_S):
            return CLIPPED
    return ""


def count_flat(is_limit_S: np.ndarray) -> int:
    """Return the number of runs of FLAT_SAMPLES samples at a limit; they may overlap."""
    num_starts = max(len(is_limit_S) - FLAT_SAMPLES + 1, 0)
    is_flat = np.ones(num_starts, dtype=bool)
    for shift in range(FLAT_SAMPLES):
        is_flat &= is_limit_S[shift : shift + num_starts]
    return int(np.count_nonzero(is_flat))
