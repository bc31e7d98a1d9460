"""The loss over sets of speakers against a search of all orders, frame by frame, in float64."""

from itertools import permutations

import numpy as np
import pytest
import torch

from speakerlab.core.powerset import UNKNOWN, speaker_sets
from speakerlab.losses.powerset import PowersetLoss, local_errors

SETS = speaker_sets(3, 2)


def random_log_prob(rng, num_frames, num_sets=7):
    logit_BTC = torch.from_numpy(2 * rng.standard_normal((2, num_frames, num_sets)))
    return logit_BTC.log_softmax(dim=2)


def brute_force(log_prob_TC, speech_KT, sets_CL, max_at_once):
    """Return the negative log-probability of the truth in the best order, per known frame."""
    prob_TL = np.exp(log_prob_TC) @ sets_CL
    num_frames = len(prob_TL)
    known_frames = [f for f in range(num_frames) if UNKNOWN not in speech_KT[:, f]]

    def distance(order):
        total = 0.0
        for f in range(num_frames):
            for place, speaker in enumerate(order):
                # An unknown frame counts as silent for the order.
                truth = max(speech_KT[speaker, f], 0)
                total += (truth - prob_TL[f, place]) ** 2
        return total

    best = min(permutations(range(len(speech_KT))), key=distance)
    losses = []
    for f in known_frames:
        active = {place for place, speaker in enumerate(best) if speech_KT[speaker, f]}
        size = min(len(active), max_at_once)
        right = 0.0
        for row, log_prob in zip(sets_CL, log_prob_TC[f]):
            members = set(np.flatnonzero(row))
            if members <= active and len(members) == size:
                right += np.exp(log_prob)
        losses.append(-np.log(right))
    return losses


@pytest.mark.parametrize(
    ("num_speakers", "max_at_once"), [(3, 2), (4, 2), (3, 3), (1, 1)]
)
def test_equals_a_search_of_all_orders(num_speakers, max_at_once):
    rng = np.random.default_rng(num_speakers)
    sets_CL = speaker_sets(num_speakers, max_at_once)
    loss = PowersetLoss(max_speakers=num_speakers, max_at_once=max_at_once)
    for _ in range(20):
        log_prob_BTC = random_log_prob(rng, 9, len(sets_CL))
        speech_BKT = rng.integers(0, 2, (2, num_speakers, 9))
        speech_BKT[:, :, rng.random(9) < 0.2] = UNKNOWN
        value, _ = loss(log_prob_BTC, torch.from_numpy(speech_BKT).to(torch.int8))
        expected = []
        for log_prob_TC, speech_KT in zip(log_prob_BTC.numpy(), speech_BKT):
            expected += brute_force(log_prob_TC, speech_KT, sets_CL, max_at_once)
        assert value.item() == pytest.approx(np.mean(expected), abs=1e-12)


def test_the_order_of_the_true_speakers_does_not_matter():
    rng = np.random.default_rng(0)
    loss = PowersetLoss()
    log_prob_BTC = random_log_prob(rng, 50)
    speech_BKT = torch.from_numpy(rng.integers(0, 2, (2, 3, 50))).to(torch.int8)
    value, accuracy = loss(log_prob_BTC, speech_BKT)
    for order in permutations(range(3)):
        other, other_accuracy = loss(log_prob_BTC, speech_BKT[:, list(order)])
        assert other.item() == pytest.approx(value.item(), abs=1e-12)
        assert other_accuracy.item() == pytest.approx(accuracy.item(), abs=1e-12)


def test_a_sure_network_has_no_loss_and_finite_gradients_elsewhere():
    loss = PowersetLoss()
    # Local speaker 2 speaks, then 2 and 0; the truth names them 0 and 1.
    best = torch.tensor([[0, 3, 3, 5, 0]])
    logit_BTC = 30 * torch.nn.functional.one_hot(best, 7).double()
    logit_BTC.requires_grad_()
    truth = [[0, 1, 1, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    speech_BKT = torch.tensor([truth], dtype=torch.int8)
    value, accuracy = loss(logit_BTC.log_softmax(2), speech_BKT)
    assert value.item() < 1e-10
    assert accuracy.item() == 1
    value.backward()
    assert logit_BTC.grad is not None
    assert logit_BTC.grad.isfinite().all()


def test_gradients_are_finite_where_nothing_is_known():
    loss = PowersetLoss()
    logit_BTC = torch.randn(1, 4, 7, dtype=torch.float64, requires_grad=True)
    speech_BKT = torch.full((1, 3, 4), UNKNOWN, dtype=torch.int8)
    value, accuracy = loss(logit_BTC.log_softmax(2), speech_BKT)
    value.backward()
    assert (value.item(), accuracy.item()) == (0, 0)
    assert (logit_BTC.grad == 0).all()


def test_local_errors_are_counted_by_hand():
    # Found: nobody, {0}, {0, 1}, {1}, {1}, {2}.
    best_TC = np.eye(7)[[0, 1, 4, 2, 2, 3]]
    speech_KT = np.array(
        [
            [1, 0, 1, 1, 0, UNKNOWN],
            [0, 1, 1, 0, 0, UNKNOWN],
            [0, 0, 0, 0, 0, UNKNOWN],
        ]
    )
    # Truth 0 is local 1, truth 1 is local 0: the first frame is missed, the fifth a false alarm.
    # In the order missed, false alarm, confusion, spoken.
    assert local_errors(best_TC, speech_KT).tolist() == [1, 1, 0, 5]
    # A third speaker at once cannot be found; two of three are right.
    at_once_K1 = np.ones((3, 1))
    assert local_errors(np.eye(7)[[4]], at_once_K1).tolist() == [1, 0, 0, 3]
    # One local speaker for two true ones.
    swapped_KT = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]])
    assert local_errors(np.eye(7)[[1, 1, 1]], swapped_KT).tolist() == [0, 0, 1, 3]
