"""`model.diarize`: who spoke when in recordings of harmonic voices, and what is refused."""

import numpy as np
import pytest
import torch
from models_on_disk import CALIBRATION, XVECTOR, publish_small
from refusals import refuses
from toy_segmentation import write_segmentation
from voices import RATE, make_noise, make_wave, write_voices

import speakerlab
from speakerlab.config.build import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.data.convert import read_wave, spool_wave
from speakerlab.diarization.ahc import Ahc
from speakerlab.inference.diarize import Diarization, Segment, diarize, name_known
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.tuning import learn_vbx

SILENCE = np.zeros(RATE, np.int16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model, its last layer changed so that two voices are far apart."""
    config = load_config([], [XVECTOR])
    embedder = build_embedder(config)
    with torch.no_grad():
        # Sets the statistics of the batch normalisations.
        embedder.train()(make_noise(1.0, rows=4))

        # Embeddings of crops of 1.5 s of two voices.
        crops = []
        for speaker in (0, 3):
            wave_S = make_wave(speaker, 0, 20.0)
            crops_NS = torch.from_numpy(wave_S).unfold(0, 24000, 7001)
            crops.append(crops_NS / 32768)
        emb_BD = embedder.eval()(torch.cat(crops))
        emb_VND = emb_BD.unflatten(0, (2, -1))

        # Whiten by the covariance within a voice: then the difference between the voices dominates.
        mean_V1D = emb_VND.mean(dim=1, keepdim=True)
        left_ND = (emb_VND - mean_V1D).flatten(0, 1)
        within_DD = left_ND.T @ left_ND / len(left_ND)
        within_DD = within_DD + 1e-6 * torch.eye(16)
        factor_DD = torch.linalg.cholesky(within_DD)
        whiten_DD = torch.linalg.inv(factor_DD)
        mean_D = emb_VND.mean(dim=(0, 1))

        linear_layers = [
            module
            for module in embedder.modules()
            if isinstance(module, torch.nn.Linear)
        ]
        last = linear_layers[-1]
        last.weight.copy_(whiten_DD @ last.weight)
        last.bias.copy_(whiten_DD @ (last.bias - mean_D))
    folder = tmp_path_factory.mktemp("exp")
    exp = publish_small(folder, config, embedder)
    return speakerlab.load(exp, device="cpu")


def talk(*turns: tuple[int, float]) -> np.ndarray:
    """A wave of (speaker, seconds), each turn followed by a second of silence."""
    waves = []
    for speaker, seconds in turns:
        waves.append(make_wave(3 * speaker, 0, seconds))
        waves.append(SILENCE)
    return np.concatenate(waves)


TURNS = [(0, 8.0), (1, 6.0), (0, 7.0), (1, 9.0), (0, 2.0)]
SPEAKERS = ["speaker1", "speaker2", "speaker1", "speaker2", "speaker1"]
REGIONS = [  # seconds; one second of silence after each turn
    (0.0, 8.0),
    (9.0, 15.0),
    (16.0, 23.0),
    (24.0, 33.0),
    (34.0, 36.0),
]


def spans_of(diarization: Diarization) -> list[tuple[float, float]]:
    return [(segment.start, segment.end) for segment in diarization]


def speakers_of(diarization: Diarization) -> list[str]:
    return [segment.speaker for segment in diarization]


@pytest.mark.parametrize("method", ["spectral", Ahc(threshold=0.5)])
def test_turns_of_two_voices(model, method):
    diarization = model.diarize(
        talk(*TURNS),
        recording="talk",
        regions=REGIONS,
        num_speakers=2,
        method=method,
    )
    assert list(diarization.speakers) == ["speaker1", "speaker2"]
    assert spans_of(diarization) == REGIONS
    assert speakers_of(diarization) == SPEAKERS

    second_line = diarization.to_rttm().splitlines()[1]
    assert second_line.startswith("SPEAKER talk 1 9.000 6.000 ")

    plain = diarization.to_dict()
    assert plain["seconds"] == 37.0
    assert len(diarization) == 5
    assert len(plain["segments"]) == 5
    speaker = plain["speakers"]["speaker2"]
    assert speaker["seconds"] == 15.0
    assert len(speaker["embedding"]) == model.embed_dim


def test_a_recording_without_a_name_of_one_word_has_an_rttm():
    """The name of an array is "audio (ndarray)", and a file may have blanks in its name."""
    for recording in ("audio (ndarray)", "my talk"):
        diarization = Diarization(
            recording=recording,
            seconds=3.0,
            speakers={"speaker1": np.ones(2)},
            segments=[Segment(0.0, 2.0, "speaker1", 1.0)],
        )
        line = diarization.to_rttm()
        assert line.split()[1] == recording.replace(" ", "_")


def test_a_diarization_is_printed_without_the_embeddings():
    diarization = Diarization(
        recording="talk",
        seconds=3.0,
        speakers={"speaker1": np.ones(192)},
        segments=[Segment(0.0, 2.0, "speaker1", 1.0)],
    )
    text = repr(diarization)
    assert "talk" in text
    assert "speaker1" in text
    assert "array" not in text


@pytest.fixture
def naming(model, monkeypatch):
    """A model whose embeddings are directions, with a threshold of 0.5."""
    monkeypatch.setattr(model.runtime, "calibration", CALIBRATION)
    monkeypatch.setattr(model, "calibration", CALIBRATION)
    axes_DD = np.eye(model.embed_dim, dtype=np.float32)
    speakers = {"Ann": axes_DD[0], "Bob Lee": axes_DD[1]}
    monkeypatch.setattr(model, "speakers", speakers)
    return model


def make_diarization(model, *cosines_K2: tuple[float, float]) -> Diarization:
    """Speakers whose embeddings have these cosines with the first two axes; a turn of each."""
    segments: list[Segment] = []
    speakers: dict[str, np.ndarray] = {}
    for index, (first, second) in enumerate(cosines_K2):
        name = f"speaker{index + 1}"
        # The third axis makes the length 1.
        third = (1 - first * first - second * second) ** 0.5
        emb_D = np.zeros(model.embed_dim)
        emb_D[:3] = first, second, third
        speakers[name] = emb_D
        start = float(index)
        segment = Segment(start, start + 1.0, name, 1.0)
        segments.append(segment)
    return Diarization("talk", 9.0, segments, speakers)


def test_enrolled_speakers_give_their_names(naming):
    diarization = make_diarization(
        naming,
        (0.7, 0.0),
        (0.8, 0.55),
        (0.1, 0.3),
        (0.6, 0.5),
    )
    named = name_known(diarization, naming)

    # Ann is the second, the best; then only the last is near Bob Lee. Nobody has a name twice.
    names = ["speaker1", "Ann", "speaker3", "Bob Lee"]
    assert list(named.speakers) == names
    assert speakers_of(named) == names
    rttm_lines = named.to_rttm().splitlines()
    rttm_names = [line.split()[7] for line in rttm_lines]
    assert rttm_names == ["speaker1", "Ann", "speaker3", "Bob_Lee"]

    assert list(named.matches) == names
    expected = [
        ("Ann", 0.7, False),
        ("Ann", 0.8, True),
        ("Bob Lee", 0.3, False),
        ("Bob Lee", 0.5, True),
    ]
    for match, (name, score, is_known) in zip(named.matches.values(), expected):
        assert match.name == name
        assert round(match.score, 6) == score
        assert match.is_known == is_known

    plain = named.to_dict()["speakers"]
    assert plain["Ann"]["match"]["threshold"] == 0.5
    assert plain["Ann"]["seconds"] == 1.0
    plain_before = diarization.to_dict()["speakers"]
    assert "match" not in plain_before["speaker1"]


def test_known_speakers_of_a_recording(naming):
    naming.enroll("Zoe", make_wave(0, 1, 8.0))
    diarization = naming.diarize(
        talk(*TURNS),
        regions=REGIONS,
        num_speakers=2,
        known=True,
    )
    assert set(speakers_of(diarization)) == {"Zoe", "speaker2"}
    without_speech = naming.diarize(SILENCE, known=True)
    assert len(without_speech) == 0


def test_names_that_cannot_be_given(naming, monkeypatch):
    wave_S = make_wave(0, 0, 3.0)
    axis_D = naming.speakers["Ann"]
    for names, value in (
        (["speaker2"], "speaker2"),
        (["channel1"], "channel1"),
        (["channel2-speaker1"], "channel2-speaker1"),
        (["a b", "a_b"], "'a b'"),
        ([], "enrol"),
    ):
        speakers = dict.fromkeys(names, axis_D)
        monkeypatch.setattr(naming, "speakers", speakers)
        with refuses("known", value):
            naming.diarize(wave_S, known=True)


def test_speech_is_found_by_energy(model):
    wave_S = talk(*TURNS)
    diarization = model.diarize(wave_S, num_speakers=1)
    assert set(speakers_of(diarization)) == {"speaker1"}
    assert {segment.confidence for segment in diarization} == {1.0}
    spans = spans_of(diarization)
    np.testing.assert_allclose(spans, REGIONS, atol=0.1)


def test_given_regions_and_number(model):
    wave_S = talk(*TURNS)
    regions = [
        (0.5, 3.0),
        (9.0, 15.0),
        (36.5, 99.0),  # silent until the end of the recording
        (70.0, 80.0),  # outside
    ]
    diarization = model.diarize(wave_S, regions=regions, num_speakers=2)
    assert spans_of(diarization) == [(0.5, 3.0), (9.0, 15.0)]
    assert speakers_of(diarization) == ["speaker1", "speaker2"]


def both() -> np.ndarray:
    """Speaker 0 from 1 to 11 s, speaker 1 from 9 to 19 s."""
    first_S = make_wave(0, 0, 10.0)
    second_S = make_wave(3, 0, 10.0)
    wave_S = np.zeros(20 * RATE, np.int16)
    wave_S[RATE : 11 * RATE] = first_S
    wave_S[9 * RATE : 19 * RATE] += second_S
    return wave_S


def count_speakers(diarization: Diarization, time: float) -> int:
    """Return how many different speakers speak at `time`."""
    speakers = set()
    for segment in diarization:
        if segment.start <= time < segment.end:
            speakers.add(segment.speaker)
    return len(speakers)


def test_an_overlap_that_is_no_model_is_refused(model):
    with refuses("segmentation", "True"):
        model.diarize(both(), segmentation=True)


def test_who_speaks_at_the_same_time(model, tmp_path):
    path = write_segmentation(tmp_path / "segmentation.onnx")
    wave_S = both()
    diarization = model.diarize(wave_S, num_speakers=2, segmentation=path)
    num_speakers = len(diarization.speakers)
    expected_names = [f"speaker{1 + k}" for k in range(num_speakers)]
    assert list(diarization.speakers) == expected_names

    # Before and after each of the four changes.
    expected_counts = {
        0.9: 0,
        1.1: 1,
        8.9: 1,
        9.1: 2,
        10.9: 2,
        11.1: 1,
        18.9: 1,
        19.1: 0,
    }
    for time, count in expected_counts.items():
        assert count_speakers(diarization, time) == count
    rows = diarization.to_dict()["speakers"].values()
    spoken = sum(row["seconds"] for row in rows)
    assert spoken == pytest.approx(20.0, abs=0.1)

    segmentation = Segmentation(path)
    again = model.diarize(wave_S, num_speakers=2, segmentation=segmentation)
    assert list(again) == list(diarization)
    by_earlier_name = model.diarize(wave_S, num_speakers=2, overlap=segmentation)
    assert list(by_earlier_name) == list(diarization)

    in_regions = model.diarize(
        wave_S,
        num_speakers=2,
        segmentation=path,
        regions=[(2.0, 10.0), (12.0, 15.0)],
    )
    expected_counts = {1.9: 0, 9.9: 2, 10.1: 0, 14.9: 1, 15.1: 0}
    for time, count in expected_counts.items():
        assert count_speakers(in_regions, time) == count


def test_speech_is_found_by_the_segmentation_model_unless_vad_is_given(
    model, tmp_path, caplog
):
    path = write_segmentation(tmp_path / "segmentation.onnx")
    quiet_S = both() // 40  # silence for this model
    without_vad = model.diarize(quiet_S, segmentation=path)
    assert len(without_vad) == 0
    # A segmentation model that finds nothing is named, in one line.
    (message,) = [text for text in caplog.messages if "speech" in text]
    assert "segmentation model found no speech" in message
    assert "by its energy there are 18.1 s" in message
    caplog.clear()
    for options in ({"regions": []}, {"segmentation": None, "regions": []}):
        assert len(model.diarize(quiet_S, **{"segmentation": path, **options})) == 0
    assert len(model.diarize(quiet_S // 100, segmentation=path)) == 0
    assert not [text for text in caplog.messages if "segmentation" in text]

    by_energy = model.diarize(quiet_S, num_speakers=2)
    with_vad = model.diarize(
        quiet_S,
        num_speakers=2,
        segmentation=path,
        vad="energy",
    )
    # The confidence differs: the segmentation model hears nobody.
    assert [segment[:3] for segment in with_vad] == [
        segment[:3] for segment in by_energy
    ]


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_short_recordings_are_one_speaker(model, seconds):
    wave_S = make_wave(1, 0, seconds)
    (segment,) = model.diarize(wave_S)
    assert segment.start == 0.0
    assert segment.speaker == "speaker1"
    assert segment.end == pytest.approx(seconds, abs=0.02)


def test_no_speech_is_no_segments(model, caplog):
    diarization = model.diarize(SILENCE, recording="quiet")
    assert len(diarization) == 0
    assert diarization.speakers == {}
    assert diarization.to_rttm() == ""
    assert "no speech" in caplog.text


def make_call(leak: float = 0.0) -> np.ndarray:
    """wave_SC, int16: TURNS of speaker 0 left and of speaker 1 right; each hears the other."""
    sides = []
    for side in range(2):
        waves = []
        for speaker, seconds in TURNS:
            wave_S = make_wave(3 * speaker, 0, seconds)
            waves.append(wave_S if speaker == side else 0 * wave_S)
            waves.append(SILENCE)
        sides.append(np.concatenate(waves))
    left_S, right_S = sides
    heard = [left_S + leak * right_S, right_S + leak * left_S]
    return np.stack(heard, axis=1).astype(np.int16)


@pytest.mark.parametrize("leak", [0.0, 0.1])
def test_calls_by_channel(model, leak, caplog):
    call_SC = make_call(leak)
    diarization = model.diarize(
        call_SC,
        channels="each",
        num_speakers=1,
        recording="call",
    )
    assert list(diarization.speakers) == ["channel1", "channel2"]
    spans = spans_of(diarization)
    np.testing.assert_allclose(spans, REGIONS, atol=0.15)
    expected = [f"channel{1 + speaker}" for speaker, _ in TURNS]
    assert speakers_of(diarization) == expected
    assert diarization.seconds == 37.0
    plain = diarization.to_dict()["speakers"]
    assert plain["channel2"]["seconds"] == pytest.approx(15.0, abs=0.3)
    assert caplog.messages == []

    # Without cross-talk, each channel is as alone.
    if not leak:
        alone = model.diarize(call_SC[:, 0], num_speakers=1)
        of_call_D = diarization.speakers["channel1"]
        assert np.array_equal(of_call_D, alone.speakers["speaker1"])
        assert spans_of(alone) == spans[::2]


def test_a_channel_of_a_call(model, caplog):
    call_SC = make_call()
    second = model.diarize(call_SC, channels=2, num_speakers=1)
    np.testing.assert_allclose(spans_of(second), REGIONS[1::2], atol=0.1)
    mixed = model.diarize(call_SC, channels="mix", num_speakers=1)
    np.testing.assert_allclose(spans_of(mixed), REGIONS, atol=0.1)
    assert caplog.messages == []

    # By default the first, with a line.
    first = model.diarize(call_SC, num_speakers=1)
    np.testing.assert_allclose(spans_of(first), REGIONS[::2], atol=0.1)
    (line,) = caplog.messages
    assert "2 channels" in line
    with refuses("channels", "'left'"):
        model.diarize(call_SC, channels="left")
    with refuses("audio (ndarray)", "2 channels, got channel 3"):
        model.diarize(call_SC, channels=3)


def test_several_speakers_of_a_channel(model, tmp_path):
    """A conference room on the left, nobody on the right."""
    room_S = talk(*TURNS)
    wave_SC = np.stack([room_S, 0 * room_S], axis=1)
    regions = [*REGIONS, (36.5, 37.0)]
    diarization = model.diarize(
        wave_SC,
        channels="each",
        regions=regions,
        num_speakers=2,
    )
    names = [f"channel1-{name}" for name in SPEAKERS]
    assert speakers_of(diarization) == names
    assert list(diarization.speakers) == ["channel1-speaker1", "channel1-speaker2"]
    mono = model.diarize(room_S, channels="each", regions=regions, num_speakers=2)
    assert list(mono) == list(diarization)


def test_levels_of_a_recording_are_reported(model, caplog):
    noise_S = make_noise(3.0)[0].numpy()
    diarization = model.diarize(noise_S)
    assert list(diarization) == []
    line, no_speech = caplog.messages
    assert "no speech" in no_speech
    assert line == "audio (ndarray): is white noise, as are samples read in a wrong" + (
        " format; check the recording"
    )
    # Windows are parts of a recording, and not checked by themselves.
    caplog.clear()
    wave_S = talk((0, 3.0), (1, 3.0)).astype(np.int32)
    wave_S[3 * RATE : 4 * RATE : 2] = 1
    regions = [(0.0, 7.0)]
    model.diarize(wave_S.astype(np.int16), regions=regions, num_speakers=1)
    assert caplog.messages == []


def test_refusals(model, tmp_path):
    empty_file = tmp_path / "empty.wav"
    empty_file.write_bytes(b"")
    no_samples = np.zeros(0, np.int16)
    not_a_number = np.array([0.0, np.nan])
    wave_S = make_wave(0, 0, 3.0)

    with refuses(str(empty_file), 0):
        model.diarize(empty_file)
    with refuses("audio (ndarray)", 0):
        model.diarize(no_samples)
    with refuses("audio (ndarray)", "NaN"):
        model.diarize(not_a_number)
    with refuses("audio (ndarray)", "int16"):
        model.diarize(wave_S.astype(np.int32))
    with refuses("speakers", 9, 3):
        model.diarize(wave_S, num_speakers=9)
    with refuses("num_speakers", 2.5):
        model.diarize(wave_S, num_speakers=2.5)
    with refuses("max_speakers", "'2'"):
        model.diarize(wave_S, max_speakers="2")
    # The option --known of the command takes a file.
    with refuses("known", "'speakers.safetensors'", "load_speakers"):
        model.diarize(wave_S, known="speakers.safetensors")
    with refuses("method", "umap"):
        model.diarize(wave_S, method="umap")


def test_vbx_learns_its_plda_from_a_data_directory(model, tmp_path):
    folder = write_voices(
        tmp_path / "dev",
        speakers=range(8),
        seconds=(3.2, 6.1, 1.0),
    )
    method = learn_vbx(model, folder)
    dim = model.embed_dim
    assert method.transform_DD.shape == (dim, dim)

    diarization = diarize(
        model,
        talk(*TURNS),
        regions=REGIONS,
        method=method,
    )
    assert speakers_of(diarization) == SPEAKERS


@pytest.mark.parametrize("rate", [RATE, 22050])
def test_a_spooled_wave_equals_one_in_memory(rate):
    raw_S = make_wave(2, 0, 1.7, rate)
    rates = {"sample_rate": RATE, "source_rate": rate}
    spooled_S = spool_wave(raw_S, **rates)
    wave_S = read_wave(raw_S, **rates)
    half_step = 0.51 / 32768
    np.testing.assert_allclose(spooled_S / 32768, wave_S, atol=half_step)
    assert spooled_S.dtype == np.int16
    assert isinstance(spooled_S, np.memmap)
