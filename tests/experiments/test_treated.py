"""Scores of trials whose test side was treated before it was embedded."""

import numpy as np
import pytest
from embedded_sets import CHAINS, SHA, make_experiment, rows_of

from speakerlab.bin import score
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.trials import read_trials


def test_a_treatment_is_a_condition_of_the_test_side(tmp_path, monkeypatch, capsys, caplog):
    exp, data = make_experiment(tmp_path)
    whole = EmbeddingTable.load(exp / "embeddings/test/trained")
    rng = np.random.default_rng(3)
    noisy_ND = whole.emb_ND + 2 * rng.normal(size=whole.emb_ND.shape).astype(np.float32)
    for name in ("3s", "mp3-16k"):
        EmbeddingTable(whole.ids, noisy_ND, SHA).save(exp / f"embeddings/test/trained_{name}")
    asked = []
    monkeypatch.setattr(score.extract, "main", asked.append)  # there is no model and no audio
    treatments = ["--durations", "3", "full", "--codecs", "none", "mp3:16k"]
    rows = rows_of(exp, "--backend", *CHAINS, "--top-n", "20", *treatments)
    assert [words[-8:] for words in asked] == [["--precision", "fp32", *treatments]]
    trials, table = read_trials(data / "test/trials"), dict(zip(whole.ids, noisy_ND))
    for row in rows:
        found = [part for part in row["conditions"] if part["condition"].endswith("the test side")]
        if row["backend"].startswith(CHAINS[3]):  # weighs qualities, which a treatment changes
            assert not found
            continue
        short, full, plain, coded = found
        assert [part["value"] for part in found] == ["3 s", "full", "none", "mp3:16k"]
        assert plain | {"condition": 0, "value": 0} == full | {"condition": 0, "value": 0}
        assert coded["eer"] == short["eer"] and coded["eer_ci95"] == short["eer_ci95"]
        assert full["eer"] == row["eer"] < short["eer"]
        assert short["eer_ci95"][0] < short["eer"] < short["eer_ci95"][1]
        assert short["num_target"] == row["num_target"]
    before = dict(zip(whole.ids, whole.emb_ND))
    enrol = np.stack([before[trials.enrol_ids[i]] for i in trials.enrol_N])
    test = np.stack([table[trials.test_ids[i]] for i in trials.test_N])
    cosine = (enrol * test).sum(1) / np.linalg.norm(enrol, axis=1) / np.linalg.norm(test, axis=1)
    plain = [part for part in rows[0]["conditions"] if part["value"] == "3 s"]
    assert plain[0]["eer"] == pytest.approx(eer(cosine, trials.is_target_N), abs=1e-6)
    assert capsys.readouterr().out.count("duration of the test side  3 s") == 3
    seconds = [float(line.split()[1]) for line in (data / "test/utt2dur").open()]
    assert sum(size <= 3 for size in seconds) == 14
    assert "test/trials: 14 of 175 test utterances last at most 3 s" in caplog.text
