"""Wrong input ends a command with one clear line for each fault, and exit code 1."""

import numpy as np
from corrupted_audio import encoded
from refusals import refused
from tiny import copy_data

from speakerlab.data import audio

WAVE = (np.random.default_rng(0).standard_normal(32000) * 3000).astype(np.int16)


def test_check_names_every_fault_of_a_corpus(data, tmp_path, run):
    copy = copy_data(data, tmp_path / "data")
    wav, scp, trials = copy / "wav", copy / "train/wav.scp", copy / "test/trials"
    (wav / "spk0-0.wav").unlink()
    flac = encoded(WAVE, "FLAC")
    (wav / "spk0-1.wav").write_bytes(flac[: len(flac) // 2])
    audio.write(wav / "spk0-2.wav", WAVE[:0], 16000)
    audio.write(wav / "spk1-0.wav", WAVE, 8000)
    scp.write_text(scp.read_text() + scp.read_text().splitlines()[0] + "\n")
    trials.write_text(trials.read_text() + "spk8-0 nobody nontarget\n")
    found = run("-m", "speakerlab", "check", copy / "train", copy / "test", "--decode", code=1)
    faults = [
        (wav / "spk0-0.wav", "no such file"),
        (wav / "spk0-1.wav", "decoded"),
        (wav / "spk0-2.wav", "0 samples"),
        (wav / "spk1-0.wav", 8000),
        (f"{scp}:25", "spk0-0"),
        (f"{trials}:67", "nobody"),
        (f"{copy}/train, {copy}/test", "utt2dur"),
    ]
    for subject, value in faults:
        assert refused(found.stderr, str(subject), value), found.stderr
    assert len(found.stderr.splitlines()) == len(faults)


def test_the_first_channel_of_a_stereo_file_is_read_and_reported(data, tmp_path, run):
    copy = copy_data(data, tmp_path / "data")
    path = copy / "wav/spk0-0.wav"
    audio.write(path, np.stack([WAVE, np.zeros_like(WAVE)], 1), 16000)
    found = run("-m", "speakerlab", "check", copy / "train", copy / "test", "--decode")
    (line,) = (line for line in found.stderr.splitlines() if " channels" in line)
    assert f"{copy}/train: " in line and "spk0-0" in line
    assert np.array_equal(audio.read(path), WAVE)


def test_an_unknown_configuration_key_names_the_nearest(train, tmp_path):
    found = train(tmp_path / "exp", "training.num_epoch=3", code=1)
    assert refused(found.stderr, "--set training.num_epoch=3", "num_epochs")


def test_an_error_of_the_system_is_one_line(tmp_path, run):
    (tmp_path / "file").touch()
    found = run("-m", "speakerlab", "pack", tmp_path / "file/train", code=1)
    assert found.stderr.count("\n") == 1 and f"{tmp_path}/file/train" in found.stderr
