"""Cross-entropy over sets of local speakers, whose order does not matter.

The network names the speakers of a window in any order, so the order of the true speakers with
which its probabilities agree best is found first, for each window (permutation invariance, Fujita
et al., "End-to-end neural speaker diarization with permutation-free objectives", Interspeech 2019,
arXiv 1909.05952). It is found on the probabilities of single speakers; the true sets follow from
it: A. Plaquet and H. Bredin, "Powerset multi-class cross entropy loss for neural speaker
diarization", Interspeech 2023, arXiv 2310.13025.
Letters: B windows, F frames, C sets of speakers, L = K local speakers, P orders.
"""

from itertools import permutations

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.core.powerset import (
    MAX_AT_ONCE,
    MAX_SPEAKERS,
    UNKNOWN,
    speaker_sets,
)


class PowersetLoss(nn.Module):
    """Negative log-probability of the true sets of speakers, averaged over all known frames."""

    set_CL: Tensor
    order_PL: Tensor

    def __init__(
        self, *, max_speakers: int = MAX_SPEAKERS, max_at_once: int = MAX_AT_ONCE
    ) -> None:
        super().__init__()
        self.max_speakers = max_speakers
        self.max_at_once = max_at_once
        sets = torch.from_numpy(speaker_sets(max_speakers, max_at_once))
        all_orders = permutations(range(max_speakers))
        orders = torch.tensor(list(all_orders))
        self.register_buffer("set_CL", sets, persistent=False)
        self.register_buffer("order_PL", orders, persistent=False)

    def forward(
        self, log_prob_BFC: Tensor, speech_BKF: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the share of known frames with the right set, both scalars.

        speech_BKF: 1 where a true speaker speaks, 0 where not, and UNKNOWN in all rows of a frame
        that is left out. If more speak at once than a set can have, every largest set of them is
        right: their probabilities are summed.
        """
        with autocast_off(log_prob_BFC):
            log_prob_BFC = widened(log_prob_BFC)
            is_known_BF = (speech_BKF != UNKNOWN).all(dim=1)
            speech_BKF = speech_BKF.clamp(min=0).to(log_prob_BFC)
            with torch.no_grad():
                speech_BLF = self.in_best_order(log_prob_BFC, speech_BKF)
                is_right_BFC = self.right_sets(speech_BLF)
            right_BFC = log_prob_BFC.masked_fill(~is_right_BFC, -torch.inf)
            loss_BF = -right_BFC.logsumexp(dim=2)
            known_BF = is_known_BF.to(loss_BF)
            num_known = known_BF.sum().clamp(min=1)
            # `where`: a frame without probability for its unknown truth may have an infinite loss.
            loss_BF = torch.where(is_known_BF, loss_BF, 0.0)
            loss = loss_BF.sum() / num_known

            best_BF1 = log_prob_BFC.argmax(dim=2, keepdim=True)
            is_hit_BF = is_right_BFC.gather(2, best_BF1).squeeze(2)
            num_hits = (is_hit_BF.to(loss_BF) * known_BF).sum()
            accuracy = num_hits / num_known
            return loss, accuracy

    def in_best_order(self, log_prob_BFC: Tensor, speech_BKF: Tensor) -> Tensor:
        """Return speech_BLF: the true speakers in the order that agrees best with the network.

        That is the order with the smallest squared difference between the truth and the
        probability that each local speaker speaks; of several equal orders, the first.
        """
        set_CL = self.set_CL.to(log_prob_BFC)
        prob_BFL = log_prob_BFC.exp() @ set_CL
        # The sums of squares do not depend on the order, so the order with the largest sum of
        # products has the smallest squared difference.
        agreement_BKL = speech_BKF @ prob_BFL
        place_L = torch.arange(self.max_speakers, device=speech_BKF.device)
        agreement_BP = agreement_BKL[:, self.order_PL, place_L].sum(dim=2)
        best_B = agreement_BP.argmax(dim=1)
        order_BL = self.order_PL[best_B]
        return speech_BKF.take_along_dim(order_BL[:, :, None], dim=1)

    def right_sets(self, speech_BLF: Tensor) -> Tensor:
        """Return is_right_BFC: true for the largest sets that have only speakers who speak."""
        set_CL = self.set_CL.to(speech_BLF)
        silent_BFL = 1 - speech_BLF.transpose(1, 2)
        num_silent_BFC = silent_BFL @ set_CL.T
        num_speaking_BF = speech_BLF.sum(dim=1).clamp(max=self.max_at_once)
        size_C = set_CL.sum(dim=1)
        is_largest_BFC = size_C == num_speaking_BF[..., None]
        return (num_silent_BFC == 0) & is_largest_BFC


def local_errors(best_FC: np.ndarray, speech_KF: np.ndarray) -> np.ndarray:
    """Return the frames (missed, false alarm, confusion, spoken) of a window, float64.

    best_FC: 1 at the most probable set of a frame. True and local speakers are matched such that
    they agree in as many frames as possible; unknown frames are left out. The sum of the three
    errors divided by `spoken` is the local diarization error rate.
    """
    from scipy.optimize import linear_sum_assignment

    is_known_F = (speech_KF != UNKNOWN).all(axis=0)
    true_KF = speech_KF[:, is_known_F].astype(np.float64)
    sets_CL = speaker_sets(MAX_SPEAKERS, MAX_AT_ONCE)
    known_best_FC = best_FC[is_known_F].astype(np.float64)
    found_FL = known_best_FC @ sets_CL
    agreement_KL = true_KF @ found_FL
    matched = linear_sum_assignment(agreement_KL, maximize=True)
    num_right = agreement_KL[matched].sum()
    num_true_F = true_KF.sum(axis=0)
    num_found_F = found_FL.sum(axis=1)
    surplus_F = num_found_F - num_true_F
    missed = np.maximum(-surplus_F, 0).sum()
    false_alarm = np.maximum(surplus_F, 0).sum()
    num_matched_F = np.minimum(num_true_F, num_found_F)
    confusion = num_matched_F.sum() - num_right
    spoken = num_true_F.sum()
    return np.array([missed, false_alarm, confusion, spoken])
