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
    with_cohort = [f"{name},top-n=20" for name in CHAINS[2:]]
    backends = [*CHAINS[:2], *with_cohort]
    assert [row["backend"] for row in rows] == backends
    table = capsys.readouterr().out
    assert table.count("test/trials") == 4

    # cosine, the first, is in the file without a suffix
    files = ["test_trials.txt"]
    for backend in backends[1:]:
        files.append(f"test_trials_{backend}.txt")
    trials = read_trials(data / "test/trials")
    is_target_N = trials.is_target_N
    for row, name in zip(rows, files):
        scores = read_scores(exp / "scores" / name, trials)
        expected_eer = eer(scores, is_target_N)
        assert row["eer"] == pytest.approx(expected_eer, abs=2e-4)
        low, high = row["eer_ci95"]
        assert low < row["eer"] < high
        expected_dcf = min_dcf(scores, is_target_N, p_target=0.05)
        dcf = row["min_dcf"]["0.05"]
        assert dcf == pytest.approx(expected_dcf, abs=1e-2)
        assert row["min_cllr"] < 1
        assert row["model_sha256"] == SHA

    plain, centred, normed, measured = rows
    # all embeddings share an offset, which the mean takes away
    assert centred["eer"] < plain["eer"]
    assert plain["compared"] is None
    compared = centred["compared"]
    assert compared["with"] == "cosine"
    difference = centred["eer"] - plain["eer"]
    assert compared["eer_difference"] == difference
    assert compared["ci95"][1] < 0
    assert compared["p_value"] < 0.05

    # short utterances are noisier here, so quality measures help
    assert measured["cllr"] < normed["cllr"] < 1
    assert measured["calibration"] == "train: 36 held-out speakers"
    assert "20 " in normed["protocol"]
    assert "100 " in normed["protocol"]
    conditions = {row["condition"] for row in normed["conditions"]}
    assert conditions == {"device", "gender", "shorter side"}


def test_qmf_needs_something_to_learn_from(experiment):
    exp, _ = experiment
    with refuses("cosine+qmf", "--calibration none"):
        rows_of(exp, "--backend", "cosine+qmf", "--calibration", "none")
    (row,) = rows_of(exp, "--backend", "cosine", "--calibration", "none")
    assert row["cllr"] is None
    assert row["act_dcf"] is None
    assert row["calibration"] is None


def test_without_held_out_speakers_scores_are_read_by_cross_validation(experiment):
    exp, data = experiment
    # all but nine speakers of validation
    speakers = [f"v{i}\n" for i in range(27)]
    with (exp / "model/speakers.txt").open("a") as file:
        file.writelines(speakers)
    (row,) = rows_of(exp, "--backend", "mean+cosine")
    assert row["calibration"] == "test/trials itself, by cross-validation over speakers"
    assert row["min_cllr"] < row["cllr"] < 1
    assert row["act_dcf"] <= 1.3 * row["min_dcf"]["0.01"]
    low, high = row["intervals"]["cllr"]
    assert low < row["cllr"] < high

    options = ["--backend", "mean+cosine", "--calibration", "validation"]
    with refuses("mean+cosine", "--calibration validation", "10 held-out"):
        rows_of(exp, *options)


@pytest.fixture
def few_speakers(experiment):
    """The experiment with seven speakers of the training set and seven of the test set."""
    exp, data = experiment
    for name, letter in [("train", "t"), ("test", "s")]:
        stem = exp / "embeddings" / name / "trained"
        table = EmbeddingTable.load(stem)
        remaining = []
        for utterance in table.ids:
            speaker = utterance.partition("-")[0]
            if speaker[0] == letter and int(speaker[1:]) < 7:
                remaining.append(utterance)
        table.select(remaining).save(stem)

    # ids of the trials that remain are like s6-0
    path = data / "test/trials"
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        enrol, test, _ = line.split()
        is_first = len(enrol) == 4 and enrol[1] < "7"
        is_second = len(test) == 4 and test[1] < "7"
        if is_first and is_second:
            lines.append(line)
    path.write_text("".join(lines))
    return exp


