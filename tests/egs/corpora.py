"""The corpora of the recipes, small, in their true directory layout and file formats.

Each function writes what the official archives unpack to, with the traps of the real corpus.
"""

import csv
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

import av
import numpy as np
from voices import RATE, make_wave

from speakerlab.data import audio

SECONDS = 1.5
NUM_TRAIN, NUM_TEST = 12, 6  # speakers
Pair = tuple[str, str, bool]


def write_m4a(path: Path, wave_S: np.ndarray, rate: int = RATE) -> None:
    """One channel of AAC in an MPEG-4 file, as VoxCeleb2 comes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = av.AudioFrame.from_ndarray(wave_S[None], format="s16", layout="mono")
    frame.sample_rate = rate
    cut = av.AudioResampler(format="fltp", layout="mono", rate=rate, frame_size=1024)
    with av.open(str(path), "w", format="ipod") as file:
        stream = file.add_stream("aac", rate=rate, layout="mono", bit_rate=64_000)
        for piece in (*cut.resample(frame), *cut.resample(None)):
            file.mux(stream.encode(piece))
        file.mux(stream.encode(None))


def write_wav(path: Path, speaker: int, take: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    audio.write(path, make_wave(speaker, take, SECONDS), RATE)


def pair_up(names: Iterable[str], speakers: dict[str, str]) -> list[Pair]:
    """Every pair of utterances, as a trial."""
    return [(a, b, speakers[a] == speakers[b]) for a, b in combinations(sorted(names), 2)]


def write_noise(corpus: Path) -> None:
    """MUSAN and RIRS_NOISES, one recording each, below a corpus, where stage 0 downloads them."""
    write_wav(corpus / "musan/noise/free-sound/noise-free-sound-0000.wav", 30, 0)
    rooms = corpus / "RIRS_NOISES/real_rirs_isotropic_noises"
    write_wav(rooms / "air.wav", 31, 0)
    path = f"RIRS_NOISES/{rooms.name}/air.wav"
    (rooms / "rir_list").write_text(f"--rir-id 00001 --room-id 001 {path} {path} {path}\n")


# Parts of MUSAN, and RIRS_NOISES with a noise beside its rooms.
MUSAN = ("music/fma/music-0.wav", "noise/free-sound/n-0.wav", "noise/sound-bible/n-1.wav")
LISTED = "RVB2014_type1_rir_largeroom1_far_angla.wav"
ROOMS = (
    f"real_rirs_isotropic_noises/{LISTED}",
    "real_rirs_isotropic_noises/RVB2014_type1_noise_largeroom1_1.wav",
    "simulated_rirs/smallroom/Room001/Room001-00001.wav",
)
RIR_LIST = f"--rir-id 00001 --room-id 001 RIRS_NOISES/real_rirs_isotropic_noises/{LISTED}\n"


def write_short(folder: Path, names: Iterable[str]) -> Path:
    """Write recordings of 100 samples."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        audio.write(folder / name, np.full(100, 3000, np.int16), RATE)
    return folder


