"""`model.diarize`: who spoke when in recordings of harmonic voices, and what is refused."""

import numpy as np
import pytest
import torch
from models_on_disk import CALIBRATION, XVECTOR, publish_small
from refusals import refuses
from toy_segmentation import write_segmentation
from voices import RATE, make_noise, make_wave, write_voices

import speakerlab
from speakerlab.config.embedder import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.data.convert import read_wave, spool_wave
from speakerlab.diarization.ahc import Ahc
from speakerlab.inference.diarize import Diarization, Segment, diarize, name_known
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.tuning import learn_vbx

SILENCE = np.zeros(RATE, dtype=np.int16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model, its last layer changed so that two voices are far apart."""
    config = load_config([], [XVECTOR])
    embedder = build_embedder(config)
    with torch.no_grad():
        embedder.train()(make_noise(1.0, rows=4))
        voices = [make_wave(speaker, 0, 20.0) for speaker in (0, 3)]
        wave_BS = torch.from_numpy(np.stack(voices)).unfold(1, 24000, 7001).flatten(0, 1) / 32768
        emb_VND = embedder.eval()(wave_BS).unflatten(0, (2, -1))
        left_ND = (emb_VND - emb_VND.mean(dim=1, keepdim=True)).flatten(0, 1)
        within_DD = left_ND.T @ left_ND / len(left_ND) + 1e-6 * torch.eye(16)
        whiten_DD = torch.linalg.inv(torch.linalg.cholesky(within_DD))
        *_, last = (m for m in embedder.modules() if isinstance(m, torch.nn.Linear))
        last.weight.copy_(whiten_DD @ last.weight)
        last.bias.copy_(whiten_DD @ (last.bias - emb_VND.mean(dim=(0, 1))))
    exp = publish_small(tmp_path_factory.mktemp("exp"), config, embedder)
    return speakerlab.load(exp, device="cpu")


def talk(*turns: tuple[int, float]) -> np.ndarray:
    """A wave of (speaker, seconds), each turn followed by a second of silence."""
    waves = [part for speaker, s in turns for part in (make_wave(3 * speaker, 0, s), SILENCE)]
    return np.concatenate(waves)


TURNS = [(0, 8.0), (1, 6.0), (0, 7.0), (1, 9.0), (0, 2.0)]
STARTS = [0.0, 9.0, 16.0, 24.0, 34.0]
REGIONS = [(start, start + seconds) for start, (_, seconds) in zip(STARTS, TURNS)]


@pytest.mark.parametrize("method", ["spectral", Ahc(threshold=0.5)])
def test_turns_of_two_voices(model, method):
    options = {"regions": REGIONS, "num_speakers": 2, "method": method}
    found = model.diarize(talk(*TURNS), recording="talk", **options)
    assert list(found.speakers) == ["speaker1", "speaker2"]
    assert [(s.start, s.end) for s in found] == REGIONS
    assert [s.speaker for s in found] == [f"speaker{1 + speaker}" for speaker, _ in TURNS]
    assert found.to_rttm().splitlines()[1].startswith("SPEAKER talk 1 9.000 6.000 ")
    plain = found.to_dict()
    assert plain["seconds"] == 37.0 and len(plain["segments"]) == len(found) == 5
    assert plain["speakers"]["speaker2"]["seconds"] == 15.0
    assert len(plain["speakers"]["speaker2"]["embedding"]) == model.embed_dim


@pytest.fixture
def naming(model, monkeypatch):
    """A model whose embeddings are directions, with a threshold of 0.5."""
    monkeypatch.setattr(model.runtime, "calibration", CALIBRATION)
    monkeypatch.setattr(model, "calibration", CALIBRATION)
    axes_DD = np.eye(model.embed_dim, dtype=np.float32)
    monkeypatch.setattr(model, "speakers", {"Ann": axes_DD[0], "Bob Lee": axes_DD[1]})
    return model


def found_speakers(model, *cosines_K2: tuple[float, float]) -> Diarization:
    """Speakers whose embeddings have these cosines with the first two axes; a turn of each."""
    rest = np.zeros(model.embed_dim - 3)
    embs = [np.array([a, b, (1 - a * a - b * b) ** 0.5, *rest]) for a, b in cosines_K2]
    names = [f"speaker{number + 1}" for number in range(len(embs))]
    turns = [Segment(float(k), k + 1.0, name, 1.0) for k, name in enumerate(names)]
    return Diarization("talk", 9.0, turns, dict(zip(names, embs)))


def test_enrolled_speakers_give_their_names(naming):
    found = found_speakers(naming, (0.7, 0.0), (0.8, 0.55), (0.1, 0.3), (0.6, 0.5))
    named = name_known(found, naming)
    # Ann is the second, the best; then only the last is near Bob Lee. Nobody has a name twice.
    assert list(named.speakers) == ["speaker1", "Ann", "speaker3", "Bob Lee"]
    assert [segment.speaker for segment in named] == list(named.speakers)
    assert [line.split()[7] for line in named.to_rttm().splitlines()] == [
        *("speaker1", "Ann", "speaker3", "Bob_Lee")
    ]
    assert [(m.name, round(m.score, 6), m.is_known) for m in named.matches.values()] == [
        ("Ann", 0.7, False),
        ("Ann", 0.8, True),
        ("Bob Lee", 0.3, False),
        ("Bob Lee", 0.5, True),
    ]
    assert list(named.matches) == list(named.speakers)
    plain = named.to_dict()["speakers"]
    assert plain["Ann"]["match"]["threshold"] == 0.5 and plain["Ann"]["seconds"] == 1.0
    assert "match" not in found.to_dict()["speakers"]["speaker1"]


def test_known_speakers_of_a_recording(naming):
    naming.enroll("Zoe", make_wave(0, 1, 8.0))
    found = naming.diarize(talk(*TURNS), regions=REGIONS, num_speakers=2, known=True)
    assert {segment.speaker for segment in found} == {"Zoe", "speaker2"}
    assert len(naming.diarize(SILENCE, known=True)) == 0


def test_names_that_cannot_be_given(naming, monkeypatch):
    wave_S, axis_D = make_wave(0, 0, 3.0), naming.speakers["Ann"]
    for names, value in ((["speaker2"], "speaker2"), (["a b", "a_b"], "'a b'"), ([], "enrol")):
        monkeypatch.setattr(naming, "speakers", dict.fromkeys(names, axis_D))
        with refuses("known", value):
            naming.diarize(wave_S, known=True)


def test_speech_is_found_by_energy(model):
    found = model.diarize(talk(*TURNS), num_speakers=1)
    assert {(s.speaker, s.confidence) for s in found} == {("speaker1", 1.0)}
    np.testing.assert_allclose([(s.start, s.end) for s in found], REGIONS, atol=0.1)


def test_given_regions_and_number(model):
    wave_S = talk(*TURNS)
    regions = [
        (0.5, 3.0),
        (9.0, 15.0),
        (36.5, 99.0),
        (70.0, 80.0),
    ]  # the last are outside or silent
    found = model.diarize(wave_S, regions=regions, num_speakers=2)
    assert [(s.start, s.end, s.speaker) for s in found] == [
        (0.5, 3.0, "speaker1"),
        (9.0, 15.0, "speaker2"),
    ]


def both() -> np.ndarray:
    """Speaker 0 from 1 to 11 s, speaker 1 from 9 to 19 s."""
    wave_S = np.zeros(20 * RATE, dtype=np.int16)
    wave_S[RATE : 11 * RATE] = make_wave(0, 0, 10.0)
    wave_S[9 * RATE : 19 * RATE] += make_wave(3, 0, 10.0)
    return wave_S


def speakers_at(found: Diarization, *times: float) -> list[int]:
    """How many different speakers speak at each time."""
    return [len({s.speaker for s in found if s.start <= time < s.end}) for time in times]


def test_an_overlap_that_is_no_model_is_refused(model):
    with refuses("overlap", "True"):
        model.diarize(both(), overlap=True)


def test_who_speaks_at_the_same_time(model, tmp_path):
    path = write_segmentation(tmp_path / "segmentation.onnx")
    found = model.diarize(both(), num_speakers=2, overlap=path)
    assert list(found.speakers) == [f"speaker{k + 1}" for k in range(len(found.speakers))]
    assert speakers_at(found, 0.9, 1.1, 8.9, 9.1, 10.9, 11.1, 18.9, 19.1) == [
        0,
        1,
        1,
        2,
        2,
        1,
        1,
        0,
    ]
    spoken = sum(row["seconds"] for row in found.to_dict()["speakers"].values())
    assert spoken == pytest.approx(20.0, abs=0.1)
    assert list(model.diarize(both(), num_speakers=2, overlap=Segmentation(path))) == list(found)
    regions = [(2.0, 10.0), (12.0, 15.0)]
    found = model.diarize(both(), num_speakers=2, overlap=path, regions=regions)
    assert speakers_at(found, 1.9, 9.9, 10.1, 14.9, 15.1) == [0, 2, 0, 1, 0]


def test_speech_is_found_by_the_segmentation_model_unless_vad_is_given(model, tmp_path):
    path = write_segmentation(tmp_path / "segmentation.onnx")
    quiet_S = both() // 40  # silence for this model
    assert not len(model.diarize(quiet_S, overlap=path))
    found = model.diarize(quiet_S, num_speakers=2, overlap=path, vad="energy")
    assert list(found) == list(model.diarize(quiet_S, num_speakers=2))


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_short_recordings_are_one_speaker(model, seconds):
    found = model.diarize(make_wave(1, 0, seconds))
    assert [(s.start, s.speaker) for s in found] == [(0.0, "speaker1")]
    assert found.segments[0].end == pytest.approx(seconds, abs=0.02)


def test_no_speech_is_no_segments(model, caplog):
    found = model.diarize(SILENCE, recording="quiet")
    assert (len(found), found.speakers, found.to_rttm()) == (0, {}, "")
    assert "no speech" in caplog.text


def test_refusals(model, tmp_path):
    (tmp_path / "empty.wav").write_bytes(b"")
    with refuses(str(tmp_path / "empty.wav"), 0):
        model.diarize(tmp_path / "empty.wav")
    with refuses("audio (ndarray)", 0):
        model.diarize(np.zeros(0, dtype=np.int16))
    with refuses("audio (ndarray)", "NaN"):
        model.diarize(np.array([0.0, np.nan]))
    with refuses("speakers", 9, 3):
        model.diarize(make_wave(0, 0, 3.0), num_speakers=9)
    with refuses("method", "vbx"):
        model.diarize(make_wave(0, 0, 3.0), method="vbx")


def test_vbx_learns_its_plda_from_a_data_directory(model, tmp_path):
    folder = write_voices(tmp_path / "dev", speakers=range(8), seconds=(3.2, 6.1, 1.0))
    method = learn_vbx(model, folder)
    assert method.transform_DD.shape == (model.embed_dim, model.embed_dim)
    found = diarize(model, talk(*TURNS), regions=REGIONS, method=method)
    assert [s.speaker for s in found] == [f"speaker{1 + speaker}" for speaker, _ in TURNS]


@pytest.mark.parametrize("rate", [RATE, 22050])
def test_a_spooled_wave_equals_one_in_memory(rate):
    raw_S = make_wave(2, 0, 1.7, rate)
    spooled_S = spool_wave(raw_S, sample_rate=RATE, source_rate=rate)
    wave_S = read_wave(raw_S, sample_rate=RATE, source_rate=rate)
    np.testing.assert_allclose(spooled_S / 32768.0, wave_S, atol=0.51 / 32768)
    assert spooled_S.dtype == np.int16 and isinstance(spooled_S, np.memmap)
