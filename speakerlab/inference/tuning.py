"""Tuning of diarization for a model: its method and threshold, and a PLDA for vbx.

Letters: M windows, D embedding dimensions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from speakerlab.inference.diarize import Read, embed_windows
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.plda import learn_plda
from speakerlab.scoring.transforms import Development

MAX_WINDOWS = 20  # of each speaker, to learn PLDA from
# Candidates for ahc: 0.10, 0.15, ..., 0.80.
THRESHOLDS = [number / 20 for number in range(2, 17)]


def tune(
    model: SpeakerModel,
    recordings: Mapping[str, Any],
    reference: Mapping[str, Sequence[Turn]],
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    source: str,
    progress: bool = False,
) -> Tuning:
    """Find the method (spectral or ahc) and the threshold of ahc with the lowest DER.

    The DER is computed without a collar and includes overlap; speech is found by energy.
    recordings: name -> audio for `diarize`, embedded once; reference: name -> its turns; regions:
    the regions to score (None: from the first to the last turn). If several thresholds have the
    lowest DER, the nearest to the default is taken. Raises ValueError if a recording is missing,
    and if the reference has no speech to score.
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

    # The first candidate is the default, spectral.
    candidates = [Tuning()]
    for threshold in THRESHOLDS:
        candidates.append(Tuning("ahc", threshold))
    # For each candidate: name of a recording -> the turns found.
    turns_of: list[dict[str, list[Turn]]] = [{} for _ in candidates]
    names = sorted(reference)
    for name in progress_bar(names, unit="recordings", shown=progress):
        speech = embed_windows(model, recordings[name])
        for candidate, found_turns in zip(candidates, turns_of):
            clusters = cluster(speech.emb_ND, build_method(candidate))
            segments = find_segments(
                speech.regions,
                speech.windows,
                clusters.cosine_NK,
            )
            turns: list[Turn] = []
            for segment in segments:
                turn = Turn(segment.start, segment.end, segment.speaker)
                turns.append(turn)
            found_turns[name] = turns

    ders: list[float] = []
    for found_turns in turns_of:
        scored = score_recordings(reference, found_turns, regions=regions)
        errors = total(scored.values())
        ders.append(errors.wrong / errors.scored)

    # `min` compares the DERs first, then the distances from the default threshold.
    spectral_der, *ahc_ders = ders
    default = Tuning().threshold
    choices: list[tuple[float, float, float]] = []
    for ahc_der, threshold in zip(ahc_ders, THRESHOLDS):
        distance = abs(threshold - default)
        choices.append((ahc_der, distance, threshold))
    ahc_der, _, threshold = min(choices)
    return Tuning(
        method="ahc" if ahc_der < spectral_der else "spectral",
        threshold=threshold,
        der={"spectral": spectral_der, "ahc": ahc_der},
        source=f"{source}: {count_of(len(reference), 'recording')}",
    )


def learn_vbx(model: SpeakerModel, folder: Path, *, progress: bool = False) -> Vbx:
    """Build the method vbx; learn its PLDA from windows of a checked data directory.

    Raises ValueError if the speakers or their windows are too few for the model's dimensions.
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
    return Vbx(
        mean_D=plda.mean_D,
        transform_DD=plda.transform_DD,
        psi_D=plda.psi_D,
    )
