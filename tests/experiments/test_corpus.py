"""Validation speakers by number; noise by kind, on the device or on the host."""

from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from speakerlab.config import build
from speakerlab.data import audio
from speakerlab.data.dataset import class_names
from speakerlab.data.loader import collate
from speakerlab.data.tables import write_data_dir, write_table
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.corpus import num_valid_speakers, read_corpus


@pytest.mark.parametrize(
    ("num_speakers", "wanted"),
    # the larger of 10 and 1 %, at most a fifth, and none where that is a single speaker
    [(5994, 60), (500, 10), (50, 10), (49, 9), (10, 2), (9, 0), (2, 0)],
)
def test_default_number_of_validation_speakers(make_config, num_speakers, wanted):
    assert num_valid_speakers(make_config(), num_speakers) == wanted


def test_one_validation_speaker_is_refused(make_config):
    with refuses("data.valid_speakers", 1, 2):
        num_valid_speakers(make_config("data.valid_speakers=1"), 100)
    assert num_valid_speakers(make_config("data.valid_speakers=0"), 100) == 0


def test_validation_speakers_are_out_of_training(make_config, make_data_dir):
    folder: Path = make_data_dir(speakers=range(6))
    config = make_config(f"data.dir={folder.parent}", "data.valid_speakers=2")
    corpus = read_corpus(config)
    train, valid = set(corpus.train.speakers), set(corpus.valid.speakers)
    assert (len(train), len(valid)) == (4, 2) and not train & valid
    assert len(corpus.rooms) == len(corpus.noise) == 0


@pytest.fixture
def noisy(make_config, make_data_dir):
    """noisy("runtime.bank_gb=1", ...) -> a configuration with noise of every kind and two rooms."""
    folder: Path = make_data_dir(speakers=range(6))
    root, rng = folder.parent, np.random.default_rng(0)
    for name, kinds in (("noise", BY_KIND), ("rirs", ("room0", "room1"))):
        wavs = {kind: root / "wav" / f"{kind}.wav" for kind in kinds}
        for index, path in enumerate(wavs.values()):
            wave_S = rng.standard_normal(5000 + 7000 * index) * 500 * (index + 1)
            audio.write(path, wave_S.astype(np.int16), 16000)
        write_data_dir(root / name, wavs=wavs)
    write_table(root / "noise" / "utt2kind", {name: name[:-1] for name in BY_KIND})
    return lambda *more: make_config(f"data.dir={root}", "data.valid_speakers=2", *more)


BY_KIND = ("music0", "noise0", "noise1", "speech0", "speech1", "speech2")
ROOMS_ONLY = "runtime.bank_gb=0.0001"  # 107 kB: two rooms of 12,080 samples in float32 take 97 kB


def build_all(config, *, positions: int):
    """(corpus, crops, the waves that training would see)."""
    corpus = read_corpus(config)
    names = class_names(corpus.train.speakers, config.augment.speeds)
    augment = build.build_augment(
        config,
        rooms=corpus.rooms,
        noises=corpus.noise,
        noise_kinds=corpus.noise.kinds,
        noise_on_device=corpus.noise_on_device,
    )
    crops = setup_training.train_crops(config, corpus, names, augment)
    drawn = [crops[0, position, position % len(corpus.train)] for position in range(positions)]
    return corpus, drawn, augment(collate(drawn))


def test_noise_on_the_host_is_heard_as_noise_on_the_device(noisy):
    settings = ("augment.noise_prob=0.9", "augment.codec_prob=0", "data.crop_seconds=0.5")
    device, here, wave_BS = build_all(noisy(*settings), positions=64)
    host, _, other_BS = build_all(noisy(*settings, ROOMS_ONLY), positions=64)
    assert device.noise_on_device and not host.noise_on_device
    assert host.noise.path is not None
    num_voices = [crop.draws["noise"].group if "noise" in crop.draws else 0 for crop in here]
    assert sum(count > 1 for count in num_voices) > 10 and 1 in num_voices
    # Babble crosses as 16 bits of its own full scale: half a step of 2^-15, at 13 dB below speech.
    assert (wave_BS - other_BS).abs().max() < 1e-5
    alone = [row for row, count in enumerate(num_voices) if count < 2]
    assert (wave_BS - other_BS)[alone].abs().max() < 1e-7


def test_kinds_are_those_of_the_table(noisy):
    noise = read_corpus(noisy()).noise
    assert noise.ids == BY_KIND and noise.kinds == tuple(name[:-1] for name in BY_KIND)


def test_ends_that_fall_and_unknown_kinds_are_refused(noisy):
    lines = r"babble_voices=\[7, 3\]: must be \[low, high\], .*\n.* augment.kind_odds.hum: unknown"
    with pytest.raises(ValueError, match=lines):
        noisy("augment.babble_voices=[7, 3]", "augment.kind_odds={hum: 1}")


def test_rooms_beyond_the_limit_are_refused(noisy):
    with refuses("runtime.bank_gb", "rooms", 8e-05):
        read_corpus(noisy("runtime.bank_gb=0.00008"))


def test_training_without_speakers_is_refused(make_config, make_data_dir):
    folder: Path = make_data_dir(speakers=range(6))
    (folder / "utt2spk").unlink()
    with refuses(str(folder / "utt2spk"), "speakers", error=FileNotFoundError):
        read_corpus(make_config(f"data.dir={folder.parent}"))
