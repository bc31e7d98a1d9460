"""Prepares the 3D-Speaker corpus from its official layout.

In: --corpus DIR with `train/`, `test/` and `files/`, as the three official archives unpack.
Out: --data DIR with `train/`, `test/` and its three trial lists, device 09 left out of both as in
the official recipe. With --download (stage 0) the archives are fetched into --corpus instead.

Sources: github.com/modelscope/3D-Speaker at 09e7806, there in egs/3dspeaker/sv-cam++/local/
[D] download_data.sh and [P] prepare_data.sh; [S] speakerlab/bin/compute_score_metrics.py;
[L] egs/3dspeaker/language-identification/local/prepare_data.sh. [A] is arXiv:2306.15354v3.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus import check_disjoint, make_parser, run, write_noise_and_rooms, write_set
from egs.common.fetch import download, unpack
from speakerlab.data.tables import Trial
from speakerlab.faults import Faults

HERE = Path(__file__).resolve().parent
URL = "https://speech-lab-share-data.oss-cn-shanghai.aliyuncs.com/3D-Speaker"  # [D]:40,55,65
# What each folder of the corpus is unpacked from: archives in order, with their published md5
# ([D]:42 test, :48-53 the six parts of train; :63-66 gives none for the lists). All unpack into
# one folder, the corpus ([P]:51-57).
ARCHIVES: dict[str, dict[str, str | None]] = {
    "files": {"3dspeaker_files.tar.gz": None},
    "test": {"test.tar.gz": "md5:45972606dd10d3f7c1c31f27acdfbed7"},
    "train": {
        "train.tar.gz-part-a": "md5:4109addde41d88760947263f18117ac3",
        "train.tar.gz-part-b": "md5:5a17ef2fa28b1b9e340277edffb8b51c",
        "train.tar.gz-part-c": "md5:bd2ce08f5b51005b66afe484b01a4a59",
        "train.tar.gz-part-d": "md5:5cd31d961d2d5211aea38b8b95f7239a",
        "train.tar.gz-part-e": "md5:58f3fb7d28ae7f4b65ee35a1ed7ab106",
        "train.tar.gz-part-f": "md5:be64551c030e8087562a10df2c74ccb1",
    },
}
# [P]:80-81 and :91-92 drop every line with this word, in train and in test.
LEFT_OUT = "Device09"
TRIALS = ("trials_cross_device", "trials_cross_distance", "trials_cross_dialect")  # [P]:97-99
LABELS = {"1": True, "target": True, "0": False, "nontarget": False}  # [S]:65-70
# (speakers, utterances): [A] section 3 for train, table 5 for test.
PUBLISHED = {"train": (10_000, 579_013), "test": (240, 18_782)}


def download_corpus(corpus: Path, *, url: str = URL) -> None:
    """Fetch and unpack the official archives; a folder that is there is left alone."""
    for folder, archives in ARCHIVES.items():
        if (corpus / folder).is_dir():
            print(f"{corpus / folder}: is there already")
            continue
        for name, checksum in archives.items():
            download(f"{url}/{name}", corpus / name, checksum=checksum)
        unpack([corpus / name for name in archives], corpus)


def check_layout(corpus: Path) -> None:
    """Raise FileNotFoundError naming every missing piece and the archive that holds it."""
    lists = [f"files/{s}_{name}" for s in PUBLISHED for name in ("wav.scp", "utt2spk")]
    lists += [f"files/{split}_utt2info.csv" for split in PUBLISHED]
    lists += [f"files/{name}" for name in TRIALS]
    missing = [name for name in (*PUBLISHED, *lists) if not (corpus / name).exists()]
    if not missing:
        return
    needed = [
        a for key in ARCHIVES if any(m.split("/")[0] == key for m in missing) for a in ARCHIVES[key]
    ]
    raise FileNotFoundError(
        f"{corpus}: not the 3D-Speaker corpus, got no {' '.join(missing)}; get {' '.join(needed)} "
        f"from {URL} (stage 0 does) and unpack there"
    )


def read_columns(path: Path, faults: Faults) -> dict[str, str]:
    """A list of the corpus: first word -> the rest of the line."""
    table: dict[str, str] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            words = line.split(maxsplit=1)
            if len(words) == 1:
                faults.add(
                    "bad lines", f"{path}:{number}: has one column, got '{words[0]}'; correct it"
                )
            elif words and words[0] in table:
                faults.add(
                    "duplicate ids",
                    f"{path}:{number}: duplicate id, got {words[0]}; keep one line",
                )
            elif words:
                table[words[0]] = words[1].strip()
    return table


def read_split(
    corpus: Path, split: str, faults: Faults
) -> tuple[dict[str, Path], dict[str, str], int]:
    """(utterance -> file, utterance -> speaker, utterances left out) of `train` or `test`."""
    # Paths in the list are relative to the corpus ([P]:77,88).
    listed = read_columns(corpus / f"files/{split}_wav.scp", faults)
    spoken_by = read_columns(corpus / f"files/{split}_utt2spk", faults)
    wavs = {u: corpus / path for u, path in listed.items() if LEFT_OUT not in f"{u} {path}"}
    for utterance in wavs.keys() - spoken_by.keys():
        faults.add(
            "utterances without a speaker",
            f"{corpus}/files/{split}_utt2spk: no speaker, got nothing for {utterance}; add a line",
        )
    speakers = {utterance: spoken_by.get(utterance, "") for utterance in wavs}
    num_speakers = len({spoken_by[utterance] for utterance in listed.keys() & spoken_by.keys()})
    print(_compare(split, num_speakers=num_speakers, num_utterances=len(listed)))
    return wavs, speakers, len(listed) - len(wavs)


def _compare(split: str, *, num_speakers: int, num_utterances: int) -> str:
    """One line: what was found beside what is published."""
    published = PUBLISHED[split]
    verdict = "" if (num_speakers, num_utterances) == published else ": not the whole corpus"
    return (
        f"{split}: {num_speakers} speakers and {num_utterances} utterances are listed, published "
        f"are {published[0]} and {published[1]} (arXiv:2306.15354){verdict}"
    )


def read_trials(path: Path, known: Mapping[str, str], faults: Faults) -> list[Trial]:
    """`enrol test label` lines, in the order of the file; every id must be in `known`."""
    trials: list[Trial] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words:
                continue
            if len(words) != 3 or words[2] not in LABELS:
                faults.add(
                    "bad trials",
                    f"{path}:{number}: is not 'enrol test {'|'.join(LABELS)}', "
                    f"got '{line.strip()}'; correct it",
                )
                continue
            for utterance in words[:2]:
                if utterance not in known:
                    faults.add(
                        "trials of unknown utterances",
                        f"{path}:{number}: no such test utterance, got {utterance}; "
                        "remove the trial or complete the corpus",
                    )
            trials.append((words[0], words[1], LABELS[words[2]]))
    return trials


def count_without_info(path: Path, utterances: Mapping[str, Path]) -> int:
    """How many utterances have no row in utt2info.csv, whose first column is the id ([L]:89)."""
    with path.open(encoding="utf-8") as lines:
        known = {line.split(",", 1)[0].strip() for line in lines}
    return len(utterances.keys() - known)


def prepare(
    corpus: Path, data: Path, *, noise: Path | None = None, rirs: Path | None = None
) -> None:
    """Write the data directories of the corpus; utt2info.csv is copied beside the lists."""
    check_layout(corpus)
    faults = Faults()
    sets = {split: read_split(corpus, split, faults) for split in PUBLISHED}
    trials = {
        name: read_trials(corpus / "files" / name, sets["test"][1], faults) for name in TRIALS
    }
    faults.raise_if_any(f"{corpus}: refused")
    check_disjoint(sets["train"][1].values(), sets["test"][1].values(), where=corpus)
    for split, (wavs, speakers, num_left_out) in sets.items():
        write_set(
            data / split, wavs=wavs, speakers=speakers, trials=trials if split == "test" else None
        )
        info = corpus / f"files/{split}_utt2info.csv"
        shutil.copyfile(info, data / split / "utt2info.csv")
        unknown = count_without_info(info, wavs)
        print(
            f"{data / split}: {num_left_out} utterances of {LEFT_OUT} left out"
            + (f", {unknown} of the others are not in {info.name}" if unknown else "")
        )
    write_noise_and_rooms(data, noise=noise, rirs=rirs)


def main(argv: Sequence[str] | None = None) -> int:
    """The command around `prepare` and `download_corpus`."""
    args = make_parser("Prepare the 3D-Speaker corpus.", corpus=HERE / "corpus").parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(args.corpus),
        prepare=lambda: prepare(args.corpus, args.data, noise=args.noise, rirs=args.rirs),
    )


if __name__ == "__main__":
    sys.exit(main())
