"""From tables of embeddings to rows of results, without a model: the numbers are made by hand."""

import json

import numpy as np
import pytest
from embedded_sets import CHAINS, SHA, SIZES, make_experiment, rows_of
from refusals import refuses
from result_rows import row as row_of

from speakerlab.bin import compare
from speakerlab.experiments.embedded import read_development
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import act_dcf, cllr, eer, min_dcf
from speakerlab.scoring.score_files import read_scores
from speakerlab.scoring.trials import read_trials


@pytest.fixture
def experiment(tmp_path):
    return make_experiment(tmp_path)


def test_every_back_end_in_one_table(experiment, capsys):
    exp, data = experiment
    rows = rows_of(exp, "--backend", *CHAINS, "--top-n", "20")
    assert [row["backend"] for row in rows] == [
        *CHAINS[:2],
        *(f"{name},top-n=20" for name in CHAINS[2:]),
    ]
    assert capsys.readouterr().out.count("test/trials") == 4
    trials = read_trials(data / "test/trials")
    files = [f"test_trials{end}.txt" for end in ("", *(f"_{row['backend']}" for row in rows[1:]))]
    for row, name in zip(rows, files):
        scores = read_scores(exp / "scores" / name, trials)
        assert row["eer"] == pytest.approx(eer(scores, trials.is_target_N), abs=2e-4)
        assert row["eer_ci95"][0] < row["eer"] < row["eer_ci95"][1]
        assert row["min_dcf"]["0.05"] == pytest.approx(
            min_dcf(scores, trials.is_target_N, p_target=0.05), abs=1e-2
        )
        assert row["min_cllr"] < 1 and row["model_sha256"] == SHA
    plain, centred, normed, measured = rows
    assert centred["eer"] < plain["eer"]  # all share an offset, which the mean takes away
    assert plain["compared"] is None and centred["compared"]["with"] == "cosine"
    assert centred["compared"]["eer_difference"] == centred["eer"] - plain["eer"]
    assert centred["compared"]["ci95"][1] < 0 and centred["compared"]["p_value"] < 0.05
    assert measured["cllr"] < normed["cllr"] < 1  # short utterances are noisier here, so it helps
    assert measured["calibration"] == "train: 36 held-out speakers"
    assert "20 " in normed["protocol"] and "100 " in normed["protocol"]
    assert {row["condition"] for row in normed["conditions"]} == {
        "device",
        "gender",
        "shorter side",
    }


def test_qmf_needs_something_to_learn_from(experiment):
    exp, _ = experiment
    with refuses("cosine+qmf", "--calibration none"):
        rows_of(exp, "--backend", "cosine+qmf", "--calibration", "none")
    (row,) = rows_of(exp, "--backend", "cosine", "--calibration", "none")
    assert row["cllr"] is None and row["act_dcf"] is None and row["calibration"] is None


def test_without_held_out_speakers_scores_are_read_by_cross_validation(experiment):
    exp, data = experiment
    with (exp / "model/speakers.txt").open("a") as file:
        file.writelines(f"v{i}\n" for i in range(27))  # all but nine
    (row,) = rows_of(exp, "--backend", "mean+cosine")
    assert row["calibration"] == "test/trials itself, by cross-validation over speakers"
    assert row["min_cllr"] < row["cllr"] < 1
    assert row["act_dcf"] <= 1.3 * row["min_dcf"]["0.01"]
    assert row["intervals"]["cllr"][0] < row["cllr"] < row["intervals"]["cllr"][1]
    with refuses("mean+cosine", "--calibration validation", "10 held-out"):
        rows_of(exp, "--backend", "mean+cosine", "--calibration", "validation")


@pytest.fixture
def few_speakers(experiment):
    """The experiment with seven speakers of the training set and seven of the test set."""
    exp, data = experiment
    for name, letter in (("train", "t"), ("test", "s")):
        stem = exp / "embeddings" / name / "trained"
        table = EmbeddingTable.load(stem)
        kept = [i for i in table.ids if i[0] == letter and int(i[1:].partition("-")[0]) < 7]
        table.select(kept).save(stem)
    path = data / "test/trials"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join(s for s in lines if all(len(i) == 4 and i[1] < "7" for i in s.split()[:2]))
    )
    return exp


