"""The truth of conversations is read from their directories; the local DER of known networks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from voices import RATE, make_wave, write_voices

from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.core.powerset import speaker_sets
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.loader import collate
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import write_data_dir
from speakerlab.diarization.regions import Turn, write_rttm
from speakerlab.experiments import conversations
from speakerlab.experiments.conversations import (
    SegmentationValidation,
    read_references,
    references_digest,
)

SETTINGS = [
    "data.train=[voices,meetings]",
    "data.crop_seconds=1.0",
    "conversations.turn_seconds=0.5",
    "augment.noise_prob=0",
    "augment.room_prob=0",
    "model.args.lstm_dim=4",
    "model.args.lstm_layers=1",
]
SETS = torch.from_numpy(speaker_sets(3, 2))


@pytest.fixture
def data(tmp_path):
    write_voices(tmp_path / "voices", speakers=range(3), seconds=(1.5,))
    wavs = {"m0": tmp_path / "m0.wav", "m1": tmp_path / "m1.wav"}
    for number, path in enumerate(wavs.values()):
        audio.write(path, make_wave(9, number, 3.5), RATE)
    write_data_dir(tmp_path / "meetings", wavs=wavs)
    turns = [Turn(0.5, 2.0, "a"), Turn(1.5, 3.0, "b")]
    write_rttm(tmp_path / "meetings/ref.rttm", {"m0": turns, "m1": turns[:1]})
    check_data_dirs([tmp_path / "meetings"])
    return tmp_path


def read(data) -> Any:
    config = load_config(
        [Path("segmentation/pyannet")], [f"data.dir={data}", *SETTINGS]
    )
    manifest = read_manifest(config.data.train_folders(), sample_rate=RATE)
    return config, manifest, read_references(config, manifest)


def test_turns_and_regions_are_read(data):
    _, _, (simulated, recorded) = read(data)
    assert simulated is None
    assert recorded["m0"].turns[1] == (1.5 * RATE, 3.0 * RATE, "b")
    assert recorded["m0"].regions == [(0.0, 3.5 * RATE)]
    digest = references_digest([simulated, recorded])
    (data / "meetings/ref.uem").write_text("m0 1 0.5 9\nm1 1 0 1\n")
    _, _, references = read(data)
    assert references[1]["m0"].regions == [(0.5 * RATE, 3.5 * RATE)]
    assert references_digest(references) != digest


def test_missing_truth_is_refused(data):
    rttm = data / "meetings/ref.rttm"
    text = rttm.read_text()
    rttm.write_text("\n".join(line for line in text.splitlines() if " m1 " not in line))
    with refuses(str(rttm), "lacks m1", "ref.uem"):
        read(data)
    uem = data / "meetings/ref.uem"
    uem.write_text("m0 1 0 3\nm1 1 8 9\n")
    with refuses(str(uem), "m1", "3.5 s"):
        read(data)
    rttm.unlink()
    with refuses(
        str(data / "meetings"), "ref.rttm", "utt2spk", error=FileNotFoundError
    ):
        read(data)


class Known:
    """In place of a network: log-probabilities from the truth of each window."""

    def __init__(self, validation, change):
        truths: Any = [validation.crops.read(w).speech_KT for w in validation.windows]
        self.truths = iter(truths)
        self.change = change

    def eval(self):
        return self

    def __call__(self, wave_BS):
        rows = []
        for _ in wave_BS:
            speech_LT = self.change(next(self.truths).clip(min=0))
            agreement_TC = torch.from_numpy(speech_LT.T).float() @ SETS.T
            # The set with exactly these speakers.
            rows.append(2 * agreement_TC - SETS.sum(dim=1))
        return torch.stack(rows).log_softmax(dim=2)


def drop_one(speech_KT):
    """Leave the speaker out who speaks most."""
    silent_KT = speech_KT.copy()
    silent_KT[speech_KT.sum(axis=1).argmax()] = 0
    return silent_KT


def test_a_window_in_which_nobody_speaks_stays_silent(data):
    settings = [
        f"data.dir={data}",
        *SETTINGS,
        "data.train=[voices]",
        "conversations.pause_seconds=60",
        "augment.noise_prob=1",
        "augment.room_prob=1",
        "augment.telephone_prob=1",
    ]
    config = load_config([Path("segmentation/pyannet")], settings)
    manifest = read_manifest(config.data.train_folders(), sample_rate=RATE)
    rng = np.random.default_rng(0)
    noise_S = rng.integers(-9000, 9000, size=2 * RATE, dtype=np.int16)
    room_S = np.eye(1, 800, 5, dtype=np.float32)[0]
    augment = build.build_augment(
        config, rooms=[room_S], noises=[noise_S], noise_kinds=["noise"]
    )
    crops = conversations.conversation_crops(
        config, manifest, [None], augment.draws, seed=0
    )
    drawn = [crops.draw((0, position, position % 3)) for position in range(60)]
    silent = [crop for crop in drawn if not crop.turns][:2]
    spoken = [crop for crop in drawn if crop.turns][:2]
    batch = collate([crops.read(crop) for crop in (*silent, *spoken)])
    wave_BS = augment(batch)
    # Noise has a level relative to the speech, so silence gets none.
    assert not wave_BS[:2].any()
    assert wave_BS[2:].any(dim=1).all()
    assert int(augment.take_silent()) == 2
    segmenter = build.build_segmenter(config)
    assert segmenter(wave_BS).isfinite().all()
    speech_BKT = batch.speech_BKT
    assert speech_BKT is not None
    assert not speech_BKT[:2].any()


def test_local_der_of_known_networks(data, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_VALID_WINDOWS", 12)
    config, manifest, references = read(data)
    augment = build.build_augment(config)
    validation = SegmentationValidation(config, manifest, references, augment)
    # Simulated ones, and of each recording all three that fit.
    assert len(validation.windows) == 12 + 2 * 3
    cpu = torch.device("cpu")

    # At most two can be found at once, and the truth has three in some frames.
    perfect = Known(validation, lambda speech_KT: speech_KT[[2, 0, 1]])
    crops: Any = validation.crops
    at_once = [crops.read(w).speech_KT.sum(axis=0) for w in validation.windows]
    number_N = np.concatenate(at_once)
    third = np.maximum(number_N - 2, 0).sum() / number_N.sum()
    assert validation.measure(perfect, cpu) == pytest.approx(third)
    nobody = Known(validation, np.zeros_like)
    assert validation.measure(nobody, cpu) == 1
    metrics = validation._metrics(
        validation._count(Known(validation, drop_one), cpu, first=0, step=1)
    )
    assert metrics["false_alarm"] == metrics["confusion"] == 0
    assert metrics["der"] == metrics["missed"] > 0.5
    names = [name for name in metrics if name.startswith("der/")]
    assert len(names) == 2
    # The windows of all ranks are those of one.
    shares = sum(
        validation._count(ConstantNetwork(), cpu, first=rank, step=3)
        for rank in range(3)
    )
    np.testing.assert_array_equal(
        shares, validation._count(ConstantNetwork(), cpu, first=0, step=1)
    )


class ConstantNetwork:
    """Finds the first local speaker in every frame."""

    def eval(self):
        return self

    def __call__(self, wave_BS):
        logit_BTC = torch.zeros(len(wave_BS), 56, 7)
        logit_BTC[:, :, 1] = 5
        return logit_BTC.log_softmax(dim=2)
