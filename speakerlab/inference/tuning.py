"""What diarization learns for a model: the method and threshold that fit it, and a PLDA for vbx.

Letters: M windows, D embedding dimensions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from speakerlab.data.manifest import Piece, read_manifest
from speakerlab.diarization.clustering import Tuning, cluster, unit_rows
from speakerlab.diarization.regions import Region, Turn
from speakerlab.diarization.resegmentation import find_segments
from speakerlab.diarization.scoring import score_recordings, total
from speakerlab.diarization.vbx import Vbx
from speakerlab.diarization.windows import WINDOW_SECONDS
from speakerlab.inference.diarize import embed_windows
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.plda import learn_plda
from speakerlab.scoring.transforms import Development

MAX_WINDOWS = 20  # of each speaker that PLDA is learned from
THRESHOLDS = [number / 20 for number in range(2, 17)]  # of ahc that are tried


def tune(
    model: SpeakerModel,
    recordings: Mapping[str, Any],
    reference: Mapping[str, Sequence[Turn]],
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    source: str,
    progress: bool = False,
) -> Tuning:
    """Find the threshold of ahc, and of ahc and spectral the method, with the lowest DER.

    The DER has no collar, with overlap; speech is found by energy. recordings: name -> anything
    that `diarize` takes, embedded once; reference: their turns; regions: to score (None: from first
    to last turn). Of equal thresholds, that nearest to the default is taken. Raises ValueError
    for a recording that is missing, and if the reference has no speech to score.
    """
    if missing := sorted(reference.keys() - recordings.keys()):
        raise ValueError(f"{source}: has turns but not the audio of {missing[0]}; add it")
    # without turns: names that do not fit are refused before the work
    if not any(one.scored for one in score_recordings(reference, {}, regions=regions).values()):
        raise ValueError(f"{source}: has no speech to score; check the turns")
    candidates = [Tuning(), *(Tuning("ahc", threshold) for threshold in THRESHOLDS)]
    turns: list[dict[str, list[Turn]]] = [{} for _ in candidates]
    for name in tqdm(sorted(reference), unit=" recordings", disable=None if progress else True):
        heard = embed_windows(model, recordings[name])
        for candidate, own in zip(candidates, turns):
            found = cluster(heard.emb_ND, candidate.build())
            segments = find_segments(heard.regions, heard.windows, found.cosine_NK)
            own[name] = [Turn(*segment[:3]) for segment in segments]
    errors = [total(score_recordings(reference, own, regions=regions).values()) for own in turns]
    spectral, *ders = [one.wrong / one.scored for one in errors]
    default = Tuning().threshold
    der, _, threshold = min((d, abs(t - default), t) for d, t in zip(ders, THRESHOLDS))
    return Tuning(
        method="ahc" if der < spectral else "spectral",
        threshold=threshold,
        der={"spectral": spectral, "ahc": der},
        source=f"{source}: {len(reference)} recordings",
    )


def learn_vbx(model: SpeakerModel, folder: Path, *, progress: bool = False) -> Vbx:
    """Build the method vbx, its PLDA learned from windows of a checked data directory.

    Raises ValueError if the speakers or their windows are too few for the model's dimensions.
    """
    manifest = read_manifest([folder], sample_rate=model.sample_rate)
    size = round(WINDOW_SECONDS * model.sample_rate)
    pieces: dict[int, list[Piece]] = {}
    for row, (speaker, length) in enumerate(zip(manifest.speaker_N, manifest.num_samples_N)):
        own = pieces.setdefault(int(speaker), [])
        starts = range(0, int(length) - size + 1, size)[: MAX_WINDOWS - len(own)]
        own += [Piece(manifest, row, start, size) for start in starts]
    speakers = [str(speaker) for speaker, own in pieces.items() for _ in own]
    reads = [piece.read for own in pieces.values() for piece in own]
    ids = [str(row) for row in range(len(reads))]
    emb_MD = model.embed_many(reads, progress=progress, unit="windows")
    unit_MD = unit_rows(emb_MD).astype(np.float32)
    plda = learn_plda(Development(EmbeddingTable(ids, unit_MD, model.sha256), speakers))
    return Vbx(mean_D=plda.mean_D, transform_DD=plda.transform_DD, psi_D=plda.psi_D)
