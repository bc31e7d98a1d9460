"""Configurations of 3D-Speaker and WeSpeaker.

In: a config.yaml, read as plain data. Out: the toolkit, the front end and the head. Needs no torch,
so that `speakerlab import --help` is quick.
"""

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from speakerlab.config.layers import parse_yaml
from speakerlab.core.reading import open_text

Toolkit = Literal["3dspeaker", "wespeaker"]
TITLES: Mapping[Toolkit, str] = {"3dspeaker": "3D-Speaker", "wespeaker": "WeSpeaker"}
# Features of each toolkit, which no checkpoint records. 3D-Speaker applies torchaudio's defaults to
# waves in [-1, 1] (process/processor.py: FBank); WeSpeaker multiplies by 32768 first and uses a
# Hamming window (dataset/processor.py: compute_fbank), or its front end tfmel.
FRONTENDS: Mapping[str, Mapping[str, Any]] = {
    "3dspeaker": {"window": "povey", "scale": 1.0, "dither": 0.0},
    "wespeaker": {"window": "hamming", "scale": 32768.0, "dither": 0.0},
    "tfmel": {"kind": "tfmel", "window": "hamming", "scale": 1.0, "high_freq": 7600.0},
}
# The settings of tfmel that ReDimNet2 was published with; we have no others.
TFMEL = {"norm_signal": True, "do_preemph": True, "n_fft": 512, "win_length": 400}
TFMEL |= {"hop_length": 160, "f_min": 20, "f_max": 7600}
# WeSpeaker's copies of 3D-Speaker's models take 3D-Speaker's features; these are the names of their
# folders and archives (cli/hub.py, cli/speaker.py).
CONVERTED = ("campplus_cn_common_200k", "eres2net_cn_commom_200k")
MAX_SIZE = 1_000_000  # of features, in Hz, ms or bins
SPEEDS = (1.0, 0.9, 1.1)  # the order in which both toolkits number the speakers of each speed
HEADS = {
    "arc_margin": "aam_softmax",
    "add_margin": "am_softmax",
    "ArcMarginLoss": "aam_softmax",
    "AddMarginLoss": "am_softmax",
}


@dataclass(frozen=True)
class ForeignConfig:
    """The content of a config.yaml; `toolkit` is None if there is none."""

    path: Path | None
    toolkit: Toolkit | None
    values: Mapping[str, Any]

    @property
    def feat_dim(self) -> int:
        if self.kind == "tfmel":
            return self._whole(self._section("dataset_args", "tfmel_args").get("n_mels", 80))
        args = self._section("dataset_args", "fbank_args")
        stated = self._section("model_args").get("feat_dim", 80)
        return self._whole(args.get("num_mel_bins", self.values.get("fbank_dim", stated)))

    @property
    def kind(self) -> str:
        """Return WeSpeaker's name of the front end."""
        return str(self._section("dataset_args").get("frontend", "fbank"))

    @property
    def pooling(self) -> str | None:
        """Return our name of WeSpeaker's pooling."""
        name = self._section("model_args").get("pooling_func")
        return None if name is None else str(name).lower()

    def frontend(self, name: str) -> dict[str, Any]:
        """Return the arguments of our Fbank; ValueError if the features are no filter bank."""
        data = self._section("dataset_args")
        fbank, cmvn = (self._section("dataset_args", key) for key in ("fbank_args", "cmvn_args"))
        given = self._section("dataset_args", "tfmel_args")
        known = self.kind == "fbank" or TFMEL.items() <= given.items()
        if not known or cmvn.get("norm_var"):
            odd = "norm_var: true" if known else f"frontend: {self.kind}"
            raise ValueError(
                f"{self.path}: {odd} is not a filter bank with mean normalisation; such models "
                "cannot be imported"
            )
        mean_norm = bool(data.get("cmvn", True)) and bool(cmvn.get("norm_mean", True))
        mean_norm |= self.kind == "tfmel"  # which subtracts it itself
        extractor = self._section("feature_extractor", "args")
        if self.toolkit == "3dspeaker":
            mean_norm = bool(extractor.get("mean_nor", not extractor))  # its default is False
        rate = data.get("resample_rate", self.values.get("sample_rate", 16000))
        return {
            **FRONTENDS["tfmel" if self.kind == "tfmel" else name],
            "sample_rate": self._whole(rate),
            "num_mel_bins": self.feat_dim,
            "frame_length_ms": float(self._whole(fbank.get("frame_length", 25))),
            "frame_shift_ms": float(self._whole(fbank.get("frame_shift", 10))),
            "mean_norm": mean_norm,
        }

    def head(self) -> dict[str, Any] | None:
        """Return our head for the published one, None if we have no such kind."""
        if self.toolkit == "3dspeaker":
            args = self._section("loss", "args")
            kind = str(self._section("loss").get("obj")).rpartition(".")[2]
        else:
            args = self._section("projection_args")
            kind = str(args.get("project_type"))
        if kind not in HEADS:
            return None
        ours: dict[str, Any] = {"scale": args.get("scale", 32.0)}
        if HEADS[kind] == "aam_softmax":
            ours["easy_margin"] = bool(args.get("easy_margin", False))
        return {"name": HEADS[kind], "args": ours}

    def _section(self, *keys: str) -> Mapping[str, Any]:
        found: Any = self.values
        for key in keys:
            found = found[key] if isinstance(found.get(key), Mapping) else {}
        return found

    def _whole(self, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise ValueError(
                f"{self.path}: feature size {value!r} is not a whole number from 1 to {MAX_SIZE}"
            )
        return value


def read_config(path: Path | None) -> ForeignConfig:
    """Read a config.yaml as plain data; ValueError, one line, for a tag that names code."""
    if path is None:
        return ForeignConfig(None, None, {})
    values = parse_yaml(path.read_bytes(), str(path), yaml.SafeLoader)
    values = values if isinstance(values, dict) else {}
    toolkit: Toolkit | None = "wespeaker" if "model_args" in values else None
    return ForeignConfig(path, "3dspeaker" if "embedding_model" in values else toolkit, values)


def frontend_of(toolkit: Toolkit, *, folder: Path) -> Toolkit:
    """Return whose features a toolkit's model takes; depends on the folder it was found in."""
    if toolkit == "3dspeaker" or folder.name in CONVERTED:
        return "3dspeaker"
    home = Path(os.environ.get("WESPEAKER_HOME") or Path.home() / ".wespeaker")
    copied = folder.name in ("campplus", "eres2net") and folder.absolute().parent == home.absolute()
    return "3dspeaker" if copied else "wespeaker"


def read_speakers(path: Path, *, num_rows: int) -> list[str] | None:
    """Return the speakers of a head's rows, with those of speed perturbation; None if they differ.

    A 3D-Speaker list is CSV with a column `spk`, speakers in order of appearance; a WeSpeaker list
    has lines `utterance speaker`, speakers sorted.
    """
    with open_text(path) as lines:
        if path.suffix == ".csv":
            rows = csv.DictReader(lines, skipinitialspace=True)
            speakers = list(dict.fromkeys(row["spk"] for row in rows if row.get("spk")))
        else:
            speakers = sorted({words[1] for words in map(str.split, lines) if len(words) > 1})
    speeds = SPEEDS if num_rows == len(speakers) * len(SPEEDS) else (1.0,)
    from speakerlab.data.labels import class_names  # torch: `import --help` needs none

    names = class_names(speakers, speeds)
    return names if len(names) == num_rows else None
