"""Tuning of diarization for a model: its method and the settings of methods, and a PLDA for vbx.

Letters: M windows, D embedding dimensions.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speakerlab.core.bars import progress_bar
from speakerlab.core.counting import count_of
from speakerlab.core.tuning import Tuning
from speakerlab.data.manifest import Piece, read_manifest
from speakerlab.diarization.clustering import build_method, cluster, unit_rows
from speakerlab.diarization.regions import Region, Turn
from speakerlab.diarization.resegmentation import find_segments
from speakerlab.diarization.scoring import score_recordings, total
from speakerlab.diarization.vbx import Vbx
from speakerlab.diarization.windows import WINDOW_SECONDS
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.inference.speech_windows import Read, SpeechWindows, embed_windows
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.plda import Plda, learn_plda
from speakerlab.scoring.transforms import Development

log = logging.getLogger(__name__)
MAX_WINDOWS = 20  # of each speaker, to learn PLDA from
# Speakers of a PLDA. With fewer, vbx is worse with any Fb: docs/diarization.md has the DERs.
MIN_SPEAKERS = 80
# Candidates for ahc: 0.10, 0.15, ..., 0.80.
THRESHOLDS = [number / 20 for number in range(2, 17)]
# Candidates for vbx: the best Fb is larger for a PLDA of fewer speakers.
FBS = [0.5, 1.0, 2.0, 4.0, 8.0]


class WindowPlda(NamedTuple):
    """PLDA of windows of a data directory, and a description of its speakers."""

    plda: Plda
    source: str


def tune(
    model: SpeakerModel,
    recordings: Mapping[str, Any],
    reference: Mapping[str, Sequence[Turn]],
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    source: str,
    plda: Plda | None = None,
    progress: bool = False,
) -> Tuning:
    """Find the method with the lowest DER, the threshold of ahc, and Fb of vbx.

    The DER is computed without a collar and includes overlap; speech is found by energy. If several
    methods have the lowest DER, the first of spectral, ahc and vbx is taken, and of several
    settings the nearest to the default.

    recordings: name -> audio for `diarize`, embedded once.
    reference: name -> its turns.
    regions: name -> the regions to score (None: from the first to the last turn).
    source: name of the recordings, in messages and in the result.
    plda: None leaves out vbx.
    Raises ValueError if a recording is missing, and if the reference has no speech to score.
    """
    missing = reference.keys() - recordings.keys()
    if missing:
        raise ValueError(
            f"{source}: has turns but not the audio of {min(missing)}; add it"
        )
    # Scoring an empty hypothesis rejects regions of unknown recordings before the long computation.
    unscored = score_recordings(reference, {}, regions=regions)
    has_speech = any(errors.scored for errors in unscored.values())
    if not has_speech:
        raise ValueError(f"{source}: has no speech to score; check the turns")

    candidates = _candidates(with_vbx=plda is not None)
    # For each candidate: name of a recording -> the turns that it finds.
    hypotheses: list[dict[str, list[Turn]]] = [{} for _ in candidates]
    names = sorted(reference)
    for name in progress_bar(names, unit="recordings", shown=progress):
        speech = embed_windows(model, recordings[name])
        for candidate, hypothesis in zip(candidates, hypotheses):
            hypothesis[name] = _find_turns(speech, candidate, plda)

    # Method -> its lowest DER, and the candidate with it: of equal ones the first.
    der_of: dict[str, float] = {}
    best_of: dict[str, Tuning] = {}
    for candidate, hypothesis in zip(candidates, hypotheses):
        errors_of = score_recordings(reference, hypothesis, regions=regions)
        errors = total(errors_of.values())
        der = errors.wrong / errors.scored
        method_name = candidate.method
        if method_name not in der_of or der < der_of[method_name]:
            der_of[method_name] = der
            best_of[method_name] = candidate
    best_method = min(der_of, key=der_of.__getitem__)
    return replace(
        best_of[best_method],
        threshold=best_of["ahc"].threshold,
        fb=best_of["vbx"].fb if plda is not None else Tuning().fb,
        der=der_of,
        source=f"{source}: {count_of(len(reference), 'recording')}",
    )


def _find_turns(
    speech: SpeechWindows, settings: Tuning, plda: Plda | None
) -> list[Turn]:
    """Return the turns of a recording with these settings."""
    method = build_method(settings, read_plda=lambda: plda)
    clusters = cluster(speech.emb_ND, method)
    segments = find_segments(
        speech.regions,
        speech.windows,
        clusters.cosine_NK,
    )
    turns: list[Turn] = []
    for segment in segments:
        turn = Turn(segment.start, segment.end, segment.speaker)
        turns.append(turn)
    return turns


def _candidates(*, with_vbx: bool) -> list[Tuning]:
    """Return the settings to compare, by method; of a method, the nearest to the default first.

    The first method is the default.
    """
    default = Tuning()
    candidates = [default]  # spectral

    def threshold_distance(threshold: float) -> float:
        return abs(threshold - default.threshold)

    for threshold in sorted(THRESHOLDS, key=threshold_distance):
        candidates.append(Tuning("ahc", threshold))

    def fb_distance(fb: float) -> float:
        return abs(np.log(fb / default.fb))

    if with_vbx:
        # A digest of any PLDA: that of the model is not stored yet.
        vbx = Tuning("vbx", plda_sha256="")
        for fb in sorted(FBS, key=fb_distance):
            candidates.append(replace(vbx, fb=fb))
    return candidates


def learn_vbx(model: SpeakerModel, folder: Path, *, progress: bool = False) -> Vbx:
    """Build the method vbx; learn its PLDA from windows of a checked data directory.

    Warns of few speakers. Raises ValueError if the speakers or their windows are too few for the
    model's dimensions.
    """
    learned = learn_window_plda(model, folder, progress=progress)
    return Vbx(**vars(learned.plda))


def learn_window_plda(
    model: SpeakerModel, folder: Path, *, progress: bool = False
) -> WindowPlda:
    """Learn a PLDA for vbx from windows of the speakers of a checked data directory.

    Warns of fewer than MIN_SPEAKERS speakers. Raises ValueError if the speakers or their windows
    are too few for the model's dimensions.
    """
    manifest = read_manifest([folder], sample_rate=model.sample_rate)
    window_samples = round(WINDOW_SECONDS * model.sample_rate)

    # Consecutive windows of the first utterances of each speaker.
    windows_of: dict[int, list[Piece]] = {}
    lengths = manifest.num_samples_N.tolist()
    for row, speaker in enumerate(manifest.speaker_N.tolist()):
        windows = windows_of.setdefault(speaker, [])
        last_start = lengths[row] - window_samples
        starts = range(0, last_start + 1, window_samples)
        num_wanted = MAX_WINDOWS - len(windows)
        for start in starts[:num_wanted]:
            window = Piece(manifest, row, start, window_samples)
            windows.append(window)

    speakers: list[str] = []
    reads: list[Read] = []
    for speaker, windows in windows_of.items():
        for window in windows:
            speakers.append(str(speaker))
            reads.append(window.read)
    emb_MD = model.embed_many(
        reads,
        check_levels=False,
        progress=progress,
        unit="windows",
    )
    # Clustering sees unit vectors, so PLDA learns from them too.
    unit_MD = unit_rows(emb_MD).astype(np.float32)
    ids = [str(row) for row in range(len(reads))]
    table = EmbeddingTable(ids, unit_MD, model.sha256)
    plda = learn_plda(Development(table, speakers))
    num_speakers = len(set(speakers))
    if num_speakers < MIN_SPEAKERS:
        log.warning(
            "%s: has windows of %d speakers, few for the PLDA of vbx; give at least %d, or"
            " compare it with other methods on your recordings",
            folder,
            num_speakers,
            MIN_SPEAKERS,
        )
    windows = count_of(len(speakers), "window")
    return WindowPlda(plda, f"{folder.name}: {num_speakers} speakers, {windows}")
