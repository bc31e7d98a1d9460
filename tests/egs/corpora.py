"""The corpora of the recipes, small, in their true directory layout and file formats.

Each function writes what the official archives unpack to, with the traps of the real corpus.
"""

import csv
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from math import ceil
from pathlib import Path

import av
import numpy as np
from voices import RATE, make_wave

from speakerlab.data import audio

SECONDS = 1.5
AAC_FRAME = 1024  # samples
# Speakers of each corpus.
NUM_TRAIN = 12
NUM_TEST = 6
Pair = tuple[str, str, bool]


def write_m4a(path: Path, wave_S: np.ndarray, rate: int = RATE) -> None:
    """One channel of AAC in an MPEG-4 file, as VoxCeleb2 comes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = av.AudioFrame.from_ndarray(wave_S[None], format="s16", layout="mono")
    frame.sample_rate = rate
    with av.open(str(path), "w", format="ipod") as file:
        stream = file.add_stream("aac", rate=rate, layout="mono", bit_rate=64_000)
        # PyAV 19 would keep threads, on which processes that are forked later wait for ever.
        stream.codec_context.thread_count = 1
        file.mux(stream.encode(frame))
        # The encoder still holds its last frames.
        file.mux(stream.encode(None))


def m4a_samples(num_samples: int) -> int:
    """Return how many samples are decoded of a file that `write_m4a` wrote from so many.

    The encoder begins with a frame without sound, and fills the last one. FFmpeg 9, of libavcodec
    63, leaves out what fills it.
    """
    if av.library_versions["libavcodec"][0] >= 63:
        return AAC_FRAME + num_samples
    num_frames = 1 + ceil(num_samples / AAC_FRAME)
    return num_frames * AAC_FRAME


def write_wav(path: Path, speaker: int, take: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    audio.write(path, make_wave(speaker, take, SECONDS), RATE)


def pair_up(names: Iterable[str], speakers: dict[str, str]) -> list[Pair]:
    """Every pair of utterances, as a trial."""
    pairs = combinations(sorted(names), 2)
    return [(enrol, test, speakers[enrol] == speakers[test]) for enrol, test in pairs]


def write_noise(corpus: Path) -> None:
    """MUSAN and RIRS_NOISES, one recording each, below a corpus, where stage 0 downloads them."""
    write_wav(corpus / "musan/noise/free-sound/noise-free-sound-0000.wav", 30, 0)
    rooms = corpus / "RIRS_NOISES/real_rirs_isotropic_noises"
    write_wav(rooms / "air.wav", 31, 0)
    path = f"RIRS_NOISES/{rooms.name}/air.wav"
    (rooms / "rir_list").write_text(
        f"--rir-id 00001 --room-id 001 {path} {path} {path}\n"
    )


# Parts of MUSAN, and RIRS_NOISES with a noise beside its rooms.
MUSAN = (
    "music/fma/music-0.wav",
    "noise/free-sound/n-0.wav",
    "noise/sound-bible/n-1.wav",
)
LISTED = "RVB2014_type1_rir_largeroom1_far_angla.wav"
ROOMS = (
    f"real_rirs_isotropic_noises/{LISTED}",
    "real_rirs_isotropic_noises/RVB2014_type1_noise_largeroom1_1.wav",
    "simulated_rirs/smallroom/Room001/Room001-00001.wav",
)
RIR_LIST = (
    f"--rir-id 00001 --room-id 001 RIRS_NOISES/real_rirs_isotropic_noises/{LISTED}\n"
)


def write_short(folder: Path, names: Iterable[str]) -> Path:
    """Write recordings of 100 samples."""
    wave_S = np.full(100, 3000, np.int16)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        audio.write(path, wave_S, RATE)
    return folder


# VoxCeleb: two videos a speaker, two recordings each. All of VoxCeleb1 is tested on, its two parts
# are unpacked apart; VoxCeleb2 is m4a.
VIDEOS = ("5r0dWxy17C8", "-vBNO3AhQRs")  # ids of videos may begin with a hyphen
VOX1_DEV = ("id10001", "id10002", "id10003")
VOX1_TEST = ("id10270", "id10271", "id10272")
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
    of_test = [name for name, speaker in speakers.items() if speaker in VOX1_TEST]
    write_vox_list(corpus / "meta/veri_test2.txt", pair_up(of_test, speakers))
    write_vox_list(corpus / "meta/list_test_all2.txt", everything)
    write_vox_list(corpus / "meta/list_test_hard2.txt", everything[::2])
    lines = [META]
    for number, speaker in enumerate((*VOX1_DEV, *VOX1_TEST)):
        gender = "mf"[number % 2]
        lines.append(f"{speaker}\tSome_One\t{gender}\tUSA\tdev")
    (corpus / "meta/vox1_meta.csv").write_text("\n".join(lines) + "\n")


def _of_speaker(speaker: str) -> list[str]:
    names = []
    for video in VIDEOS:
        names += [f"{speaker}/{video}/00001", f"{speaker}/{video}/00002"]
    return names


def write_vox_list(path: Path, pairs: Iterable[Pair]) -> None:
    """A trial list as `1|0 enrol test`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{int(same)} {enrol} {test}\n" for enrol, test, same in pairs]
    path.write_text("".join(lines))


