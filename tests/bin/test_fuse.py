"""`speakerlab fuse`: the fusion beats its systems, and files that do not fit are refused."""

from itertools import combinations

import numpy as np
import pytest
from named_pipes import piped
from refusals import refuses

from speakerlab.bin.fuse import main
from speakerlab.scoring.metrics import cllr, eer
from speakerlab.scoring.score_files import read_scores, write_scores
from speakerlab.scoring.trials import read_trials


def write_list(folder, *, seed, speakers=24, per_speaker=4):
    """All pairs; two systems whose errors are independent: `a` and `b`, in other units."""
    folder.mkdir()
    ids = [f"s{i // per_speaker:02}-{i}" for i in range(speakers * per_speaker)]
    speaker_of = {name: name[:3] for name in ids}
    lines = []
    for enrol, test in combinations(ids, 2):
        is_target = speaker_of[enrol] == speaker_of[test]
        label = "target" if is_target else "nontarget"
        lines.append(f"{enrol} {test} {label}\n")
    (folder / "trials").write_text("".join(lines))
    table = [f"{name} {speaker}\n" for name, speaker in speaker_of.items()]
    (folder / "utt2spk").write_text("".join(table))
    trials = read_trials(folder / "trials")
    rng = np.random.default_rng(seed)
    for name, unit in (("a", 0.1), ("b", 7.0)):
        # d' is 2.5: each system alone has an EER of Phi(-1.25), which is 11 %.
        scores_N = rng.normal(size=len(trials)) + 2.5 * trials.is_target_N
        write_scores(folder / name, trials, unit * scores_N + 0.3)
    return trials


def fuse(folder, *arguments):
    scores = ["--scores", folder / "a", folder / "b"]
    command = ["--trials", folder / "trials", *scores, "--out", folder / "fused"]
    main([str(argument) for argument in (*command, *arguments)])


def rows_of(text):
    """Return the values of each system: EER, minimum and actual DCF, Cllr."""
    rows = {}
    for line in text.splitlines()[3:]:
        path, *values = line.split()
        name = path.rpartition("/")[2]
        rows[name] = [float(value) for value in values]
    return rows


@pytest.mark.parametrize("learned_from", ["cross-validation", "other speakers"])
def test_a_fusion_of_two_systems_is_better_than_each(tmp_path, capsys, learned_from):
    folder = tmp_path / "test"
    trials = write_list(folder, seed=0)
    arguments = []
    if learned_from == "other speakers":
        # The speakers of the test list are not needed.
        dev = tmp_path / "dev"
        write_list(dev, seed=1)
        (folder / "utt2spk").unlink()
        dev_scores = ["--dev-scores", dev / "a", dev / "b"]
        arguments = ["--dev-trials", dev / "trials", *dev_scores]
    fuse(folder, *arguments)

    rows = rows_of(capsys.readouterr().out)
    eer_fused, min_dcf, act_dcf, cllr_fused = rows["fused"]
    llr_N = read_scores(folder / "fused", trials)
    expected_eer = 100 * eer(llr_N, trials.is_target_N)
    expected_cllr = cllr(llr_N, trials.is_target_N)
    assert eer_fused == pytest.approx(expected_eer, abs=0.006)
    assert cllr_fused == pytest.approx(expected_cllr, abs=0.0006)

    # The systems are independent: d' grows by the root of 2, to an EER of Phi(-1.77).
    eer_alone = min(rows["a"][0], rows["b"][0])
    assert 2 < eer_fused < 6 < eer_alone < 13
    cllr_alone = min(rows["a"][3], rows["b"][3])
    assert cllr_fused < 0.7 * cllr_alone < 0.4
    # The bound is wide, because there are only 144 target trials.
    assert min_dcf <= act_dcf < 1.5 * min_dcf


def test_speakers_may_lie_elsewhere(tmp_path, capsys):
    folder = tmp_path / "test"
    write_list(folder, seed=0)
    fuse(folder)
    beside = (folder / "fused").read_text()
    speakers = tmp_path / "speakers"
    (folder / "utt2spk").rename(speakers)
    with pytest.raises(FileNotFoundError, match="utt2spk: no such file"):
        fuse(folder)
    fuse(folder, "--speakers", speakers)
    assert (folder / "fused").read_text() == beside
    speakers.write_text("s00-0 s00\n")
    with refuses(str(speakers), "s00-1"):
        fuse(folder, "--speakers", speakers)


def test_trials_scores_and_speakers_may_be_pipes(tmp_path, capsys):
    folder = tmp_path / "test"
    write_list(folder, seed=0)
    fuse(folder)
    from_files = (folder / "fused").read_text()
    names = ("trials", "a", "b", "utt2spk")
    with piped(tmp_path, *[folder / name for name in names]) as pipes:
        trials, a, b, speakers = [str(pipe) for pipe in pipes]
        scores = ["--scores", a, b, "--out", str(folder / "fused")]
        main(["--trials", trials, "--speakers", speakers, *scores])
    assert (folder / "fused").read_text() == from_files


@pytest.mark.parametrize(
    ("arguments", "subject", "value"),
    [
        ("--dev-trials FOLDER/trials", "--dev-scores", ""),
        ("--dev-trials FOLDER/trials --dev-scores FOLDER/a", "--dev-scores", ""),
        ("--dev-scores FOLDER/a", "--dev-scores", ""),
        (
            "--speakers FOLDER/utt2spk DEV --dev-trials DEV/trials",
            "--speakers",
            "FOLDER/utt2spk",
        ),
        ("DEV --dev-trials FOLDER/trials", "--dev-trials", "FOLDER/trials"),
        ("--scores FOLDER/a FOLDER/a", "--scores", "FOLDER/a"),
        (
            "--dev-trials DEV/trials --dev-scores DEV/a DEV/a",
            "--dev-scores",
            "given twice",
        ),
        ("--out FOLDER/b", "--out", "FOLDER/b"),
    ],
)
def test_options_and_files_that_do_not_go_together_are_refused(
    tmp_path, arguments, subject, value
):
    folder = tmp_path / "test"
    dev = tmp_path / "dev"
    write_list(folder, seed=0)
    write_list(dev, seed=1)
    before = (folder / "b").read_bytes()
    arguments = arguments.replace("DEV ", "--dev-scores DEV/a DEV/b ")
    arguments = arguments.replace("DEV", str(dev))
    arguments = arguments.replace("FOLDER", str(folder))
    with refuses(subject, value.replace("FOLDER", str(folder))):
        fuse(folder, *arguments.split())
    assert (folder / "b").read_bytes() == before
    assert not (folder / "fused").exists()


def test_scores_of_another_list_are_refused(tmp_path):
    folder = tmp_path / "test"
    write_list(folder, seed=0)
    _, *lines = (folder / "b").read_text().splitlines(keepends=True)
    (folder / "b").write_text("".join(lines))
    with refuses(f"{folder}/b", "s00-0 s00-1"):
        fuse(folder)
    assert not (folder / "fused").exists()
