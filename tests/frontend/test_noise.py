"""Noise: exact levels, babble, silence, and how often each kind is drawn."""

import numpy as np
import pytest
import torch
from batches import (
    S,
    apply_all,
    apply_one,
    decaying_room,
    decibels,
    int16_noise,
    make_batch,
    noise_draw,
)
from refusals import refuses

from speakerlab.core.batch import Draw
from speakerlab.frontend.augment.noise import Noise
from speakerlab.frontend.augment.room import Room


def make_noise(noises: list[np.ndarray], **options) -> Noise:
    num_noises = len(noises)
    settings = {
        "noise_kinds": num_noises * ["noise"],
        "noise_prob": 1.0,
        **options,
    }
    return Noise(noises=noises, num_samples=S, **settings)


def power(wave: np.ndarray | torch.Tensor) -> float:
    return float((wave * wave).mean())


def scaled(wave: np.ndarray, target_power: float) -> np.ndarray:
    """The wave at another power."""
    gain = np.sqrt(target_power / power(wave))
    return gain * wave


def test_snr_is_exact():
    wave_BS = int16_noise(4, S, seed=7)
    # Row -> number of the noise, its first sample, SNR in dB. Row 2 has no noise.
    settings = {
        0: (1, 3, 0.0),
        1: (0, 8000, 15.0),
        3: (1, 29999, -5.0),
    }
    faint_noise = int16_noise(20000, seed=9, deviation=500)
    loud_noise = int16_noise(30000, seed=1)
    noise = make_noise([faint_noise, loud_noise])
    impulses = decaying_room(4000, seed=8, delay=50)
    room = Room(
        room_prob=1,
        rooms=[impulses],
        num_samples=S,
    )
    parts = {"room": room, "noise": noise}

    room_draw = Draw({"room": 0})
    drawn = {3: {"room": room_draw}}
    clean_BS = apply_all(parts, wave_BS, drawn)
    for row, setting in settings.items():
        draws_of_row = drawn.setdefault(row, {})
        draws_of_row["noise"] = noise_draw(noise, *setting)
    noisy_BS = apply_all(parts, wave_BS, drawn)
    added_BS = noisy_BS.double() - clean_BS.double()

    for row, setting in settings.items():
        _, _, snr_db = setting
        clean_power = power(clean_BS[row].double())
        added_power = power(added_BS[row])
        measured_db = decibels(clean_power / added_power)
        assert abs(measured_db - snr_db) < 0.01
    assert not added_BS[2].any()
    assert sum(noise.num_silent) == 0


@pytest.mark.parametrize("start", [0, 200, 299])
@pytest.mark.parametrize("length", [300, S - 1, S, S + 1, 20000])
def test_noise_wraps_around_at_its_own_end(length, start):
    noise = int16_noise(length, seed=11)
    # Full scale on both sides: a sample of a neighbour would show.
    int16 = np.iinfo(np.int16)
    highest = np.full(S, int16.max, np.int16)
    lowest = np.full(S, int16.min, np.int16)
    bank = make_noise([highest, noise, lowest])
    wave_BS = int16_noise(1, S, seed=12)
    clean_S = wave_BS[0] / 32768
    clean_power = power(clean_S)
    for place in (start, length - 1):
        draw = noise_draw(bank, 1, place, snr_db=0.0)
        noisy_BS = apply_one(bank, wave_BS, {0: draw})
        added_S = noisy_BS[0].numpy() - clean_S

        index_S = place + np.arange(S)
        wrapped_S = noise[index_S % length] / 32768
        expected_S = scaled(wrapped_S, clean_power)
        error_S = np.abs(added_S - expected_S)
        assert error_S.max() < 1e-6


