"""Prepare VoxCeleb: the development part of VoxCeleb2 for training, VoxCeleb1 for testing.

--corpus DIR holds both in any layout that layout.py knows. --data DIR gets `train/` and `test/`
with the cleaned lists `trials_O`, `trials_E`, `trials_H`; m4a is converted to FLAC in `wav/`.
--download gets the lists, checks and unpacks the archives in --corpus, and names missing ones.

Sources: github.com/modelscope/3D-Speaker at 09e7806, there in egs/voxceleb/sv-cam++/local/
[D] download_data.sh and [P] prepare_data.sh, the same as in github.com/wenet-e2e/wespeaker at
dfa7419, examples/voxceleb/v2/local/; [C] lists/fileparts.txt of github.com/clovaai/voxceleb_trainer
at 1cdba76; [Q] examples/voxceleb/README.md of github.com/PaddlePaddle/PaddleSpeech at 2ad3a81.
Access to the audio: issues 142 of 3D-Speaker and 184 of voxceleb_trainer, where the author of the
corpus names the page ACCESS.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.archives import checksum_fault, unpack
from egs.common.corpus.convert_audio import convert_all, require_decoder
from egs.common.corpus.fetch import download
from egs.common.corpus.noises import write_published_choice
from egs.common.corpus.official import compare, read_official
from egs.common.corpus.prepare import LeftOut, make_parser, run, write_set
from egs.voxceleb.layout import Part, find_parts
from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.data.tables import Trial

HERE = Path(__file__).resolve().parent
ACCESS = "https://mm.kaist.ac.kr/datasets/voxceleb/"
# The page states the licence; the speakers are of 145 nationalities (arXiv:1806.05622).
ABOUT = {
    "corpus": "VoxCeleb2",
    "licence": "CC BY 4.0 for research; the videos belong to their owners",
    "languages": "multilingual",
    "page": ACCESS,
}
LISTS_URL = "https://www.robots.ox.ac.uk/~vgg/data/voxceleb/meta"  # [P]:98-100
# Part -> folder of its archive ([P]:51-59), the archive, its md5 ([D]:37-63), and its parts with
# their md5 ([C]).
ARCHIVES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "vox1_test": (
        "voxceleb1/test",
        "vox1_test_wav.zip",
        "md5:185fdc63c3c739954633d50379a3d102",
        {},
    ),
    "vox1_dev": (
        "voxceleb1/dev",
        "vox1_dev_wav.zip",
        "md5:ae63e55b951748cc486645f532ba230b",
        {
            "vox1_dev_wav_partaa": "md5:e395d020928bc15670b570a21695ed96",
            "vox1_dev_wav_partab": "md5:bbfaaccefab65d82b21903e81a8a8020",
            "vox1_dev_wav_partac": "md5:017d579a2a96a077f40042ec33e51512",
            "vox1_dev_wav_partad": "md5:7bb1e9f70fddc7a678fa998ea8b3ba19",
        },
    ),
    "vox2_dev": (
        "voxceleb2_m4a",
        "vox2_aac.zip",
        "md5:bbc063c46078a602ca71605645c2a402",
        {
            "vox2_dev_aac_partaa": "md5:da070494c573e5c0564b1d11c3b20577",
            "vox2_dev_aac_partab": "md5:17fe6dab2b32b48abaf1676429cdd06f",
            "vox2_dev_aac_partac": "md5:1de58e086c5edf63625af1cb6d831528",
            "vox2_dev_aac_partad": "md5:5a043eb03e15c5a918ee6a52aad477f9",
            "vox2_dev_aac_partae": "md5:cea401b624983e2d0b2a87fb5d59aa60",
            "vox2_dev_aac_partaf": "md5:fc886d9ba90ab88e7880ee98effd6ae9",
            "vox2_dev_aac_partag": "md5:d160ecc3f6ee3eed54d55349531cb42e",
            "vox2_dev_aac_partah": "md5:6b84a81b9af72a9d9eecbb3b1f602e65",
        },
    ),
}
# (speakers, utterances), [Q]: 1,211 + 40 and 148,642 + 4,874 of VoxCeleb1.
PUBLISHED = {"train": (5_994, 1_092_009), "test": (1_251, 153_516)}
UNITS = ("speakers", "utterances")
SOURCE = "PaddleSpeech, examples/voxceleb"
# Our name -> official list ([P]:98-100), (targets, nontargets) of [Q].
LISTS = {
    "trials_O": ("veri_test2.txt", (18_802, 18_809)),
    "trials_E": ("list_test_all2.txt", (289_921, 289_897)),
    "trials_H": ("list_test_hard2.txt", (275_488, 275_406)),
}
# Counts of the uncleaned lists, [Q].
UNCLEANED = {(18_860, 18_860), (290_743, 290_737), (276_270, 276_266)}
META = "vox1_meta.csv"
LIST_FOLDERS = ("meta", ".", "trials", "voxceleb1", "vox1")


def find_list(corpus: Path, name: str) -> Path | None:
    """Return the path of a list, which is in no archive and may be in several folders."""
    places = (corpus / folder / name for folder in LIST_FOLDERS)
    return next((path for path in places if path.is_file()), None)


def download_corpus(corpus: Path, *, url: str = LISTS_URL) -> None:
    """Download the lists and unpack the archives; raise FileNotFoundError if audio is missing."""
    for name in (*(name for name, _ in LISTS.values()), META):
        if find_list(corpus, name) is None:
            download(f"{url}/{name}", corpus / LIST_FOLDERS[0] / name)
    parts, _ = find_parts(corpus)
    missing: list[str] = []
    for name, (folder, whole, checksum, pieces) in ARCHIVES.items():
        if parts[name].wavs:
            print(f"{corpus}: {name} already exists")
        elif (corpus / whole).exists():
            unpack([corpus / whole], corpus / folder, checksum=checksum)
        elif absent := [
            piece for piece in pieces or [whole] if not (corpus / piece).exists()
        ]:
            missing += absent
        else:
            check_pieces(corpus, pieces)
            unpack([corpus / piece for piece in pieces], corpus / folder)
    if missing:
        raise FileNotFoundError(_without_audio(corpus, missing))


def check_pieces(corpus: Path, pieces: Mapping[str, str]) -> None:
    """Raise ValueError naming the parts of an archive with a wrong checksum."""
    faults = Faults()
    for piece, checksum in pieces.items():
        if fault := checksum_fault([corpus / piece], checksum):
            faults.add("broken parts", f"{corpus / piece}: {fault}; download it again")
    faults.raise_if_any(f"{corpus}: broken archives, nothing was unpacked")


def _without_audio(corpus: Path, missing: Sequence[str]) -> str:
    return (
        f"{corpus}: missing audio of VoxCeleb, no {' '.join(missing)}; request access"
        f" at {ACCESS}, put the archives there and run stage 0 again"
    )


def check_layout(corpus: Path, parts: Mapping[str, Part]) -> None:
    """Raise FileNotFoundError if a part or a list is missing."""
    absent = [ARCHIVES[name] for name, part in parts.items() if not part.wavs]
    missing = [name for _, whole, _, pieces in absent for name in pieces or [whole]]
    if missing:
        raise FileNotFoundError(_without_audio(corpus, missing))
    names = [name for name, _ in LISTS.values() if find_list(corpus, name) is None]
    if names:
        raise FileNotFoundError(
            f"{corpus}: missing trial lists of VoxCeleb1, no {' '.join(names)}; run"
            f" stage 0, or download them from {LISTS_URL} to {corpus / LIST_FOLDERS[0]}"
        )


def check_folders(parts: Mapping[str, Part], faults: Faults) -> None:
    """Add an error if speakers have no recordings: their archive was not fully unpacked."""
    for name, part in parts.items():
        if part.empty:
            faults.add(
                "incomplete parts",
                f"{part.empty[0].parent}: no recordings of"
                f" {count_of(len(part.empty), 'speaker')}, for example"
                f" {part.empty[0].name}; unpack"
                f" {ARCHIVES[name][1]} again",
            )


def read_lists(
    corpus: Path, utterances: Mapping[str, Path], faults: Faults
) -> dict[str, list[Trial]]:
    """Read the three cleaned lists and compare their counts with the published ones."""
    verdicts = dict.fromkeys(UNCLEANED, "the uncleaned list")
    lists: dict[str, list[Trial]] = {}
    for name, (official, published) in LISTS.items():
        path = find_list(corpus, official)
        assert path is not None  # checked by check_layout
        lists[name] = read_official(
            path,
            faults,
            recordings=utterances,
            published=published,
            source=SOURCE,
            others=verdicts,
        )
    return lists


def read_genders(corpus: Path, speakers: set[str]) -> dict[str, str]:
    """Return speaker -> m|f of vox1_meta.csv (tab separated), empty if there is no such file."""
    path = find_list(corpus, META)
    if path is None:
        return {}
    with open_text(path, newline="") as lines:
        rows = [row for row in csv.reader(lines, delimiter="\t") if row]
    column = next(
        (
            i
            for i, name in enumerate(rows[0] if rows else [])
            if name.strip() == "Gender"
        ),
        None,
    )
    if column is None:
        raise ValueError(f"{path}: no column Gender in {rows[:1]}; download it again")
    genders = {row[0]: row[column].strip() for row in rows[1:] if len(row) > column}
    return {
        name: sex
        for name, sex in genders.items()
        if name in speakers and sex in ("m", "f")
    }


def convert_m4a(
    wavs: Mapping[str, Path], folder: Path, *, corpus: Path, num_jobs: int
) -> tuple[dict[str, Path], LeftOut]:
    """Return (utterance -> wav or flac, files that cannot be converted)."""
    coded = {name: path for name, path in wavs.items() if path.suffix.lower() == ".m4a"}
    if not coded:
        return dict(wavs), {}
    require_decoder(coded.values(), where=corpus)
    print(
        f"{folder}: converting {len(coded)} m4a files with {num_jobs} jobs", flush=True
    )
    named = {name.removesuffix(".wav"): path for name, path in coded.items()}
    made, left_out = convert_all(named, folder, num_jobs=num_jobs)
    ready = {name: path for name, path in wavs.items() if name not in coded}
    return ready | {f"{name}.wav": path for name, path in made.items()}, left_out


def prepare(
    corpus: Path,
    data: Path,
    *,
    noise: Path | None = None,
    rirs: Path | None = None,
    num_jobs: int = 1,
    as_wespeaker: bool = False,
) -> None:
    """Write the data directories.

    as_wespeaker: use the files of MUSAN and RIRS_NOISES that WeSpeaker's recipe uses.
    """
    parts, left_out = find_parts(corpus)
    check_layout(corpus, parts)
    faults = Faults()
    check_folders(parts, faults)
    sets = {
        "train": parts["vox2_dev"],
        "test": Part({**parts["vox1_dev"].wavs, **parts["vox1_test"].wavs}),
    }
    speakers = {name: part.speakers for name, part in sets.items()}
    for name, owners in speakers.items():
        counted = len(set(owners.values())), len(owners)
        print(compare(name, counted, PUBLISHED[name], UNITS, SOURCE))
    trials = read_lists(corpus, sets["test"].wavs, faults)
    faults.raise_if_any(f"{corpus}: inconsistent corpus")
    genders = read_genders(corpus, set(speakers["test"].values()))
    wavs, broken = convert_m4a(
        sets["train"].wavs, data / "wav", corpus=corpus, num_jobs=num_jobs
    )
    owners = {name: speakers["train"][name] for name in wavs}
    not_used = left_out | broken
    write_set(
        data / "train", wavs=wavs, speakers=owners, left_out=not_used, about=ABOUT
    )
    write_set(
        data / "test",
        wavs=sets["test"].wavs,
        speakers=speakers["test"],
        trials=trials,
        columns={"spk2gender": genders} if genders else None,
    )
    # [P]:84,86, for both recipes.
    write_published_choice(data, noise=noise, rirs=rirs, as_wespeaker=as_wespeaker)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    parser = make_parser("Prepare VoxCeleb1 and VoxCeleb2.", corpus=HERE / "corpus")
    whose = (
        "recipe whose part of MUSAN and RIRS_NOISES to use (3dspeaker: free-sound and"
        " real "
    )
    parser.add_argument(
        "--noise-as",
        choices=("3dspeaker", "wespeaker"),
        default="3dspeaker",
        help=whose + "rooms; wespeaker: all of MUSAN and simulated rooms)",
    )
    args = parser.parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(args.corpus),
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            noise=args.noise,
            rirs=args.rirs,
            num_jobs=args.num_jobs,
            as_wespeaker=args.noise_as == "wespeaker",
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