def test_back_ends_that_cannot_be_learned_are_skipped_in_one_line(
    few_speakers, caplog, capsys
):
    """Seven speakers: at 30 % EER, mean, AS-Norm and quality measures were worse than cosine."""
    row = row_of(
        trials="test/trials",
        system="exp",
        model_sha256=SHA,
        eer=0.3,
    )
    rows_before = []
    for backend in (CHAINS[1], f"{CHAINS[2]},top-n=20", "cosine+qmf"):
        rows_before.append(row | {"backend": backend})
    older = rows_before[0] | {
        "trials": "test/older",
        "model_sha256": "6" * 64,
    }
    content = json.dumps([older, *rows_before])
    (few_speakers / "results.json").write_text(content)
    rows = rows_of(
        few_speakers,
        "--backend",
        *CHAINS,
        "cosine+qmf",
        "mean+lda+length+plda",
    )

    # rows of this model by back ends that were skipped are gone
    row = rows.pop()
    assert rows == [older]
    assert "test/older" not in capsys.readouterr().out
    assert row["backend"] == "cosine"
    assert row["primary"]
    assert row["num_speakers"] == 7
    # nor is there a calibration
    assert row["cllr"] is None
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    page = (few_speakers / "report.html").read_text()
    for spec, reason in (
        ("mean+cosine", "mean: needs at least 50 speakers, got 7"),
        ("mean+cosine+asnorm", "mean: needs at least 50 speakers, got 7"),
        ("mean+cosine+asnorm+qmf", "mean: needs at least 50 speakers, got 7"),
        ("mean+lda+length+plda", "mean: needs at least 50 speakers, got 7"),
        ("test/trials: skipped cosine+qmf", "needs at least 25 speakers here, got 7"),
    ):
        matching = [line for line in lines if f"{spec}: " in line]
        (line,) = matching
        assert "skipped" in line
        assert reason in line
        assert line.partition(";")[0] in page
    num_not_calibrated = sum("not calibrated" in line for line in lines)
    assert num_not_calibrated == 1


@pytest.mark.parametrize(
    ("spec", "subject", "least"),
    [
        ("mean+cosine", "mean", "50"),
        ("cosine+asnorm", "asnorm", "100"),
        ("cosine+qmf", "calibration", "25"),
    ],
)
def test_a_primary_back_end_that_cannot_be_learned_is_refused(
    few_speakers, spec, subject, least
):
    with refuses(subject, least, "got 7"):
        rows_of(few_speakers, "--backend", spec, "cosine")


def test_the_primary_back_end_is_the_first(experiment):
    exp, _ = experiment
    rows = rows_of(exp, "--backend", "mean+cosine", "cosine")
    first, second = rows
    assert first["backend"] == "mean+cosine"
    assert first["primary"]
    assert second["backend"] == "cosine"
    assert not second["primary"]
    page = (exp / "report.html").read_text()
    verdict = page.partition("<h2>Results</h2>")[0]
    assert "mean+cosine, the primary of 2 back ends" in verdict
    assert f"{100 * first['eer']:.2f} %" in verdict


def test_the_cohort_is_of_speakers_that_were_trained_on(experiment):
    exp, data = experiment
    development = read_development(exp, data / "train")
    assert development is not None
    assert development.held_out is not None
    cohort_letters = {name[0] for name in development.cohort.speaker_M}
    assert cohort_letters == {"t"}

    trials = development.held_out.trials
    held_out_letters = {name[0] for name in trials.ids}
    assert held_out_letters == {"v"}
    assert len(trials) == 216 * 215 // 2
    assert trials.is_target_N.sum() == 36 * 15
    assert read_development(exp, data / "other") is None


def test_no_back_end_is_learned_from_speakers_of_the_trials(experiment):
    exp, data = experiment
    table = data / "test/utt2spk"
    # A speaker of the test set has the name of one of the training set.
    table.write_text(table.read_text().replace(" s1\n", " t1\n"))
    with refuses(str(data / "test/trials"), "1 speaker", "t1", "--development"):
        rows_of(exp, "--backend", "cosine+asnorm")
    # Plain cosine learns nothing.
    assert rows_of(exp, "--backend", "cosine")


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
    enrol_speakers, test_speakers = listed.speakers
    assert enrol_speakers.tolist() == [0, 0, 1, 1, 0]
    assert test_speakers.tolist() == [0, 1, 1, 0, 0]
    assert listed.columns["gender"]["s0-enroll"] == "m"
    assert "s0-enroll" not in listed.columns["device"]
    assert "s1-enroll" in listed.columns["device"]

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
    expected_seconds = seconds["s0-0"] + seconds["s0-1"]
    assert seconds["s0-enroll"] == pytest.approx(expected_seconds)


