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


def make_noise(noises: list[np.ndarray], **more) -> Noise:
    more = {"noise_kinds": len(noises) * ["noise"], "noise_prob": 1.0, **more}
    return Noise(noises=noises, num_samples=S, **more)


def test_snr_is_exact():
    wave_BS = int16_noise(4, S, seed=7)
    settings = {0: (1, 3, 0.0), 1: (0, 8000, 15.0), 3: (1, 29999, -5.0)}
    noise = make_noise([int16_noise(20000, seed=9, deviation=500), int16_noise(30000, seed=1)])
    room = Room(room_prob=1, rooms=[decaying_room(4000, seed=8, delay=50)], num_samples=S)
    parts = {"room": room, "noise": noise}
    drawn = {3: {"room": Draw({"room": 0})}}
    clean_BS = apply_all(parts, wave_BS, drawn).double()
    for row, setting in settings.items():
        drawn[row] = {**drawn.get(row, {}), "noise": noise_draw(noise, *setting)}
    noisy_BS = apply_all(parts, wave_BS, drawn).double()
    for row, (_, _, snr_db) in settings.items():
        added_power = (noisy_BS[row] - clean_BS[row]).square().mean()
        measured_db = decibels(float(clean_BS[row].square().mean() / added_power))
        assert abs(measured_db - snr_db) < 0.01
    assert torch.equal(noisy_BS[2], clean_BS[2])
    assert sum(noise.num_silent) == 0


@pytest.mark.parametrize("start", [0, 200, 299])
@pytest.mark.parametrize("length", [300, S - 1, S, S + 1, 20000])
def test_noise_wraps_around_at_its_own_end(length, start):
    noise = int16_noise(length, seed=11)
    neighbours = [np.full(S, 32767, dtype=np.int16), noise, np.full(S, -32768, dtype=np.int16)]
    wave_BS = int16_noise(1, S, seed=12)
    bank = make_noise(neighbours)
    for place in (start, length - 1):
        draws = {0: noise_draw(bank, 1, place, 0.0)}
        out_BS = apply_one(bank, wave_BS, draws).numpy()
        added = out_BS[0] - wave_BS[0] / 32768
        expected = noise[(place + np.arange(S)) % length] / 32768
        gain = np.sqrt(np.square(wave_BS[0] / 32768).mean() / np.square(expected).mean())
        assert np.abs(added - gain * expected).max() < 1e-6


def test_babble_is_of_equal_voices_and_its_snr_is_exact():
    lengths, levels = (9000, 20000, 8500), (300.0, 3000.0, 8000.0)
    voices = [
        int16_noise(length, seed=30 + i, deviation=level)
        for i, (length, level) in enumerate(zip(lengths, levels))
    ]
    wave_BS = int16_noise(3, S, seed=33)
    settings = [((0, 1, 2), (8000, 5, 8499), 13.0), (1, 77, 5.0), ((2, 0), (0, 1), -5.0)]
    noise = make_noise(voices)
    draws = {row: noise_draw(noise, *setting) for row, setting in enumerate(settings)}
    clean_BS = torch.from_numpy(wave_BS).double() / 32768
    added_BS = apply_one(noise, wave_BS, draws).double() - clean_BS
    for row, (noises, starts, snr_db) in enumerate(settings):
        measured_db = decibels(float(clean_BS[row].square().mean() / added_BS[row].square().mean()))
        assert abs(measured_db - snr_db) < 0.01
        parts = [
            voices[voice][(start + np.arange(S)) % lengths[voice]].astype(float)
            for voice, start in zip(np.atleast_1d(noises), np.atleast_1d(starts))
        ]
        expected = sum(part / np.sqrt(np.square(part).mean()) for part in parts)
        expected *= np.sqrt(float(added_BS[row].square().mean()) / np.square(expected).mean())
        assert np.abs(added_BS[row].numpy() - expected).max() < 1e-6


def test_silent_voices_stay_out_and_silence_gets_and_gives_no_noise_and_is_counted():
    noises = [int16_noise(9000, seed=37), np.zeros(400, dtype=np.int16), int16_noise(50, seed=38)]
    noise, wave_BS = make_noise(noises), int16_noise(6, S, seed=39)
    wave_BS[3] = 0
    wave_BS[4] = np.where(np.arange(S) % 2, 32, -32)  # -60.2 dBFS
    settings = [((0, 1), (5, 9), 6.0), ((1, 1, 1), (0, 1, 2), 6.0), (0, 5, 6.0)]
    settings += [(0, 0, 5.0), (1, 0, 5.0), (1, 0, 5.0)]
    draws = {row: noise_draw(noise, *setting) for row, setting in enumerate(settings)}
    out_BS = apply_one(noise, wave_BS, draws)
    assert out_BS.isfinite().all() and sum(noise.num_silent) == 4
    alone = apply_one(noise, wave_BS, {0: noise_draw(noise, 0, 5, 6.0)})
    assert (out_BS[0] - alone[0]).abs().max() < 1e-6
    for row in (1, 3, 4, 5):
        assert torch.equal(out_BS[row], torch.from_numpy(wave_BS[row]) / 32768)


