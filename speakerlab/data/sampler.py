"""Order of the utterances in each epoch, a function of (seed, attempt, epoch) alone.

Letters: N utterances, P positions of an epoch.
"""

import numpy as np

BLOCK_ROWS = 4096  # consecutive rows, so that packed audio is read in long runs
WINDOW_BLOCKS = 8  # rows are shuffled within so many blocks
MAX_CROPS = 2**31 - 2  # an epoch's positions and rows are counted in 32 bits

ORDER_KEY = 1 << 62  # of the order's own draws: larger than any position


class EpochOrder:
    """The global order of every epoch; the same for any number of ranks and workers.

    An utterance of d seconds gets floor(d / crop + u) slots an epoch, u uniform: the u of all
    utterances come from one draw by systematic sampling, so that an epoch's length does not vary.
    An epoch is `epoch_samples` long or, by default, the corpus, repeated up to one global batch.

    one_crop_per: samples; an utterance then gets floor(length / one_crop_per) slots, at least one,
    and with infinity exactly one.

    speaker_balance: 0 draws utterances by their length alone; 1 every speaker equally often, to a
    slot, and their utterances by length; in between a speaker of T seconds gets T^(1 - balance).
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
        one_crop_per: float | None = None,
        speaker_N: np.ndarray | None = None,
        speaker_balance: float = 0.0,
    ) -> None:
        if one_crop_per is not None:  # as if an utterance were just as long as its crops
            num_samples_N = np.maximum(num_samples_N // one_crop_per, 1.0) * crop_samples
        corpus_samples = float(num_samples_N.sum())
        least = float(crop_samples * global_batch)
        wanted = max(corpus_samples, least) if epoch_samples is None else epoch_samples
        self.global_batch, self.key = global_batch, (seed, attempt)
        self.repeats = wanted / corpus_samples  # of the corpus in an epoch
        self.num_crops = int(wanted / crop_samples)
        self.steps_per_epoch = self.num_crops // global_batch
        if not global_batch <= self.num_crops <= MAX_CROPS:
            raise ValueError(
                f"training.epoch_hours: an epoch must hold at least one batch of {global_batch} "
                f"crops and at most {MAX_CROPS}, got {self.num_crops}; set it to null, or change "
                "training.global_batch"
            )
        self.sampled_N: np.ndarray | None = None  # rows by speaker; None: as they are
        if speaker_balance:
            assert speaker_N is not None, "balancing needs the speaker of each row"
            self.sampled_N, share_N = by_speaker(num_samples_N, speaker_N, speaker_balance)
            self.crops_end_N = np.cumsum(share_N, out=share_N)
            self.crops_end_N *= wanted / crop_samples / self.crops_end_N[-1]
        else:
            self.crops_end_N = num_samples_N.astype(np.float64)
            np.cumsum(self.crops_end_N, out=self.crops_end_N)
            self.crops_end_N *= self.repeats / crop_samples
        self.crops_end_N[-1] = wanted / crop_samples  # despite rounding

    @property
    def num_dropped(self) -> int:
        """Return how many crops the incomplete last step has, which is left out."""
        return self.num_crops % self.global_batch

    def rows(self, epoch: int) -> np.ndarray:
        """Return rows_P, int32: the row of the manifest at each position of this epoch."""
        rng = np.random.default_rng([*self.key, epoch, ORDER_KEY])
        slots_N = self._slots(rng.random())
        num_rows = len(slots_N)
        blocks = rng.permutation(-(-num_rows // BLOCK_ROWS))
        rows_P = np.empty(slots_N.sum(), dtype=np.int32)
        start = 0
        for first in range(0, len(blocks), WINDOW_BLOCKS):
            window = [
                np.arange(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, num_rows))
                for block in blocks[first : first + WINDOW_BLOCKS]
            ]
            rows = np.concatenate(window)
            shuffled = rng.permutation(np.repeat(rows, slots_N[rows]))
            rows_P[start : start + len(shuffled)] = shuffled
            start += len(shuffled)
        return rows_P

    def _slots(self, offset: float) -> np.ndarray:
        """Return slots_N, int32: how often each row occurs in an epoch whose draw is `offset`."""
        ends_N = np.empty(len(self.crops_end_N), dtype=np.int32)
        np.add(self.crops_end_N, offset, out=ends_N, casting="unsafe")  # rounded down
        ends_N[1:] -= ends_N[:-1]
        if self.sampled_N is None:
            return ends_N
        slots_N = np.empty_like(ends_N)
        slots_N[self.sampled_N] = ends_N
        return slots_N


def by_speaker(
    num_samples_N: np.ndarray, speaker_N: np.ndarray, balance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows sorted by speaker, the share of an epoch that each gets, not normalised).

    Utterances of a speaker are neighbours, so that systematic sampling also draws each speaker's
    share, rounded down or up. int32 and float64.
    """
    sampled_N = np.argsort(speaker_N, kind="stable").astype(np.int32)
    seconds_per_speaker = np.bincount(speaker_N, weights=num_samples_N)
    with np.errstate(divide="ignore"):  # a speaker without utterances
        weight_per_speaker = seconds_per_speaker**-balance
    share_N = weight_per_speaker[speaker_N[sampled_N]]
    share_N *= num_samples_N[sampled_N]
    return sampled_N, share_N
