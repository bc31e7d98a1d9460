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
RATE = 16_000
SPEAKERS = {
    "train": ("spk000", "spk001"),
    "test": ("spk002", "spk003"),
}


def make(folder, *extra):
    """Run the script for two speakers in each set with two utterances each."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--corpus",
        str(folder / "corpus"),
        "--data",
        str(folder / "data"),
        "--train-voices",
        "2",
        "--test-voices",
        "2",
        "--utterances",
        "2",
        *extra,
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def read_rows(path):
    """Return the columns of each line of a table."""
    return [line.split() for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory, espeak):
    folder = tmp_path_factory.mktemp("mini")
    result = make(folder, "--num-jobs", "2")
    assert result.returncode == 0, result.stderr
    return folder


def test_same_seed_gives_the_same_bytes_for_any_number_of_jobs(made, tmp_path):
    assert make(tmp_path, "--num-jobs", "1").returncode == 0
    paths = [path for path in (made / "corpus").rglob("*") if path.is_file()]
    names = sorted(str(path.relative_to(made)) for path in paths)

    # 4 speakers x 2 utterances, 12 noises, 12 rooms, and corpus.json.
    num_files = 4 * 2 + 12 + 12 + 1
    assert len(names) == num_files
    match, mismatch, errors = filecmp.cmpfiles(made, tmp_path, names, shallow=False)
    assert len(match) == num_files
    assert mismatch == []
    assert errors == []
    assert not (made / "corpus/.part").exists()


@pytest.mark.slow
def test_another_seed_gives_another_corpus_and_the_same_one_is_left_alone(
    made, tmp_path
):
    other = make(tmp_path, "--seed", "2")
    assert "synthesizing" in other.stdout
    wav = "corpus/train/spk000/spk000-00.wav"
    assert (tmp_path / wav).read_bytes() != (made / wav).read_bytes()
    before = (tmp_path / wav).stat().st_mtime_ns
    again = make(tmp_path, "--seed", "2")
    assert again.returncode == 0
    assert "synthesizing" not in again.stdout
    assert (tmp_path / wav).stat().st_mtime_ns == before


def test_audio_is_speech_of_sensible_length_level_and_band(made):
    for path in sorted((made / "corpus").glob("t*/*/*.wav")):
        info = soundfile.info(path)
        assert info.samplerate == RATE
        assert info.channels == 1
        assert info.subtype == "PCM_16"

        wave_S, _ = soundfile.read(path)
        seconds = len(wave_S) / RATE
        assert 2.5 < seconds < 6.0
        level_db = 20 * np.log10(np.sqrt(np.mean(wave_S**2)))
        assert -45 < level_db < -10

        # The share of the power below 2 kHz, a quarter of the spectrum.
        power = np.abs(np.fft.rfft(wave_S)) ** 2
        low_power = power[: len(power) // 4]
        assert 0.5 < low_power.sum() / power.sum() < 0.9999

    noises = sorted((made / "corpus/noise").glob("*.wav"))
    lengths = [soundfile.info(path).frames for path in noises]
    assert lengths == [10 * RATE] * 12
    for path in (made / "corpus/rirs").glob("*.wav"):
        wave_S, _ = soundfile.read(path)
        # The direct sound comes first: reverberation does not shift the speech.
        assert np.argmax(np.abs(wave_S)) == 0
        assert 0.1 < len(wave_S) / RATE < 1.0


def test_data_directories_name_every_utterance_and_keep_speakers_apart(made):
    corpus = (made / "corpus").resolve()
    for split, speakers in SPEAKERS.items():
        utt2spk = []
        wav_scp = []
        for speaker in speakers:
            for name in (f"{speaker}-00", f"{speaker}-01"):
                utt2spk.append([name, speaker])
                wav_scp.append([name, f"{corpus}/{split}/{speaker}/{name}.wav"])
        assert read_rows(made / f"data/{split}/utt2spk") == utt2spk
        assert read_rows(made / f"data/{split}/wav.scp") == wav_scp

    trials = (made / "data/test/trials").read_text().splitlines()
    assert trials == [
        "spk002-00 spk002-01 target",
        "spk002-00 spk003-00 nontarget",
        "spk002-00 spk003-01 nontarget",
        "spk002-01 spk003-00 nontarget",
        "spk002-01 spk003-01 nontarget",
        "spk003-00 spk003-01 target",
    ]
    assert len(read_rows(made / "data/noise/wav.scp")) == 12
    assert len(read_rows(made / "data/rirs/wav.scp")) == 12


def test_another_folder_is_never_replaced(prepare, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "thesis.txt").write_text("mine")
    error = prepare("mini", corpus, tmp_path / "data", code=1)
    assert refused(error, corpus, "corpus.json")
    assert (corpus / "thesis.txt").read_text() == "mine"


def test_a_size_without_trials_is_refused(prepare, tmp_path):
    options = ("--test-voices", 1)
    error = prepare("mini", tmp_path / "corpus", tmp_path, *options, code=1)
    assert refused(error, "num_test_voices", 1)


def kind_of_trial(trial, sexes):
    enrol, test, is_target = trial
    if is_target:
        return "target"
    # The name of a speaker has six letters.
    enrol_sex = sexes[enrol[:6]]
    test_sex = sexes[test[:6]]
    return "one sex" if enrol_sex == test_sex else "two sexes"


def test_default_size_and_trials(recipe):
    mini = recipe("mini")
    voices, utterances = making.plan(making.Size())
    sizes = Counter(utterance.split for utterance in utterances)
    assert len(voices) == 104
    assert sizes["train"] == 960
    assert sizes["test"] == 288
    variants = {voice.variant for voice in voices.values()}
    assert len(variants) == 104

    test_set = [utterance for utterance in utterances if utterance.split == "test"]
    speakers = {utterance.id: utterance.speaker for utterance in test_set}
    sexes = {name: voice.sex for name, voice in voices.items()}
    trials = mini.make_trials(speakers, sexes, seed=1)
    assert trials == mini.make_trials(speakers, sexes, seed=1)
    assert trials == sorted(set(trials))
    assert trials != mini.make_trials(speakers, sexes, seed=2)

    kinds = Counter(kind_of_trial(trial, sexes) for trial in trials)
    # Each of 24 speakers has 63 target trials.
    assert kinds == {
        "target": 24 * 63,
        "one sex": 3000,
        "two sexes": 3000,
    }
    for enrol, test, is_target in trials:
        assert enrol != test
        assert is_target == (speakers[enrol] == speakers[test])


def test_voices_do_not_depend_on_how_many_there_are():
    small = making.Size(num_train_voices=3, num_test_voices=2, num_utterances=2)
    few_voices, _ = making.plan(small)
    all_voices, _ = making.plan(making.Size())
    for name, voice in few_voices.items():
        assert voice == all_voices[name]


def test_coloured_noise_falls_by_its_slope():
    rng = np.random.default_rng(0)
    pink = sound.coloured_noise(rng, 160_000, slope_db=-3.0)
    assert len(pink) == 160_000
    assert np.mean(pink**2) == pytest.approx(1.0)
    # The power falls by 3 dB in each of the three octaves.
    power = np.abs(np.fft.rfft(pink)) ** 2
    hz = np.fft.rfftfreq(len(pink), 1 / RATE)
    low = power[(hz > 250) & (hz < 500)].mean()
    high = power[(hz > 2000) & (hz < 4000)].mean()
    fall_db = 10 * np.log10(low / high)
    assert fall_db == pytest.approx(9.0, abs=0.5)
