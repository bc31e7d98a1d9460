"""Scores of trials whose test side was treated before it was embedded."""

import numpy as np
import pytest
from embedded_sets import CHAINS, SHA, make_experiment, rows_of

from speakerlab.bin import score
from speakerlab.data.tables import read_table
from speakerlab.data.treatments import read_treatments
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.trials import read_trials


def cosine_eer(trials, enrol_by_id, test_by_id):
    """EER of cosine scores, for embeddings of the two sides by id."""
    enrol_ids = [trials.enrol_ids[row] for row in trials.enrol_N]
    enrol_ND = np.stack([enrol_by_id[name] for name in enrol_ids])
    test_ids = [trials.test_ids[row] for row in trials.test_N]
    test_ND = np.stack([test_by_id[name] for name in test_ids])
    enrol_length_N = np.linalg.norm(enrol_ND, axis=1)
    test_length_N = np.linalg.norm(test_ND, axis=1)
    product_N = (enrol_ND * test_ND).sum(1)
    cosine_N = product_N / enrol_length_N / test_length_N
    return eer(cosine_N, trials.is_target_N)


@pytest.mark.slow
def test_a_treatment_is_a_condition_of_the_test_side(
    tmp_path, monkeypatch, capsys, caplog
):
    exp, data = make_experiment(tmp_path)
    whole = EmbeddingTable.load(exp / "embeddings/test/trained")
    rng = np.random.default_rng(3)
    noise_ND = rng.normal(size=whole.emb_ND.shape)
    noisy_ND = whole.emb_ND + 2 * noise_ND.astype(np.float32)
    for name in ("3s", "mp3-16k"):
        treated = EmbeddingTable(whole.ids, noisy_ND, SHA)
        treated.save(exp / f"embeddings/test/trained_{name}")
    extractions = []

    # There is no model and no audio.
    def record_extraction(exp_dir, data_dir, *, precision, treatments):
        extractions.append((exp_dir, data_dir, precision, treatments))

    monkeypatch.setattr(score.extract, "extract", record_extraction)
    durations = ["3", "full"]
    codecs = ["none", "mp3:16k"]
    rows = rows_of(
        exp,
        *["--backend", *CHAINS, "--top-n", "20"],
        *["--durations", *durations, "--codecs", *codecs],
    )
    treatments = read_treatments(durations, codecs)
    assert extractions == [(exp, data / "test", "fp32", treatments)]
    trials = read_trials(data / "test/trials")
    table = dict(zip(whole.ids, noisy_ND))
    for row in rows:
        conditions = []
        for part in row["conditions"]:
            if part["condition"].endswith("the test side"):
                conditions.append(part)
        # this chain weighs quality measures, which a treatment changes
        if row["backend"].startswith(CHAINS[3]):
            assert not conditions
            continue
        short, full, plain, coded = conditions
        assert [part["value"] for part in conditions] == [
            "3 s",
            "full",
            "none",
            "mp3:16k",
        ]
        names = {"condition": 0, "value": 0}
        assert plain | names == full | names
        assert coded["eer"] == short["eer"]
        assert coded["eer_ci95"] == short["eer_ci95"]
        assert full["eer"] == row["eer"]
        assert full["eer"] < short["eer"]
        low, high = short["eer_ci95"]
        assert low < short["eer"] < high
        assert short["num_target"] == row["num_target"]

    # whole enrolment utterances against treated test utterances
    before = dict(zip(whole.ids, whole.emb_ND))
    expected_eer = cosine_eer(trials, before, table)
    short, *_ = [part for part in rows[0]["conditions"] if part["value"] == "3 s"]
    assert short["eer"] == pytest.approx(expected_eer, abs=1e-6)

    printed = capsys.readouterr().out
    assert printed.count("duration of the test side  3 s") == 3
    durations = read_table(data / "test/utt2dur")
    seconds = [float(duration) for duration in durations.values()]
    assert sum(size <= 3 for size in seconds) == 14
    assert "test/trials: 14 of 175 test utterances last at most 3 s" in caplog.text