def test_babble_is_of_equal_voices_and_its_snr_is_exact():
    lengths = (9000, 20000, 8500)
    voices = [
        int16_noise(9000, seed=30, deviation=300.0),
        int16_noise(20000, seed=31, deviation=3000.0),
        int16_noise(8500, seed=32, deviation=8000.0),
    ]
    # Of each row: voices, their first samples, SNR in dB.
    settings = [
        ((0, 1, 2), (8000, 5, 8499), 13.0),
        ((1,), (77,), 5.0),
        ((2, 0), (0, 1), -5.0),
    ]
    noise = make_noise(voices)
    draws = {}
    for row, setting in enumerate(settings):
        draws[row] = noise_draw(noise, *setting)
    # Numbers instead of sequences of one.
    draws[1] = noise_draw(noise, 1, 77, 5.0)
    wave_BS = int16_noise(3, S, seed=33)
    noisy_BS = apply_one(noise, wave_BS, draws)
    clean_BS = torch.from_numpy(wave_BS / 32768)
    added_BS = noisy_BS.double() - clean_BS

    for row, setting in enumerate(settings):
        chosen, starts, snr_db = setting
        clean_power = power(clean_BS[row])
        added_power = power(added_BS[row])
        measured_db = decibels(clean_power / added_power)
        assert abs(measured_db - snr_db) < 0.01

        babble_S = np.zeros(S)
        for voice, start in zip(chosen, starts):
            index_S = start + np.arange(S)
            index_S = index_S % lengths[voice]
            voice_S = voices[voice][index_S]
            babble_S += scaled(voice_S.astype(float), 1.0)
        expected_S = scaled(babble_S, added_power)
        error_S = added_BS[row].numpy() - expected_S
        assert np.abs(error_S).max() < 1e-6


def test_silent_voices_stay_out_and_silence_gets_and_gives_no_noise_and_is_counted():
    long_noise = int16_noise(9000, seed=37)
    silence = np.zeros(400, np.int16)
    short_noise = int16_noise(50, seed=38)
    noise = make_noise([long_noise, silence, short_noise])
    wave_BS = int16_noise(6, S, seed=39)
    wave_BS[3] = 0
    # -60.2 dBFS: just below the limit of -60 dBFS.
    is_odd_S = np.arange(S) % 2
    wave_BS[4] = np.where(is_odd_S, 32, -32)

    settings = [
        ((0, 1), (5, 9), 6.0),
        ((1, 1, 1), (0, 1, 2), 6.0),
        (0, 5, 6.0),
        (0, 0, 5.0),
        (1, 0, 5.0),
        (1, 0, 5.0),
    ]
    draws = {}
    for row, setting in enumerate(settings):
        draws[row] = noise_draw(noise, *setting)
    out_BS = apply_one(noise, wave_BS, draws)
    assert out_BS.isfinite().all()
    assert sum(noise.num_silent) == 4

    # Row 0 has the voice of noise 0 only.
    draw = noise_draw(noise, 0, 5, snr_db=6.0)
    alone_BS = apply_one(noise, wave_BS, {0: draw})
    error_S = out_BS[0] - alone_BS[0]
    assert error_S.abs().max() < 1e-6
    for row in (1, 3, 4, 5):
        clean_S = torch.from_numpy(wave_BS[row]) / 32768
        assert torch.equal(out_BS[row], clean_S)


def test_rows_with_any_number_of_voices_may_be_computed_at_once():
    """As on a GPU: levels are free until the noise is scaled."""
    noises = []
    for index in range(3):
        length = 9000 + 999 * index
        noises.append(int16_noise(length, seed=index))
    silence = np.zeros(9, dtype=np.int16)
    noise = make_noise([*noises, silence])
    # Of each row: voices, their first samples.
    chosen = [
        ((0,), (5,)),
        ((0, 1, 2), (7, 900, 2)),
        ((1,), (10,)),
        ((2, 2), (3, 0)),
        ((3,), (0,)),
    ]
    drawn = {}
    for row, place in enumerate(chosen):
        draw = noise_draw(noise, *place, snr_db=0.0)
        drawn[row] = {"it": draw}
    wave_BS = int16_noise(5, S, seed=3)
    batch = make_batch(wave_BS, drawn)
    (draws,) = batch.draws["it"]
    place_RV = draws.values["place"]
    assert place_RV[0].tolist() == [5, -1, -1]

    at_once_RS = noise._voices(place_RV)
    in_turn_RS = noise._noise(draws)
    power_R = at_once_RS.square().mean(1)
    wanted_power_R = in_turn_RS.square().mean(1)
    assert abs(power_R[2] - 1) < 1e-5
    assert power_R[4] == 0
    assert not in_turn_RS[4].any()
    for row in range(4):
        power_ratio = wanted_power_R[row] / power_R[row]
        scaled_S = at_once_RS[row] * power_ratio.sqrt()
        error_S = scaled_S - in_turn_RS[row]
        assert error_S.abs().max() < 1e-5


def test_just_above_the_limit_gets_noise():
    # -59.9 dBFS: just above the limit of -60 dBFS.
    is_odd_S = np.arange(S) % 2
    wave_S = np.where(is_odd_S, 33, -33)
    wave_S = wave_S.astype(np.int16)
    constant_noise = wave_S[::2].copy()
    noise = make_noise([constant_noise])
    draw = noise_draw(noise, 0, 0, snr_db=0.0)
    noisy_BS = apply_one(noise, wave_S[None], {0: draw})
    clean_S = torch.from_numpy(wave_S) / 32768
    added_S = noisy_BS[0] - clean_S
    smallest = added_S.abs().min()
    assert smallest > 0.9 * 33 / 32768
    assert sum(noise.num_silent) == 0


