"""The files of MUSAN and RIRS_NOISES that the published recipes augment with.

All audio is used from a folder in any other layout.

Sources: [D] is egs/voxceleb/sv-cam++/local/prepare_data.sh of github.com/modelscope/3D-Speaker at
09e7806, whose egs/3dspeaker does the same; [W] is examples/voxceleb/v2/local/prepare_data.sh of
github.com/wenet-e2e/wespeaker at dfa7419.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from egs.common.corpus.prepare import LeftOut, find_audio, write_noise_and_rooms
from speakerlab.core.faults import Faults
from speakerlab.core.reading import read_text
from speakerlab.data.banks import KINDS

FREE_SOUND = ("noise/free-sound",)  # [D]:84
ALL_OF_MUSAN = KINDS  # [W]:84
REAL_LIST = (  # [D]:86, whose fifth column is the path
    "real_rirs_isotropic_noises/rir_list"
)
SIMULATED = "simulated_rirs"  # [W]:86


def write_published_choice(
    data: Path, *, noise: Path | None, rirs: Path | None, as_wespeaker: bool = False
) -> None:
    """Write `noise` and `rirs` with the files that 3D-Speaker's or WeSpeaker's recipes use.

    3D-Speaker: free sound and real rooms. WeSpeaker: all of MUSAN and simulated rooms.
    """
    write_noise_and_rooms(
        data,
        noise=noise,
        rirs=rirs,
        find_noise=partial(
            find_noise, parts=ALL_OF_MUSAN if as_wespeaker else FREE_SOUND
        ),
        find_rooms=partial(find_rooms, simulated=as_wespeaker),
    )


def find_noise(
    folder: Path, *, parts: Sequence[str]
) -> tuple[dict[str, Path], LeftOut]:
    """Return (id -> file in these folders of MUSAN, files left out); ids begin with the kind."""
    root = folder / "musan" if (folder / "musan").is_dir() else folder
    if not any((root / kind).is_dir() for kind in KINDS):
        return find_audio(folder)
    missing = [part for part in parts if not (root / part).is_dir()]
    if missing:
        raise FileNotFoundError(
            f"{root}: incomplete MUSAN, no {' '.join(missing)}; unpack musan.tar.gz"
            " again"
        )
    wavs, left_out = find_audio(root)
    return {
        name: path
        for name, path in wavs.items()
        if any(name.startswith(f"{part}/") for part in parts)
    }, left_out


def find_rooms(folder: Path, *, simulated: bool) -> tuple[dict[str, Path], LeftOut]:
    """Return (id -> room impulse response, files left out), simulated or real ones."""
    root = folder / "RIRS_NOISES" if (folder / "RIRS_NOISES").is_dir() else folder
    if not (root / SIMULATED).is_dir() and not (root / REAL_LIST).parent.is_dir():
        return find_audio(folder)
    if simulated:
        return find_audio(root / SIMULATED)
    listed = root / REAL_LIST
    if not listed.is_file():
        raise FileNotFoundError(
            f"{root}: incomplete RIRS_NOISES, no {REAL_LIST}; unpack rirs_noises.zip"
            " again"
        )
    faults = Faults()
    rooms: dict[str, Path] = {}
    for number, line in enumerate(read_text(listed).splitlines(), 1):
        fields = line.split()
        name = fields[4].removeprefix("RIRS_NOISES/") if len(fields) > 4 else ""
        if not name or not (root / name).is_file():
            text = f"{listed}:{number}: no such file: '{line.strip()}'"
            faults.add("missing rooms", f"{text}; unpack rirs_noises.zip again")
        rooms[name] = root / name
    faults.raise_if_any(f"{root}: incomplete RIRS_NOISES")
    return rooms, {}
