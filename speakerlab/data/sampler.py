"""Order of the utterances in each epoch, a function of (seed, attempt, epoch) alone.

Letters: N utterances, P positions of an epoch.
"""

import numpy as np
from scipy.sparse import csr_array

BLOCK_ROWS = 4096  # consecutive rows, so that packed audio is read in long runs
WINDOW_BLOCKS = 8  # rows are shuffled within so many blocks
MAX_CROPS = 2**31 - 2  # an epoch's positions and rows are counted in 32 bits

ORDER_KEY = 1 << 62  # key of the draws of the order; larger than any position


class EpochOrder:
    """The global order of every epoch; the same for any number of ranks and workers.

    An utterance of d seconds gets floor(d / crop + u) slots an epoch, u uniform: the u of all
    utterances come from one draw by systematic sampling, so that an epoch's length does not vary.
    An epoch is `epoch_samples` long; by default as long as the corpus, but at least a global batch.

    one_crop_per: in samples; an utterance then gets floor(length / one_crop_per) slots, but at
    least one; with infinity, exactly one.

    speaker_balance: with 0, the slots of an utterance only depend on its length. With 1, all
    speakers get equally many slots, to within one, divided among their utterances by length. In
    between, the share of a speaker with T seconds is proportional to T^(1 - balance).

    corpus_shares: the share of each corpus in every epoch, to within one crop; it holds whatever
    else decides how often an utterance occurs. corpus_N: the corpus of each utterance.
    """

    def __init__(
        self,
        num_samples_N: np.ndarray,
        *,
        crop_samples: int,
        global_batch: int,
        seed: int,
        attempt: int = 0,
        epoch_samples: float | None = None,
        one_crop_per: float | np.ndarray | None = None,
        speaker_N: np.ndarray | None = None,
        speaker_balance: float = 0.0,
        corpus_N: np.ndarray | None = None,
        corpus_shares: np.ndarray | None = None,
    ) -> None:
        if one_crop_per is not None:
            num_samples_N = sampled_lengths(
                num_samples_N, one_crop_per, crop_samples=crop_samples
            )

        corpus_samples = float(num_samples_N.sum())
        if epoch_samples is None:
            batch_samples = float(crop_samples * global_batch)
            epoch_samples = max(corpus_samples, batch_samples)

        if corpus_shares is not None:
            # Whole steps, because crops of a last, incomplete step would be left out of the shares.
            step_samples = crop_samples * global_batch
            num_steps = max(1, int(epoch_samples / step_samples))
            epoch_samples = float(num_steps * step_samples)

        self.global_batch = global_batch
        self.key = (seed, attempt)
        self.repeats = epoch_samples / corpus_samples  # of the corpus in an epoch
        self.num_crops = int(epoch_samples / crop_samples)
        self.steps_per_epoch = self.num_crops // global_batch
        if not global_batch <= self.num_crops <= MAX_CROPS:
            raise ValueError(
                "training.epoch_hours: an epoch must hold at least one batch of"
                f" {global_batch} crops and at most {MAX_CROPS}, got {self.num_crops};"
                " set it to null, or change training.global_batch"
            )

        # Slots of the rows, as a running sum of fractions: row i of `sampled_N` lies between
        # crops_end_N[i - 1] and crops_end_N[i]. In place, because N may be ten million.
        self.sampled_N: np.ndarray | None = None  # rows by group; None: not sorted
        if speaker_balance or corpus_shares is not None:
            assert speaker_N is not None, "balancing needs the speaker of each row"
            self.sampled_N, share_N = by_group(
                num_samples_N,
                speaker_N,
                speaker_balance,
                corpus_N=corpus_N,
                corpus_shares=corpus_shares,
            )
            self.crops_end_N = np.cumsum(share_N, out=share_N)
            total_share = self.crops_end_N[-1]
            self.crops_end_N *= epoch_samples / crop_samples / total_share
        else:
            self.crops_end_N = num_samples_N.astype(np.float64)
            np.cumsum(self.crops_end_N, out=self.crops_end_N)
            self.crops_end_N *= self.repeats / crop_samples
        self.crops_end_N[-1] = epoch_samples / crop_samples  # despite rounding

    @property
    def num_dropped(self) -> int:
        """Return the number of crops in the incomplete last step, which is left out."""
        return self.num_crops % self.global_batch

    def rows(self, epoch: int) -> np.ndarray:
        """Return rows_P, int32: the row of the manifest at each position of this epoch."""
        rng = np.random.default_rng([*self.key, epoch, ORDER_KEY])
        slots_N = self._slots(rng.random())
        num_rows = len(slots_N)
        num_positions = slots_N.sum()
        num_blocks = -(-num_rows // BLOCK_ROWS)  # rounded up

        # Two shuffles: blocks of neighbouring rows, then the rows of a few blocks together.
        blocks = rng.permutation(num_blocks)
        rows_P = np.empty(num_positions, dtype=np.int32)
        start = 0
        for first in range(0, num_blocks, WINDOW_BLOCKS):
            rows_of_blocks: list[np.ndarray] = []
            for block in blocks[first : first + WINDOW_BLOCKS].tolist():
                first_row = block * BLOCK_ROWS
                end_row = min(first_row + BLOCK_ROWS, num_rows)
                # 64 bits, because NumPy shuffles other sizes at half the speed.
                block_rows = np.arange(first_row, end_row, dtype=np.int64)
                repeats = slots_N[first_row:end_row]
                rows_of_blocks.append(np.repeat(block_rows, repeats))
            window_rows = np.concatenate(rows_of_blocks)
            rng.shuffle(window_rows)
            end = start + len(window_rows)
            rows_P[start:end] = window_rows
            start = end
        return rows_P

    def _slots(self, offset: float) -> np.ndarray:
        """Return slots_N, int32: how often each row occurs in an epoch whose draw is `offset`."""
        num_rows = len(self.crops_end_N)
        ends_N = np.empty(num_rows, dtype=np.int32)
        # `unsafe` rounds down, into int32 without a copy in float64.
        np.add(self.crops_end_N, offset, out=ends_N, casting="unsafe")
        ends_N[1:] -= ends_N[:-1]
        if self.sampled_N is None:
            return ends_N
        slots_N = np.empty_like(ends_N)
        slots_N[self.sampled_N] = ends_N
        return slots_N


def sampled_lengths(
    num_samples_N: np.ndarray,
    one_crop_per: float | np.ndarray,
    *,
    crop_samples: int,
) -> np.ndarray:
    """Return lengths as if an utterance were just as long as its crops; NaN: as it is."""
    num_crops_N = np.maximum(num_samples_N // one_crop_per, 1.0)
    return np.where(
        np.isnan(one_crop_per),
        num_samples_N,
        num_crops_N * crop_samples,
    )


def by_group(
    num_samples_N: np.ndarray,
    speaker_N: np.ndarray,
    balance: float,
    *,
    corpus_N: np.ndarray | None = None,
    corpus_shares: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows sorted by corpus and speaker, share of each row in an epoch).

    int32 and float64; the shares are not normalised. Utterances of a group are neighbours, so that
    systematic sampling also draws each group's share, rounded down or up. Without `corpus_shares`,
    speakers are balanced over all corpora.
    """
    group_N = speaker_N
    if corpus_N is not None and corpus_shares is not None:
        # A speaker of several corpora is one group in each of them. In 32 bits: more groups than
        # that would not fit in memory.
        num_speakers = int(speaker_N.max()) + 1
        group_N = corpus_N.astype(np.int32) * num_speakers
        group_N += speaker_N
    seconds_per_group = np.bincount(group_N, weights=num_samples_N)
    with np.errstate(divide="ignore"):  # a group without utterances
        weight_per_group = seconds_per_group**-balance
    sampled_N, sampled_lengths_N, rows_per_group = sort_by_group(group_N, num_samples_N)
    share_N = np.repeat(weight_per_group, rows_per_group)
    share_N *= sampled_lengths_N
    del sampled_lengths_N  # 80 MB for ten million rows
    if corpus_N is not None and corpus_shares is not None:
        sampled_corpus_N = corpus_N[sampled_N]
        share_per_corpus = np.bincount(
            sampled_corpus_N, weights=share_N, minlength=len(corpus_shares)
        )
        share_N *= (corpus_shares / share_per_corpus)[sampled_corpus_N]
    return sampled_N, share_N


def sort_by_group(
    group_N: np.ndarray,
    num_samples_N: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows sorted by group, int32; their lengths; number of rows of each group).

    The rows of a group keep their order. A sparse matrix with a length in each row, in the column
    of its group, is sorted into columns by counting: many times as fast as `argsort` for ten
    million rows. The lengths move along, because to gather them by `sampled_N` later takes longer.
    """
    num_rows = len(group_N)
    row_starts = np.arange(num_rows + 1, dtype=np.int32)  # one entry in each row
    shape = (num_rows, int(group_N.max()) + 1)
    by_row = csr_array((num_samples_N, group_N, row_starts), shape=shape)
    by_column = by_row.tocsc()
    sampled_N = by_column.indices.astype(np.int32, copy=False)
    return sampled_N, by_column.data, np.diff(by_column.indptr)