def test_compare_prints_the_differences(experiment, capsys):
    exp, data = experiment
    rows = rows_of(exp, "--backend", *CHAINS[:2])
    capsys.readouterr()
    files = [
        str(exp / "scores/test_trials.txt"),
        str(exp / "scores/test_trials_mean+cosine.txt"),
    ]
    trials = str(data / "test/trials")
    compare.main(["--trials", trials, *files, "--far", "0.01"])
    printed = capsys.readouterr().out
    first, second = printed.split(files[1] + "\n")
    assert f"EER           {100 * rows[0]['eer']:.2f} %" in first
    assert "threshold" in first
    change = 100 * (rows[1]["eer"] - rows[0]["eer"])
    assert f"EER           {change:+.2f} points (" in second
    assert f"against {files[0]}, p = " in second


def test_stored_calibration_is_that_of_plain_cosine_scores(experiment):
    exp, data = experiment
    stored = {
        "slope": 9.0,
        "intercept": -3.0,
        "threshold": 0.4,
        "threshold_at_far": {},
        "eer": 0.1,
        "num_target": 5,
        "num_nontarget": 50,
        "source": "5 voices",
    }
    content = json.dumps(stored)
    (exp / "model/calibration.json").write_text(content)
    plain, centred = rows_of(exp, "--backend", "cosine", "mean+cosine")
    trials = read_trials(data / "test/trials")
    scores = read_scores(exp / "scores/test_trials.txt", trials)
    llr_N = 9 * scores - 3
    expected_cllr = cllr(llr_N, trials.is_target_N)
    assert plain["cllr"] == pytest.approx(expected_cllr, abs=1e-4)
    expected_dcf = act_dcf(llr_N, trials.is_target_N)
    assert plain["act_dcf"] == pytest.approx(expected_dcf, abs=1e-2)
    assert plain["calibration"] == "the model's own calibration (5 voices)"
    assert plain["at_threshold"]["threshold"] == 0.4
    assert centred["at_threshold"] is None
    assert "held-out" in centred["calibration"]

    rows = rows_of(exp, "--backend", "cosine", "--calibration", "none")
    (raw,) = [row for row in rows if row["backend"] == "cosine"]
    assert raw["calibration"] is None
    assert raw["cllr"] is None
    assert raw["act_dcf"] is None


def test_embeddings_of_another_model_are_refused(experiment):
    exp, _ = experiment
    card = {"sha256": "6" * 64, **SIZES}
    (exp / "model/card.json").write_text(json.dumps(card))
    stem = exp / "embeddings/test/trained"
    with refuses(str(stem), "555555555555", "666666666666"):
        rows_of(exp)


def test_a_truth_that_the_speakers_contradict_is_named(experiment):
    exp, data = experiment
    path = data / "test/trials"
    lines = path.read_text().splitlines()
    lines[8] = lines[8].replace("nontarget", "target")
    path.write_text("\n".join(lines))
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
    genders = [f"s{i} m\n" for i in range(20)]
    (data / "test/spk2gender").write_text("".join(genders))
    (data / "test/enroll.map").write_text("m s0-0 s0-1\n")
    with (data / "test/trials").open("a") as file:
        file.write("m s0-1 target\ns3-0 s3-0 target\n")
    listed = read_trial_list(data / "test/trials")
    assert "test/gender: lacks 96 of 177 utterances and models" in caplog.text
    assert "in 2 trials the test utterance is also enrolled" in caplog.text
    num_pairs = 176 * 175 // 2
    assert len(listed.trials) == num_pairs + 2


def test_options_that_cannot_be_are_refused(experiment):
    with refuses("--development", "elsewhere"):
        rows_of(experiment[0], "--development", "elsewhere")


def test_a_training_set_that_shrank_leaves_cosine_alone(experiment, caplog):
    exp, data = experiment
    table = data / "train/utt2spk"
    lines = table.read_text().splitlines(keepends=True)
    remaining = [line for line in lines if not line.startswith("t7-")]
    table.write_text("".join(remaining))
    assert rows_of(exp)[0]["backend"] == "cosine"
    assert f"{table}: lacks the embedded utterance t7-" in caplog.text
    with refuses("backend", "mean"):
        rows_of(exp, "--backend", "mean+cosine")


def test_a_number_sign_in_speakers_is_not_that_of_a_speed(tmp_path):
    exp, data = make_experiment(tmp_path)
    names = exp / "model/speakers.txt"
    table = data / "train/utt2spk"
    renamed = [f"a#{name}\n" for name in names.read_text().split()]
    names.write_text("".join(renamed))
    table.write_text(table.read_text().replace(" ", " a#"))
    development = read_development(exp, data / "train")
    assert development is not None
    speakers = set(development.cohort.speaker_M)
    assert len(speakers) == 100