# VoxCeleb: two videos a speaker, two recordings each. All of VoxCeleb1 is tested on, its two parts
# are unpacked apart; VoxCeleb2 is m4a.
VIDEOS = ("5r0dWxy17C8", "-vBNO3AhQRs")  # ids of videos may begin with a hyphen
VOX1_DEV = tuple(f"id{10001 + number}" for number in range(NUM_TEST // 2))
VOX1_TEST = tuple(f"id{10270 + number}" for number in range(NUM_TEST // 2))
VOX2 = tuple(f"id{12 + number:05d}" for number in range(NUM_TRAIN))
META = "VoxCeleb1 ID\tVGGFace1 ID\tGender\tNationality\tSet"


def write_voxceleb(corpus: Path) -> None:
    """voxceleb1/{dev,test}/wav, voxceleb2_m4a/dev/aac, and the lists in meta/."""
    speakers: dict[str, str] = {}
    for number, speaker in enumerate((*VOX1_DEV, *VOX1_TEST)):
        part = "dev" if speaker in VOX1_DEV else "test"
        for take, name in enumerate(_of_speaker(speaker)):
            write_wav(corpus / f"voxceleb1/{part}/wav/{name}.wav", number, take)
            speakers[f"{name}.wav"] = speaker
    for number, speaker in enumerate(VOX2, NUM_TEST):
        for take, name in enumerate(_of_speaker(speaker)):
            wave_S = make_wave(number, take, SECONDS)
            write_m4a(corpus / f"voxceleb2_m4a/dev/aac/{name}.m4a", wave_S)
    everything = pair_up(speakers, speakers)
    of_test = [
        pair for pair in everything if {speakers[pair[0]], speakers[pair[1]]} <= {*VOX1_TEST}
    ]
    write_vox_list(corpus / "meta/veri_test2.txt", of_test)
    write_vox_list(corpus / "meta/list_test_all2.txt", everything)
    write_vox_list(corpus / "meta/list_test_hard2.txt", everything[::2])
    rows = [
        f"{s}\tSome_One\t{'mf'[i % 2]}\tUSA\tdev" for i, s in enumerate((*VOX1_DEV, *VOX1_TEST))
    ]
    (corpus / "meta/vox1_meta.csv").write_text("\n".join([META, *rows]) + "\n")


def _of_speaker(speaker: str) -> list[str]:
    return [f"{speaker}/{video}/{number:05d}" for video in VIDEOS for number in (1, 2)]


def write_vox_list(path: Path, pairs: Iterable[Pair]) -> None:
    """A trial list as `1|0 enrol test`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{int(same)} {a} {b}\n" for a, b, same in pairs))


# 3D-Speaker: an utterance is recorded by several devices, device 09 among them, whose recordings
# the official recipe leaves out.
INFO_COLUMNS = ("Utt-id", "Spk-id", "Seg-id", "Device", "Distance", "Dialect")
DEVICES = ("01", "02", "06", "09")
DISTANCES = {"01": "0.3", "02": "1.5", "06": "3.0", "09": "3.0"}
DIALECTS = ("Standard Mandarin", "Wu Dialect")


def write_3dspeaker(corpus: Path) -> None:
    """train/, test/ and files/."""
    test: dict[str, str] = {}
    for split, first, count in (("train", 1, NUM_TRAIN), ("test", 6154, NUM_TEST)):
        rows = [
            (f"3D_SPK_{first + number:05d}", segment, device)
            for number in range(count)
            for segment, device in enumerate(DEVICES)
        ]
        names = write_3dspeaker_split(corpus, split, rows)
        test = {name: who for name, who in names.items() if "Device09" not in name}
    pairs = pair_up(test, test)
    for kind in ("device", "distance", "dialect"):
        text = "".join(f"{a} {b} {'target' if same else 'nontarget'}\n" for a, b, same in pairs)
        (corpus / f"files/trials_cross_{kind}").write_text(text)


def write_3dspeaker_split(
    corpus: Path, split: str, rows: Sequence[tuple[str, int, str]]
) -> dict[str, str]:
    """Recordings and lists of (speaker, segment, device); utterance -> speaker."""
    (corpus / "files").mkdir(parents=True, exist_ok=True)
    speakers: dict[str, str] = {}
    wavs: list[str] = []
    info: list[Sequence[str]] = [INFO_COLUMNS]
    for who, segment, device in rows:
        distance, dialect = DISTANCES[device], DIALECTS[segment % 2]
        name = f"{who}_{segment:03d}_Device{device}_Distance00_Dialect{segment % 2:02d}"
        relative = f"{split}/{who}/{name}.wav"
        write_wav(corpus / relative, int(who[-4:]) % 40, segment)
        wavs.append(f"{name} {relative}")
        speakers[name] = who
        info.append((name, who, f"{segment:03d}", device, distance, dialect))
    files = corpus / "files"
    wavs.reverse()  # the output must not depend on the order of the lists
    (files / f"{split}_wav.scp").write_text("\n".join(wavs) + "\n")
    lines = [f"{name}\t{who}\n" for name, who in speakers.items()]
    (files / f"{split}_utt2spk").write_text("".join(lines))
    with (files / f"{split}_utt2info.csv").open("w", newline="") as file:
        csv.writer(file).writerows(info)
    return speakers
