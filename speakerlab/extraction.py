"""From recordings to embeddings, and the validation that rests on it. In: pieces. Out: emb_ND.

Pieces of equal frame count share a batch, so that nothing is padded and a batch equals its rows.
Where the model leaves out silence, what is left of a piece is embedded alone.
Letters: N pieces, B rows of a batch, S samples, D embedding.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch.utils.data import DataLoader

from speakerlab.data.audio import FULL_SCALE
from speakerlab.data.loader import start_worker
from speakerlab.data.manifest import Manifest
from speakerlab.data.pieces import Piece, Pieces, Stretch
from speakerlab.embedder import Embedder
from speakerlab.frontend.vad import EnergyVad
from speakerlab.scoring.backend import pairwise_eer
from speakerlab.scoring.calibration import Calibration, fit_calibration
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)
MAX_BATCH_SECONDS = 64  # of audio in one forward pass, unless a single piece is longer
MAX_UTTERANCES_PER_VALID_SPEAKER = 10
FEW_SPEAKERS = 10  # whose threshold is not to be trusted


def embed_pieces(
    embedder: Embedder,
    pieces: Sequence[Piece | Stretch],
    *,
    device: torch.device,
    num_workers: int = 0,
    progress: Callable[[int], None] = lambda done: None,
    share: tuple[int, int] = (0, 1),
    stop: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """emb_ND, float32, in the order of `pieces`; `progress` is told how many are done.

    stop: asked after each batch; where it says so, the rest stays zero.
    share: (i, n) computes the batches i, i + n, i + 2 n, ... and leaves the other rows zero, so
    that the sum of n shares is the same, bit for bit, as the whole.
    """
    was_training = embedder.training
    embedder.eval().to(device)
    emb_ND = np.zeros((len(pieces), embedder.embed_dim), dtype=np.float32)
    groups = list(_groups(embedder, pieces))[share[0] :: share[1]]
    loader = DataLoader(
        Pieces(pieces),
        batch_sampler=groups,
        num_workers=num_workers,
        collate_fn=partial(_stack, vad=embedder.vad),
        worker_init_fn=start_worker,
    )
    done = 0
    with torch.inference_mode():
        for rows, wave_BS in zip(groups, loader):
            wave_BS = wave_BS.to(device, non_blocking=True).float().div_(FULL_SCALE)
            emb_ND[rows] = embedder(wave_BS).float().cpu().numpy()
            done += len(rows)
            progress(done)
            if stop():
                break
    embedder.train(was_training)
    return emb_ND


def utterance_pieces(manifest: Manifest) -> list[Stretch]:
    """Every utterance of a manifest, whole."""
    return [
        Stretch(manifest, row, 0, int(num_samples))
        for row, num_samples in enumerate(manifest.num_samples_N)
    ]


class Validation:
    """The EER of all pairs of utterances of the validation speakers.

    At most ten utterances a speaker; a speaker with one utterance gives its two halves.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.pieces: list[Stretch] = []
        self.speaker_N: list[int] = []
        self.num_halved = 0
        self.emb_ND: np.ndarray | None = None  # of the last `run`
        whole = utterance_pieces(manifest)
        for speaker in range(len(manifest.speakers)):
            rows = np.flatnonzero(manifest.speaker_N == speaker)[:MAX_UTTERANCES_PER_VALID_SPEAKER]
            pieces = [whole[row] for row in rows]
            if len(pieces) == 1:
                pieces = _halves(pieces[0])
                self.num_halved += 1
            self.pieces += pieces
            self.speaker_N += [speaker] * len(pieces)

    def run(
        self, embedder: Embedder, ranks: Ranks, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """{"eer": fraction} of rank 0's embedder as it is now; every rank does its share.

        None where `stop` said on any rank that there is no time. Raises FloatingPointError, on
        every rank, for embeddings that are not finite.
        BatchNorm's statistics are taken from rank 0, whose they are: in training each rank has its
        own, and uses none of them.
        """
        ranks.copy_from_first(list(embedder.buffers()))
        share = (ranks.rank, ranks.world_size)
        device = ranks.device
        emb_ND = embed_pieces(embedder, self.pieces, device=device, share=share, stop=stop)
        if any(ranks.every(stop())):
            return None
        self.emb_ND = ranks.sum(torch.from_numpy(emb_ND)).numpy()
        num_bad = int((~np.isfinite(self.emb_ND).all(axis=1)).sum())
        if num_bad:
            raise FloatingPointError(
                f"{num_bad} of {len(self.emb_ND)} validation embeddings are not finite"
            )
        return {"eer": pairwise_eer(self.emb_ND, np.array(self.speaker_N))[0]}

    def calibrate(
        self, embedder: Embedder, device: torch.device, *, source: str, fars: Sequence[float] = ()
    ) -> Calibration:
        """What the embedder's scores mean, learned from all pairs; `fars` are rates to know."""
        emb_ND = embed_pieces(embedder, self.pieces, device=device)
        _, scores_N, is_target_N = pairwise_eer(emb_ND, np.array(self.speaker_N))
        num_speakers = len(set(self.speaker_N))
        if num_speakers < FEW_SPEAKERS:
            text = "the threshold is learned from %d speakers only: it is rough"
            log.warning(text, num_speakers)
        source = f"{source}: {num_speakers} speakers, {len(self.pieces)} recordings"
        if self.num_halved:
            source += f", {self.num_halved} of the speakers with two halves of one recording"
        return fit_calibration(scores_N, is_target_N, source=source, false_alarm_rates=fars)


def _groups(embedder: Embedder, pieces: Sequence[Piece | Stretch]) -> Iterator[list[int]]:
    """Indices of pieces that may share a batch, longest first."""

    def key(index: int) -> tuple[int, int]:
        return embedder.batch_key(pieces[index].num_samples)

    order = sorted(range(len(pieces)), key=key, reverse=True)
    for _, group in groupby(order, key=key):
        rows = list(group)
        seconds = pieces[rows[0]].num_samples / embedder.sample_rate
        size = 1 if embedder.vad else max(int(MAX_BATCH_SECONDS / seconds), 1)
        yield from (rows[first : first + size] for first in range(0, len(rows), size))


def _stack(waves: Sequence[np.ndarray], vad: EnergyVad | None) -> torch.Tensor:
    """wave_BS; the samples beyond the shortest row are less than a frame and reach no feature."""
    if vad is not None:
        waves = [vad(wave_S) for wave_S in waves]
    shortest = min(len(wave_S) for wave_S in waves)
    return torch.from_numpy(np.stack([wave_S[:shortest] for wave_S in waves]))


def _halves(piece: Stretch) -> list[Stretch]:
    half = piece.num_samples // 2
    manifest, row, start = piece.manifest, piece.row, piece.start
    return [Stretch(manifest, row, start, half), Stretch(manifest, row, start + half, half)]