def test_back_ends_that_cannot_be_learned_are_skipped_in_one_line(few_speakers, caplog, capsys):
    """Seven speakers: at 30 % EER, mean, AS-Norm and quality measures were worse than cosine."""
    old = row_of(trials="test/trials", system="exp", model_sha256=SHA, eer=0.3)
    old = [old | {"backend": name} for name in (CHAINS[1], f"{CHAINS[2]},top-n=20", "cosine+qmf")]
    older = old[0] | {"trials": "test/older", "model_sha256": "6" * 64}
    (few_speakers / "results.json").write_text(json.dumps([older, *old]))
    found = rows_of(few_speakers, "--backend", *CHAINS, "cosine+qmf", "mean+lda+length+plda")
    row = found.pop()
    assert found == [older] and "test/older" not in capsys.readouterr().out
    assert row["backend"] == "cosine" and row["primary"] and row["num_speakers"] == 7
    assert row["cllr"] is None  # nor is there a calibration
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    page = (few_speakers / "report.html").read_text()
    for spec, reason in (
        ("mean+cosine", "mean: needs at least 50 speakers, got 7"),
        ("mean+cosine+asnorm", "mean: needs at least 50 speakers, got 7"),
        ("mean+cosine+asnorm+qmf", "mean: needs at least 50 speakers, got 7"),
        ("mean+lda+length+plda", "mean: needs at least 50 speakers, got 7"),
        ("test/trials: skipped cosine+qmf", "needs at least 25 speakers here, got 7"),
    ):
        (line,) = [line for line in lines if f"{spec}: " in line]
        assert "skipped" in line and reason in line and line.partition(";")[0] in page
    assert sum("not calibrated" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("spec", "subject", "least"),
    [
        ("mean+cosine", "mean", "50"),
        ("cosine+asnorm", "asnorm", "100"),
        ("cosine+qmf", "calibration", "25"),
    ],
)
def test_a_primary_back_end_that_cannot_be_learned_is_refused(few_speakers, spec, subject, least):
    with refuses(subject, least, "got 7"):
        rows_of(few_speakers, "--backend", spec, "cosine")


def test_the_primary_back_end_is_the_first(experiment):
    exp, _ = experiment
    rows = rows_of(exp, "--backend", "mean+cosine", "cosine")
    assert [(row["backend"], row["primary"]) for row in rows] == [
        *(("mean+cosine", True), ("cosine", False))
    ]
    verdict = (exp / "report.html").read_text().partition("<h2>Results</h2>")[0]
    assert "mean+cosine, the primary of 2 back ends" in verdict
    assert f"{100 * rows[0]['eer']:.2f} %" in verdict


def test_the_cohort_is_of_speakers_that_were_trained_on(experiment):
    exp, data = experiment
    development = read_development(exp, data / "train")
    assert development is not None and development.held_out is not None
    assert {name[0] for name in development.cohort.speaker_M} == {"t"}
    assert {name[0] for name in development.held_out.trials.ids} == {"v"}
    assert len(development.held_out.trials) == 216 * 215 // 2
    assert development.held_out.trials.is_target_N.sum() == 36 * 15
    assert read_development(exp, data / "other") is None


def test_averaged_enrolment(experiment):
    exp, data = experiment
    folder = data / "test"
    (folder / "enroll.map").write_text("s0-enroll s0-0 s0-1\ns1-enroll s1-2\n")
    (folder / "trials_average").write_text(
        "s0-enroll s0-2 target\ns0-enroll s1-0 nontarget\ns1-enroll s1-1 target\n"
        "s1-enroll s0-3 nontarget\ns0-3 s0-2 target\n"
    )
    listed = read_trial_list(folder / "trials_average")
    assert "a model of 1 to 2 utterances" in listed.protocol
    assert listed.speakers[0].tolist() == [0, 0, 1, 1, 0]
    assert listed.speakers[1].tolist() == [0, 1, 1, 0, 0]
    assert listed.columns["gender"]["s0-enroll"] == "m"
    assert "s0-enroll" not in listed.columns["device"] and "s1-enroll" in listed.columns["device"]
    table = EmbeddingTable.load(exp / "embeddings/test/trained")
    enrol, _ = listed.tables(table)
    emb = dict(zip(table.ids, table.emb_ND))
    by_hand = {
        "s0-enroll": (emb["s0-0"] + emb["s0-1"]) / 2,
        "s1-enroll": emb["s1-2"],
        "s0-3": emb["s0-3"],
    }
    for name, row_D in zip(enrol.ids, enrol.emb_ND):
        np.testing.assert_allclose(row_D, by_hand[name], rtol=1e-6)
    seconds = listed.seconds
    assert seconds["s0-enroll"] == pytest.approx(seconds["s0-0"] + seconds["s0-1"])


