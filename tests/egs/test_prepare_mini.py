"""The mini corpus: reproducible synthesis, data directories and trials."""

import filecmp
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from refusals import refused

from egs.mini import making, sound

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "egs/mini/prepare.py"


def make(folder, *extra):
    command = [sys.executable, str(SCRIPT), "--corpus", str(folder / "corpus")]
    command += ["--data", str(folder / "data"), "--train-voices", "2", "--test-voices", "2"]
    return subprocess.run(
        [*command, "--utterances", "2", *extra], capture_output=True, text=True, cwd=ROOT
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory, espeak):
    folder = tmp_path_factory.mktemp("mini")
    result = make(folder, "--num-jobs", "2")
    assert result.returncode == 0, result.stderr
    return folder


def test_same_seed_gives_the_same_bytes_for_any_number_of_jobs(made, tmp_path):
    assert make(tmp_path, "--num-jobs", "1").returncode == 0
    names = sorted(p.relative_to(made) for p in (made / "corpus").rglob("*") if p.is_file())
    assert len(names) == 4 * 2 + 12 + 12 + 1
    match, mismatch, errors = filecmp.cmpfiles(
        made, tmp_path, [str(name) for name in names], shallow=False
    )
    assert (len(match), mismatch, errors) == (33, [], [])
    assert not (made / "corpus/.part").exists()


@pytest.mark.slow
def test_another_seed_gives_another_corpus_and_the_same_one_is_left_alone(made, tmp_path):
    other = make(tmp_path, "--seed", "2")
    assert "synthesizing" in other.stdout
    wav = "corpus/train/spk000/spk000-00.wav"
    assert (tmp_path / wav).read_bytes() != (made / wav).read_bytes()
    before = (tmp_path / wav).stat().st_mtime_ns
    again = make(tmp_path, "--seed", "2")
    assert again.returncode == 0 and "synthesizing" not in again.stdout
    assert (tmp_path / wav).stat().st_mtime_ns == before


def test_audio_is_speech_of_sensible_length_level_and_band(made):
    for path in sorted((made / "corpus").glob("t*/*/*.wav")):
        info = soundfile.info(path)
        assert (info.samplerate, info.channels, info.subtype) == (16000, 1, "PCM_16")
        wave, _ = soundfile.read(path)
        assert 2.5 < len(wave) / 16000 < 6.0
        assert -45 < 20 * np.log10(np.sqrt(np.mean(wave**2))) < -10
        power = np.abs(np.fft.rfft(wave)) ** 2
        low = power[: len(power) // 4].sum() / power.sum()  # below 2 kHz
        assert 0.5 < low < 0.9999
    noises = sorted((made / "corpus/noise").glob("*.wav"))
    assert [soundfile.info(path).frames for path in noises] == [160_000] * 12
    for path in (made / "corpus/rirs").glob("*.wav"):
        wave, _ = soundfile.read(path)
        assert np.argmax(np.abs(wave)) == 0 and 0.1 < len(wave) / 16000 < 1.0


def test_data_directories_name_every_utterance_and_keep_speakers_apart(made):
    for split, names in (("train", ("spk000", "spk001")), ("test", ("spk002", "spk003"))):
        expected = [f"{name}-{k:02d}" for name in names for k in range(2)]
        rows = [r.split() for r in (made / f"data/{split}/utt2spk").read_text().splitlines()]
        assert rows == [[utterance, utterance[:6]] for utterance in expected]
        wavs = [r.split() for r in (made / f"data/{split}/wav.scp").read_text().splitlines()]
        corpus = (made / "corpus").resolve()
        assert wavs == [[u, f"{corpus}/{split}/{u[:6]}/{u}.wav"] for u in expected]
    trials = (made / "data/test/trials").read_text().splitlines()
    assert trials == [
        "spk002-00 spk002-01 target",
        "spk002-00 spk003-00 nontarget",
        "spk002-00 spk003-01 nontarget",
        "spk002-01 spk003-00 nontarget",
        "spk002-01 spk003-01 nontarget",
        "spk003-00 spk003-01 target",
    ]
    assert len((made / "data/noise/wav.scp").read_text().splitlines()) == 12
    assert len((made / "data/rirs/wav.scp").read_text().splitlines()) == 12


def test_another_folder_is_never_replaced(prepare, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/thesis.txt").write_text("mine")
    error = prepare("mini", tmp_path / "corpus", tmp_path / "data", code=1)
    assert refused(error, tmp_path / "corpus", "corpus.json")
    assert (tmp_path / "corpus/thesis.txt").read_text() == "mine"


def test_a_size_without_trials_is_refused(prepare, tmp_path):
    error = prepare("mini", tmp_path / "corpus", tmp_path, "--test-voices", 1, code=1)
    assert refused(error, "num_test_voices", 1)


def test_default_size_and_trials(recipe):
    mini = recipe("mini")
    voices, utterances = making.plan(making.Size())
    sizes = Counter(utterance.split for utterance in utterances)
    assert (len(voices), sizes["train"], sizes["test"]) == (104, 960, 288)
    assert len({voice.variant for voice in voices.values()}) == 104
    speakers = {u.id: u.speaker for u in utterances if u.split == "test"}
    sexes = {name: voice.sex for name, voice in voices.items()}
    trials = mini.make_trials(speakers, sexes, seed=1)
    assert trials == mini.make_trials(speakers, sexes, seed=1) == sorted(set(trials))
    assert trials != mini.make_trials(speakers, sexes, seed=2)
    kinds = Counter(
        "target" if same else "one sex" if sexes[a[:6]] == sexes[b[:6]] else "two sexes"
        for a, b, same in trials
    )
    assert kinds == {"target": 24 * 63, "one sex": 3000, "two sexes": 3000}
    assert all((speakers[a] == speakers[b]) == same and a != b for a, b, same in trials)


def test_voices_do_not_depend_on_how_many_there_are():
    few, _ = making.plan(making.Size(num_train_voices=3, num_test_voices=2, num_utterances=2))
    many, _ = making.plan(making.Size())
    assert few == {name: many[name] for name in few}


def test_coloured_noise_falls_by_its_slope():
    rng = np.random.default_rng(0)
    pink = sound.coloured_noise(rng, 160_000, slope_db=-3.0)
    assert len(pink) == 160_000 and np.mean(pink**2) == pytest.approx(1.0)
    power = np.abs(np.fft.rfft(pink)) ** 2
    hz = np.fft.rfftfreq(len(pink), 1 / 16000)
    octaves = [power[(hz > f) & (hz < 2 * f)].mean() for f in (250, 500, 1000, 2000)]
    assert 10 * np.log10(octaves[0] / octaves[3]) == pytest.approx(9.0, abs=0.5)