# 3D-Speaker: an utterance is recorded by several devices, device 09 among them, whose recordings
# the official recipe leaves out.
INFO_COLUMNS = ("Utt-id", "Spk-id", "Seg-id", "Device", "Distance", "Dialect")
DEVICES = ("01", "02", "06", "09")
DISTANCES = {"01": "0.3", "02": "1.5", "06": "3.0", "09": "3.0"}
DIALECTS = ("Standard Mandarin", "Wu Dialect")


def write_3dspeaker(corpus: Path) -> None:
    """train/, test/ and files/."""
    write_3dspeaker_split(corpus, "train", _rows_of(1, NUM_TRAIN))
    speakers = write_3dspeaker_split(corpus, "test", _rows_of(6154, NUM_TEST))
    names = [name for name in speakers if "Device09" not in name]
    lines = []
    for enrol, test, same in pair_up(names, speakers):
        label = "target" if same else "nontarget"
        lines.append(f"{enrol} {test} {label}\n")
    for kind in ("device", "distance", "dialect"):
        (corpus / f"files/trials_cross_{kind}").write_text("".join(lines))


def _rows_of(first: int, count: int) -> list[tuple[str, int, str]]:
    """Return (speaker, segment, device) of speakers that speak once on each device."""
    speakers = [f"3D_SPK_{number:05d}" for number in range(first, first + count)]
    rows = []
    for speaker, (segment, device) in product(speakers, enumerate(DEVICES)):
        rows.append((speaker, segment, device))
    return rows


def write_3dspeaker_split(
    corpus: Path, split: str, rows: Sequence[tuple[str, int, str]]
) -> dict[str, str]:
    """Recordings and lists of (speaker, segment, device); utterance -> speaker."""
    (corpus / "files").mkdir(parents=True, exist_ok=True)
    speakers: dict[str, str] = {}
    wavs: list[str] = []
    info: list[Sequence[str]] = [INFO_COLUMNS]
    for speaker, segment, device in rows:
        distance = DISTANCES[device]
        dialect = DIALECTS[segment % 2]
        place = f"Device{device}_Distance00_Dialect{segment % 2:02d}"
        name = f"{speaker}_{segment:03d}_{place}"
        relative = f"{split}/{speaker}/{name}.wav"
        voice = int(speaker[-4:]) % 40
        write_wav(corpus / relative, voice, segment)
        wavs.append(f"{name} {relative}")
        speakers[name] = speaker
        info.append((name, speaker, f"{segment:03d}", device, distance, dialect))
    files = corpus / "files"
    wavs.reverse()  # the output must not depend on the order of the lists
    (files / f"{split}_wav.scp").write_text("\n".join(wavs) + "\n")
    lines = [f"{name}\t{speaker}\n" for name, speaker in speakers.items()]
    (files / f"{split}_utt2spk").write_text("".join(lines))
    with (files / f"{split}_utt2info.csv").open("w", newline="") as file:
        csv.writer(file).writerows(info)
    return speakers
