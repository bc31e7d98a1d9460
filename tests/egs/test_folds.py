"""Cross-validation over few speakers: the folds, and the pooled scores."""

import json

import numpy as np
import pytest
from refusals import refuses
from voices import RATE, make_wave

from egs.own import folds
from speakerlab.checkpoints.model_files import embeddings_stem, read_card
from speakerlab.data import audio
from speakerlab.data.tables import read_table, write_data_dir
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.score_files import read_scores
from speakerlab.scoring.trials import read_trials


def write_prepared(data, num_speakers: int, *, num_single: int = 0):
    """Write data/train as stage 1 does; the last speakers have one recording."""
    wavs = {}
    speakers = {}
    for speaker in range(num_speakers + num_single):
        num_takes = 3 if speaker < num_speakers else 1
        for take in range(num_takes):
            name = f"who{speaker}/{take}"
            path = data / f"in/who{speaker}-{take}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            audio.write(path, make_wave(speaker, take, 0.5), RATE)
            wavs[name] = path
            speakers[name] = f"who{speaker}"
    write_data_dir(data / "train", wavs=wavs, speakers=speakers)


def speakers_of(folder):
    return set(read_table(folder / "utt2spk").values())


@pytest.mark.parametrize(("num_speakers", "num_folds"), [(5, 2), (11, 5), (20, 5)])
def test_each_speaker_is_tested_once_by_a_model_that_never_heard_him(
    tmp_path, num_speakers, num_folds
):
    write_prepared(tmp_path, num_speakers, num_single=1)
    folds.split(tmp_path, num_folds)
    everyone = speakers_of(tmp_path / "train")
    assert len(everyone) == num_speakers + 1
    tested = []
    trials = []
    for number in range(1, num_folds + 1):
        folder = tmp_path / f"fold{number}"
        test = speakers_of(folder / "test")
        assert len(test) >= 2
        assert speakers_of(folder / "train") == everyone - test
        tested += sorted(test)
        trials += (folder / "test/trials").read_text().splitlines()
    # A speaker with one recording is never tested.
    assert sorted(tested) == sorted(everyone - {f"who{num_speakers}"})
    assert speakers_of(tmp_path / "all/train") == everyone
    pooled = (tmp_path / "all/test/trials").read_text().splitlines()
    assert sorted(pooled) == sorted(trials)
    kinds = {line.split()[2] for line in pooled}
    assert kinds == {"target", "nontarget"}


def test_the_same_speakers_are_split_once_and_rejected_files_are_left_out(
    tmp_path, capsys
):
    write_prepared(tmp_path, 6)
    folds.split(tmp_path, 3)
    assert "kept" not in capsys.readouterr().out
    folds.split(tmp_path, 3)
    assert "already split into 3 folds, kept" in capsys.readouterr().out

    # The same names at another place.
    (tmp_path / "in").rename(tmp_path / "moved")
    table = tmp_path / "train/wav.scp"
    table.write_text(table.read_text().replace("/in/", "/moved/"))
    folds.split(tmp_path, 3)
    assert "kept" not in capsys.readouterr().out
    assert "/moved/" in read_table(tmp_path / "all/train/wav.scp")["who0/0"]

    path = tmp_path / "moved/who0-0.wav"
    (tmp_path / "train/rejected.tsv").write_text(f"who0/0\t{path}\tis broken\n")
    folds.split(tmp_path, 3)
    assert "who0/0" not in read_table(tmp_path / "all/train/wav.scp")
    assert "who0/1" in read_table(tmp_path / "all/train/wav.scp")


def test_the_folds_share_the_noise_also_if_it_comes_later(tmp_path):
    write_prepared(tmp_path, 6)
    folds.split(tmp_path, 2)
    assert not (tmp_path / "fold1/noise").exists()
    write_data_dir(tmp_path / "noise", wavs={"hum": tmp_path / "in/who0-0.wav"})
    for _ in range(2):
        folds.split(tmp_path, 2)
    for folder in ("fold1", "fold2", "all"):
        assert "hum" in read_table(tmp_path / folder / "noise/wav.scp")
        assert not (tmp_path / folder / "rirs").exists()


def test_too_few_speakers_are_refused_with_the_number_that_works(tmp_path):
    write_prepared(tmp_path / "a", 7)
    with refuses("--folds", 5, "7 of 7", "--folds 3"):
        folds.split(tmp_path / "a", 5)
    write_prepared(tmp_path / "b", 4, num_single=9)
    with pytest.raises(ValueError, match="4 of 13 speakers .* needs 5"):
        folds.split(tmp_path / "b", 2)


def test_pooled_scores_calibrate_the_model_of_all_speakers(
    publish_to, tmp_path, capsys
):
    data = tmp_path / "data"
    write_prepared(data, 6)
    folds.split(data, 3)
    publish_to("exp/model")
    rng = np.random.default_rng(0)
    for number in range(1, 4):
        publish_to(f"exp-fold{number}/model")
        exp = tmp_path / f"exp-fold{number}"
        folder = data / f"fold{number}/test"
        owners = read_table(folder / "utt2spk")
        centres = {who: rng.normal(size=16) for who in sorted(set(owners.values()))}
        for untrained in (True, False):
            noise_ND = rng.normal(size=(len(owners), 16))
            spread = 3.0 if untrained else 0.5
            emb_ND = np.stack([centres[who] for who in owners.values()])
            table = EmbeddingTable(
                list(owners),
                (emb_ND + spread * noise_ND).astype(np.float32),
                model_sha256=read_card(exp)["sha256"],
                facts={},
            )
            table.save(embeddings_stem(exp, "test", untrained=untrained))

    folds.pool(data, 3, tmp_path / "exp")
    trials = read_trials(data / "all/test/trials")
    eers = []
    for name in ("before", "after"):
        scores_N = read_scores(tmp_path / f"exp/folds/{name}.txt", trials)
        eers.append(eer(scores_N, trials.is_target_N))
    assert eers[1] < eers[0]

    stored = json.loads((tmp_path / "exp/model/calibration.json").read_text())
    assert stored["source"] == "cross-validation: 6 speakers in 3 folds"
    assert stored["eer"] == pytest.approx(eers[1], abs=0.01)
    assert "threshold" in capsys.readouterr().out
