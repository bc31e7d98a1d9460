"""The benchmark of learning: seeds that continue, rows, intervals, and the peer's optimizer."""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from speakerlab.core.atomic import write_text
from speakerlab.experiments.trial_list import TrialList, read_trial_list

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import learning
import learning_peer

SPEAKERS, TAKES = 8, 3


@pytest.fixture
def listed(tmp_path) -> TrialList:
    """All pairs of three utterances of each of eight speakers."""
    names = [
        f"{speaker}-{take}" for speaker in range(SPEAKERS) for take in range(TAKES)
    ]
    folder = tmp_path / "test"
    write_text(
        folder / "utt2spk", "".join(f"{name} {name[0]}\n" for name in sorted(names))
    )
    label = {True: "target", False: "nontarget"}
    pairs = [
        f"{a} {b} {label[a[0] == b[0]]}\n" for a, b in combinations(sorted(names), 2)
    ]
    write_text(folder / "trials", "".join(pairs))
    return read_trial_list(folder / "trials")


def side_of(
    folder: Path, listed: TrialList, noise: float, calls: list
) -> learning.Side:
    """A trainer whose scores are the truth and so much noise, and which notes its calls."""

    def train(exp: Path, seed: int) -> learning.Found:
        calls.append((folder.name, seed))
        rng = np.random.default_rng([seed, len(folder.name)])
        trials = listed.trials
        score_N = trials.is_target_N + noise * rng.standard_normal(len(trials))
        label_N = np.where(trials.is_target_N, "target", "nontarget")
        rows = zip(trials.enrol_N, trials.test_N, label_N, score_N)
        ids = trials.enrol_ids, trials.test_ids
        lines = [
            f"{ids[0][a]} {ids[1][b]} {label} {score:.5f}\n"
            for a, b, label, score in rows
        ]
        write_text(exp / "scores/trials.score", "".join(lines))
        if (seed, folder.name) == (2, "theirs") and calls.count(("theirs", 2)) == 1:
            raise KeyboardInterrupt
        return {"minutes": 1.0 + seed, "crops": 64}

    return learning.Side(folder, "scores/{}.score", train)


def test_an_interrupted_benchmark_continues_and_gives_its_row(tmp_path, listed):
    calls: list = []
    sides = [
        side_of(tmp_path / name, listed, n, calls)
        for name, n in (("us", 0.4), ("theirs", 2))
    ]
    with pytest.raises(KeyboardInterrupt):
        learning.learn(sides, 3)
    begun = [(name, seed) for seed in range(3) for name in ("us", "theirs")]
    assert calls == begun
    results = learning.learn(sides, 3)
    assert calls == [*begun, ("theirs", 2)]  # the one that was interrupted, again
    row = learning.row_of("learning.x.tiny", listed, sides, results)
    values = row.to_json()
    assert list(values)[:5] == ["name", "ours", "peer", "ratio", "unit"]
    eers = [sides[0].draw(listed, n, np.random.default_rng(0))[0] for n in (1, 3)]
    assert eers[0] == eers[1][:1]
    assert (values["ours"], values["worst"]) == (np.median(eers[1]), max(eers[1]))
    assert (
        values["ci95"][0]
        <= values["ours"]
        <= values["ci95"][1]
        < values["peer_ci95"][0]
    )
    assert values["difference_ci95"][1] < 0 and values["ratio"] < 0.5
    assert (values["seeds"], values["minutes"], values["peer_crops"]) == (3, 3.0, 64)

    alone = learning.row_of("learning.x.tiny", listed, sides[:1], results[:1]).to_json()
    assert alone["peer"] is None and "difference_ci95" not in alone


def test_seeds_that_differ_widen_the_interval(tmp_path, listed):
    """Equal speakers, but half of the seeds learned nothing."""
    widths = []
    for name, noises in (("steady", [0.6] * 6), ("lucky", [0.1, 3.0] * 3)):
        for seed, noise in enumerate(noises):
            side_of(tmp_path / name, listed, noise, []).learn(seed)
        side = side_of(tmp_path / name, listed, 0.0, [])
        eers, drawn = side.draw(listed, 6, np.random.default_rng(0))
        low, high = drawn.interval("eer")
        assert low < np.median(eers) < high
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


def test_turns_update_as_one_batch():
    x_BD, y_B = (
        torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
        torch.arange(8.0),
    )
    weights = []
    for turns in (1, 2):
        weight_D = torch.zeros(3, requires_grad=True)
        sgd_options = {
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0.01,
        }
        optimizer = learning_peer.Turns([weight_D], num_turns=turns, **sgd_options)
        for _ in range(3):
            for x, y in zip(x_BD.chunk(turns), y_B.chunk(turns)):
                loss = ((x @ weight_D - y) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        weights.append(weight_D.detach())
    assert weights[0].abs().min() > 0
    torch.testing.assert_close(*weights)