def test_rows_with_any_number_of_voices_may_be_computed_at_once():
    """As on a GPU: levels are free until the noise is scaled."""
    noises = [int16_noise(9000 + 999 * index, seed=index) for index in range(3)]
    noise = make_noise([*noises, np.zeros(9, dtype=np.int16)])
    chosen = [((0,), (5,)), ((0, 1, 2), (7, 900, 2)), ((1,), (10,)), ((2, 2), (3, 0)), ((3,), (0,))]
    drawn = {row: {"it": noise_draw(noise, *one, snr_db=0.0)} for row, one in enumerate(chosen)}
    (draws,) = make_batch(int16_noise(5, S, seed=3), drawn).draws["it"]
    assert draws.values["place"][0].tolist() == [5, -1, -1]
    at_once_RS, in_turn_RS = noise._voices(draws.values["place"]), noise._noise(draws)
    power_R = at_once_RS.square().mean(1)
    assert (power_R[2] - 1).abs() < 1e-5 and power_R[4] == 0 and not in_turn_RS[4].any()
    for row in range(4):
        ratio = at_once_RS[row] * in_turn_RS[row].square().mean().sqrt() / power_R[row].sqrt()
        assert (ratio - in_turn_RS[row]).abs().max() < 1e-5


def test_just_above_the_limit_gets_noise():
    wave_BS = np.where(np.arange(S) % 2, 33, -33).astype(np.int16)[None]  # -59.9 dBFS
    noise = make_noise([wave_BS[0, ::2].copy()])
    out_BS = apply_one(noise, wave_BS, {0: noise_draw(noise, 0, 0, 0.0)})
    assert (out_BS - torch.from_numpy(wave_BS) / 32768).abs().min() > 0.9 * 33 / 32768
    assert sum(noise.num_silent) == 0


def test_the_host_cuts_noise_and_babble_as_the_device_does():
    loud = np.array([8000, -8000] * 50, dtype=np.int16)
    faint = np.array([80, 80, -80, -80] * 25, dtype=np.int16)
    silent = np.array([32, -32] * 50, dtype=np.int16)  # -60.2 dBFS
    host = make_noise([np.arange(3000, dtype=np.int16), loud, faint, silent], noise_on_device=False)
    host.num_samples = 4
    assert host._cut(np.array([0]), np.array([2998])).tolist() == [2998, 2999, 0, 1]
    # Of equal power, the sum of the two is 2, 0, 0, -2; then full scale.
    assert host._cut(np.array([1, 2, 3]), np.zeros(3, int)).tolist() == [32767, 0, 0, -32767]
    assert not host._cut(np.array([3, 3]), np.zeros(2, int)).any()


KINDS = ["noise", "music", "speech", "noise", "speech"]
LENGTHS = [1000, 2000, 30000, 4000, 50000]
SNR_DB = {"noise": (0.0, 12.0), "music": (12.0, 13.0), "speech": (14.0, 20.0)}


def draw_kinds(count: int, **more) -> list[dict]:
    noises = [int16_noise(length, seed=length) for length in LENGTHS]
    snrs = {"snr_db": SNR_DB["noise"], "music_snr_db": SNR_DB["music"]}
    settings = {**snrs, "babble_snr_db": SNR_DB["speech"], "noise_kinds": KINDS, **more}
    noise, rng = make_noise(noises, **settings), np.random.default_rng(0)
    return [
        {} if draw is None else dict(draw.values)
        for draw in (noise.draw(rng) for _ in range(count))
    ]


def test_each_kind_has_its_odds_its_levels_and_its_voices():
    drawn = draw_kinds(2000, kind_odds={"noise": 1.0, "music": 2.0, "speech": 1.0})
    found: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for draw in drawn:
        (kind,) = {KINDS[noise] for noise in draw["noise"]}
        found[kind].append(draw)
        assert SNR_DB[kind][0] <= draw["snr_db"] < SNR_DB[kind][1]
        assert all(0 <= s < LENGTHS[n] for n, s in zip(draw["noise"], draw["start"], strict=True))
    shares = [len(found[kind]) / 2000 for kind in ("noise", "music", "speech")]
    assert np.abs(np.array(shares) - [0.25, 0.5, 0.25]).max() < 0.04
    voices = np.bincount([len(draw["noise"]) for draw in found["speech"]])
    assert len(voices) == 8 and voices[:3].sum() == 0 and voices[3:].min() > 60  # of 500 / 5
    assert {len(draw["noise"]) for kind in ("noise", "music") for draw in found[kind]} == {1}
    places = [s / LENGTHS[n] for d in found["speech"] for n, s in zip(d["noise"], d["start"])]
    assert abs(np.mean(places) - 0.5) < 0.03 and abs(np.std(places) - 12**-0.5) < 0.02
    two = draw_kinds(300, kind_odds={"noise": 0.0, "music": 0.0}, babble_voices=(2, 2))
    assert all(sorted(draw["noise"]) == [2, 4] for draw in two)  # none twice


def test_odds_of_0_for_all_recordings_are_refused():
    with refuses("augment.kind_odds", "noise"):
        make_noise([int16_noise(9, seed=0)], kind_odds={"noise": 0.0})
