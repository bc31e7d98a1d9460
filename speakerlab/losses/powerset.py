"""Cross-entropy over sets of local speakers, whose order does not matter.

The network names the speakers of a window in any order, so the order of the true speakers with
which its probabilities agree best is found first, for each window (permutation invariance, Fujita
et al., "End-to-end neural speaker diarization with permutation-free objectives", Interspeech 2019,
arXiv 1909.05952). It is found on the probabilities of single speakers; the true sets follow from
it: A. Plaquet and H. Bredin, "Powerset multi-class cross entropy loss for neural speaker
diarization", Interspeech 2023, arXiv 2310.13025.
Letters: B windows, T frames, C sets of speakers, K true speakers in any order, L local speakers of
the network, P orders. `PowersetLoss` needs K = L.
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
        self, log_prob_BTC: Tensor, speech_BKT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the share of known frames with the right set, both scalars.

        speech_BKT: 1 where a true speaker speaks, 0 where not, and UNKNOWN in all rows of a frame
        that is left out. If more speak at once than a set can have, every largest set of them is
        right: their probabilities are summed.
        """
        with autocast_off(log_prob_BTC):
            log_prob_BTC = widened(log_prob_BTC)
            is_known_BT = (speech_BKT != UNKNOWN).all(dim=1)
            speech_BKT = speech_BKT.clamp(min=0).to(log_prob_BTC)
            with torch.no_grad():
                speech_BLT = self.in_best_order(log_prob_BTC, speech_BKT)
                is_right_BTC = self.right_sets(speech_BLT)

            # The loss of a frame: minus the logarithm of the summed probability of its right sets.
            right_BTC = log_prob_BTC.masked_fill(~is_right_BTC, -torch.inf)
            loss_BT = -right_BTC.logsumexp(dim=2)

            # The mean over the known frames.
            known_BT = is_known_BT.to(loss_BT)
            num_known = known_BT.sum().clamp(min=1)
            # `where`: a frame without probability for its unknown truth may have an infinite loss.
            loss_BT = torch.where(is_known_BT, loss_BT, 0.0)
            loss = loss_BT.sum() / num_known

            # The accuracy: how often the most probable set is right.
            best_BT1 = log_prob_BTC.argmax(dim=2, keepdim=True)
            is_hit_BT = is_right_BTC.gather(2, best_BT1).squeeze(2)
            num_hits = (is_hit_BT.to(loss_BT) * known_BT).sum()
            accuracy = num_hits / num_known
            return loss, accuracy

    def in_best_order(self, log_prob_BTC: Tensor, speech_BKT: Tensor) -> Tensor:
        """Return speech_BLT: the true speakers in the order that agrees best with the network.

        That is the order with the smallest squared difference between the truth and the
        probability that each local speaker speaks; of several equal orders, the first.
        """
        set_CL = self.set_CL.to(log_prob_BTC)
        prob_BTL = log_prob_BTC.exp() @ set_CL
        # The sums of squares do not depend on the order, so the order with the largest sum of
        # products has the smallest squared difference.
        agreement_BKL = speech_BKT @ prob_BTL
        place_L = torch.arange(self.max_speakers, device=speech_BKT.device)
        agreement_BP = agreement_BKL[:, self.order_PL, place_L].sum(dim=2)
        best_B = agreement_BP.argmax(dim=1)
        order_BL = self.order_PL[best_B]
        return speech_BKT.take_along_dim(order_BL[:, :, None], dim=1)

    def right_sets(self, speech_BLT: Tensor) -> Tensor:
        """Return is_right_BTC: true for the largest sets that have only speakers who speak."""
        set_CL = self.set_CL.to(speech_BLT)
        # Of each set, how many of its speakers are silent in a frame.
        silent_BTL = 1 - speech_BLT.transpose(1, 2)
        num_silent_BTC = silent_BTL @ set_CL.T
        num_speaking_BT = speech_BLT.sum(dim=1).clamp(max=self.max_at_once)
        size_C = set_CL.sum(dim=1)
        is_largest_BTC = size_C == num_speaking_BT[..., None]
        return (num_silent_BTC == 0) & is_largest_BTC


def local_errors(best_TC: np.ndarray, speech_KT: np.ndarray) -> np.ndarray:
    """Return the frames (missed, false alarm, confusion, spoken) of a window, float64.

    best_TC: 1 at the most probable set of a frame. True and local speakers are matched such that
    they agree in as many frames as possible; unknown frames are left out. The sum of the three
    errors divided by `spoken` is the local diarization error rate.
    """
    from scipy.optimize import linear_sum_assignment

    # Who speaks in the known frames: the true speakers, and the local speakers of the best sets.
    is_known_T = (speech_KT != UNKNOWN).all(axis=0)
    true_KT = speech_KT[:, is_known_T].astype(np.float64)
    known_best_TC = best_TC[is_known_T].astype(np.float64)
    sets_CL = speaker_sets(MAX_SPEAKERS, MAX_AT_ONCE)
    found_TL = known_best_TC @ sets_CL

    # The number of frames in which matched speakers agree.
    agreement_KL = true_KT @ found_TL
    matched = linear_sum_assignment(agreement_KL, maximize=True)
    num_right = agreement_KL[matched].sum()

    # If too few speakers are found in a frame, the rest are missed; if too many, the surplus are
    # false alarms. All others are right or confused.
    num_true_T = true_KT.sum(axis=0)
    num_found_T = found_TL.sum(axis=1)
    surplus_T = num_found_T - num_true_T
    missed = np.maximum(-surplus_T, 0).sum()
    false_alarm = np.maximum(surplus_T, 0).sum()
    num_compared_T = np.minimum(num_true_T, num_found_T)
    confusion = num_compared_T.sum() - num_right
    spoken = num_true_T.sum()
    return np.array([missed, false_alarm, confusion, spoken])