def test_compare_prints_the_differences(experiment, capsys):
    exp, data = experiment
    rows = rows_of(exp, "--backend", *CHAINS[:2])
    capsys.readouterr()
    files = [str(exp / "scores" / f"test_trials{end}.txt") for end in ("", "_mean+cosine")]
    compare.main(["--trials", str(data / "test/trials"), *files, "--far", "0.01"])
    first, second = capsys.readouterr().out.split(files[1] + "\n")
    assert f"EER           {100 * rows[0]['eer']:.2f} %" in first and "threshold" in first
    change = 100 * (rows[1]["eer"] - rows[0]["eer"])
    assert f"EER           {change:+.2f} % (" in second and f"against {files[0]}, p = " in second


def test_stored_calibration_is_that_of_plain_cosine_scores(experiment):
    exp, data = experiment
    stored = {"slope": 9.0, "intercept": -3.0, "threshold": 0.4, "threshold_at_far": {}}
    facts = {"eer": 0.1, "num_target": 5, "num_nontarget": 50, "source": "5 voices"}
    (exp / "model/calibration.json").write_text(json.dumps(stored | facts))
    plain, centred = rows_of(exp, "--backend", "cosine", "mean+cosine")
    trials = read_trials(data / "test/trials")
    scores = read_scores(exp / "scores/test_trials.txt", trials)
    assert plain["cllr"] == pytest.approx(cllr(9 * scores - 3, trials.is_target_N), abs=1e-4)
    assert plain["act_dcf"] == pytest.approx(act_dcf(9 * scores - 3, trials.is_target_N), abs=1e-2)
    assert plain["calibration"] == "the model's own calibration (5 voices)"
    assert plain["at_threshold"]["threshold"] == 0.4
    assert centred["at_threshold"] is None and "held-out" in centred["calibration"]
    rows = rows_of(exp, "--backend", "cosine", "--calibration", "none")
    (raw,) = (row for row in rows if row["backend"] == "cosine")
    assert (raw["calibration"], raw["cllr"], raw["act_dcf"]) == (None, None, None)


def test_embeddings_of_another_model_are_refused(experiment):
    exp, _ = experiment
    (exp / "model/card.json").write_text(json.dumps({"sha256": "6" * 64, **SIZES}))
    with refuses(str(exp / "embeddings/test/trained"), "555555555555", "666666666666"):
        rows_of(exp)


def test_a_truth_that_the_speakers_contradict_is_named(experiment):
    exp, data = experiment
    path = data / "test/trials"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:8], lines[8].replace("nontarget", "target"), *lines[9:]]))
    with refuses(str(path), "trial 9", "s1-0 is of s1", "s0-2 of s0"):
        rows_of(exp)
    path.write_text("s0-0 s0-1 target\ns0-0 s0-2 nontarget\n")
    with refuses(str(path), "trial 2", "s0-0", "s0-2"):
        rows_of(exp)
    path.write_text("s0-0 s0-1 target\n")
    with refuses(str(path), "1 of 1 trials"):
        rows_of(exp)


def test_incomplete_properties_are_logged(experiment, caplog):
    caplog.set_level("INFO")
    exp, data = experiment
    (data / "test/spk2gender").write_text("".join(f"s{i} m\n" for i in range(20)))
    (data / "test/enroll.map").write_text("m s0-0 s0-1\n")
    with (data / "test/trials").open("a") as file:
        file.write("m s0-1 target\ns3-0 s3-0 target\n")
    listed = read_trial_list(data / "test/trials")
    assert "test/gender: lacks 96 of 177 utterances and models" in caplog.text
    assert "in 2 trials the test utterance is also enrolled" in caplog.text
    assert len(listed.trials) == 176 * 175 // 2 + 2


def test_options_that_cannot_be_are_refused(experiment):
    for option, value in (("--p-target", "0"), ("--development", "elsewhere")):
        with refuses(option, value):
            rows_of(experiment[0], option, value)


def test_a_training_set_that_shrank_leaves_cosine_alone(experiment, caplog):
    exp, data = experiment
    kept = [line for line in (data / "train/utt2spk").open() if not line.startswith("t7-")]
    (data / "train/utt2spk").write_text("".join(kept))
    assert rows_of(exp)[0]["backend"] == "cosine"
    assert f"{data}/train/utt2spk: lacks the embedded utterance t7-" in caplog.text
    with refuses("backend", "mean"):
        rows_of(exp, "--backend", "mean+cosine")


def test_a_number_sign_in_speakers_is_not_that_of_a_speed(tmp_path):
    exp, data = make_experiment(tmp_path)
    names, table = exp / "model/speakers.txt", data / "train/utt2spk"
    names.write_text("".join(f"a#{line}\n" for line in names.read_text().split()))
    table.write_text(table.read_text().replace(" ", " a#"))
    development = read_development(exp, data / "train")
    assert development is not None and len(set(development.cohort.speaker_M)) == 100