def test_the_host_cuts_noise_and_babble_as_the_device_does():
    ramp = np.arange(3000, dtype=np.int16)
    loud = np.array(50 * [8000, -8000], np.int16)
    faint = np.array(25 * [80, 80, -80, -80], np.int16)
    silent = np.array(50 * [32, -32], np.int16)  # -60.2 dBFS
    noises = [ramp, loud, faint, silent]
    host = make_noise(noises, noise_on_device=False)
    host.num_samples = 4

    start = np.array([2998])
    wrapped = host._cut(np.array([0]), start)
    assert wrapped.tolist() == [2998, 2999, 0, 1]

    # Of equal power, the sum of the two is 2, 0, 0, -2; then full scale.
    voices = np.array([1, 2, 3])
    babble = host._cut(voices, np.zeros(3, int))
    assert babble.tolist() == [32767, 0, 0, -32767]

    silent_voices = np.array([3, 3])
    babble_of_silence = host._cut(silent_voices, np.zeros(2, int))
    assert not babble_of_silence.any()


KINDS = ["noise", "music", "speech", "noise", "speech"]
LENGTHS = [1000, 2000, 30000, 4000, 50000]
SNR_DB = {
    "noise": (0.0, 12.0),
    "music": (12.0, 13.0),
    "speech": (14.0, 20.0),
}


def draw_kinds(count: int, **options) -> list[dict]:
    """Values of so many draws; {} where no noise is drawn."""
    settings = {
        "snr_db": SNR_DB["noise"],
        "music_snr_db": SNR_DB["music"],
        "babble_snr_db": SNR_DB["speech"],
        "noise_kinds": KINDS,
        **options,
    }
    noises = []
    for length in LENGTHS:
        noises.append(int16_noise(length, seed=length))
    noise = make_noise(noises, **settings)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(count):
        draw = noise.draw(rng)
        values = {} if draw is None else draw.values
        drawn.append(dict(values))
    return drawn


def test_each_kind_has_its_odds_its_levels_and_its_voices():
    kind_odds = {"noise": 1.0, "music": 2.0, "speech": 1.0}
    draws: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for draw in draw_kinds(2000, kind_odds=kind_odds):
        (kind,) = {KINDS[noise] for noise in draw["noise"]}
        draws[kind].append(draw)
        lowest_db, highest_db = SNR_DB[kind]
        assert lowest_db <= draw["snr_db"] < highest_db
        assert len(draw["noise"]) == len(draw["start"])
        for noise, start in zip(draw["noise"], draw["start"]):
            assert 0 <= start < LENGTHS[noise]

    shares = {"noise": 0.25, "music": 0.5, "speech": 0.25}
    for kind, share in shares.items():
        measured_share = len(draws[kind]) / 2000
        assert abs(measured_share - share) < 0.04

    # 3 to 7 voices are equally likely in babble; noise and music have one.
    counts = np.zeros(8, dtype=int)
    for draw in draws["speech"]:
        num_voices = len(draw["noise"])
        counts[num_voices] += 1
    assert counts[:3].sum() == 0
    assert counts[3:].min() > 60  # of 500 / 5
    for draw in draws["noise"] + draws["music"]:
        assert len(draw["noise"]) == 1
    assert draws["noise"]
    assert draws["music"]

    # Starts are uniform over the recording: mean 1/2, variance 1/12.
    places = []
    for draw in draws["speech"]:
        for noise, start in zip(draw["noise"], draw["start"]):
            places.append(start / LENGTHS[noise])
    mean_place = np.mean(places)
    deviation = np.std(places)
    assert abs(mean_place - 0.5) < 0.03
    assert abs(deviation - 12**-0.5) < 0.02

    pairs = draw_kinds(
        300,
        kind_odds={"noise": 0.0, "music": 0.0},
        babble_voices=(2, 2),
    )
    for draw in pairs:
        # Babble never has the same recording twice.
        pair = sorted(draw["noise"])
        assert pair == [2, 4]


def test_odds_of_0_for_all_recordings_are_refused():
    noise_S = int16_noise(9, seed=0)
    with refuses("augment.kind_odds", "noise"):
        make_noise([noise_S], kind_odds={"noise": 0.0})
