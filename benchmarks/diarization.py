"""Diarization beside 3D-Speaker's: of a recording, and clustering of the same embeddings.

    python benchmarks/diarization.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker
    python benchmarks/diarization.py --peer DIR --model MODEL --data DIR DIR --json FILE

Rows `diarize.campplus.<precision>`: seconds of audio per second, of `speakerlab diarize` and of
the peer's `Diarization3Dspeaker`, with the same weights. The recording consists of utterances
(corpus.py) with pauses. Both sides get its regions of speech: the peer's VAD needs a download.
Rows `cluster.<method>`: windows per second, of 4,800 drawn embeddings, as many as in an hour.
Rows `cluster.<method>.<data>.der` and `.right`, with --model, a CAM++ model, and --data, folders
with `wav.scp` and `ref.rttm`: DER on the true regions of speech, without a collar, overlap scored,
and in how many recordings the number of speakers is right. Both sides cluster our embeddings; turns
follow from the labels in the same way. Needs scikit-learn and fastcluster, the peer's libraries.
Letters: S samples, N windows, D dimensions.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import data
import numpy as np
from sides import (
    Process,
    Side,
    add_seconds,
    close_sides,
    import_peer,
    peaks_of,
    replace_module,
    report,
    run_case,
    run_of,
    say,
    start_sides,
    take_turns,
    timed,
    wants,
)

PEERS = ("3dspeaker",)
QUICK = ("--seconds=3", "--audio-seconds=60")
METHODS = ("spectral", "ahc")
PRECISIONS = ("fp32", "bf16")
PAUSE_SECONDS = 0.5
# Of the drawn windows: a cosine of 0.4 within a speaker.
NUM_VOICES = 6
SPREAD = 1.2
DIM = 192


class Ours(Side):
    """The command `diarize`, and the clustering that it uses."""

    def __init__(self, folder: str, model: str, device: str) -> None:
        """Write the weights of the backbone as the peer reads them."""
        import torch

        from speakerlab.checkpoints.published import load_published

        self.folder, self.model, self.device = Path(folder), model, device
        backbone = load_published(Path(model)).embedder.get_submodule("backbone")
        torch.save(backbone.state_dict(), self.folder / "peer.pt")

    def diarize(self, precision: str) -> None:
        """Run the command on the recording."""
        from speakerlab.bin import diarize

        arguments = [
            str(self.folder / "long.wav"),
            f"--vad={self.folder / 'long.lab'}",
            f"--model={self.model}",
            f"--precision={precision}",
            f"--out={self.folder / 'ours'}",
        ]
        diarize.main(arguments)

    def run(self, precision: str, steps: int) -> float:
        return timed(lambda: self.diarize(precision), self.device, steps=steps)

    def cluster(self, method: str, emb_ND: np.ndarray) -> np.ndarray:
        """Return the speaker of each window."""
        from speakerlab.diarization.clustering import METHODS, cluster

        return cluster(emb_ND, METHODS[method]()).speaker_N

    def run_cluster(self, method: str, steps: int) -> float:
        emb_ND = np.load(self.folder / "drawn.npy")
        return timed(lambda: self.cluster(method, emb_ND), steps=steps)

    def label(self, method: str, source: str, target: str) -> None:
        """Cluster each recording of a file of embeddings; write the speakers of its windows."""
        with np.load(source) as recordings:
            labels = {
                name: self.cluster(method, emb_ND)
                for name, emb_ND in recordings.items()
            }
        np.savez(target, **labels)


class Peer(Ours):
    """3D-Speaker's pipeline, with our weights for its download and our regions for its VAD."""

    def __init__(self, folder: str, model: str, device: str) -> None:
        import torch

        self.folder, self.device = Path(folder), device
        data.replace_torchaudio()
        for name in (
            "umap",
            "hdbscan",
            "modelscope.pipelines",
            "modelscope.utils.constant",
        ):
            replace_module(name, pipeline=None, Tasks=None)
        replace_module("pyannote.audio", Inference=None, Model=None)
        script = import_peer("speakerlab.bin.infer_diarization")
        self.build_cluster = script.get_cluster_backend
        regions = []  # in milliseconds
        for line in (self.folder / "long.lab").read_text("utf-8").splitlines():
            start, stop, _ = line.split()
            regions.append([1000 * float(start), 1000 * float(stop)])
        weights = torch.load(self.folder / "peer.pt", map_location="cpu")
        dim = weights["xvector.dense.linear.weight"].shape[0]
        network = (
            import_peer("speakerlab.models.campplus.DTDNN").CAMPPlus(80, dim).to(device)
        )
        network.load_state_dict(weights)
        feats = import_peer("speakerlab.process.processor").FBank(
            80, 16000, mean_nor=True
        )
        script.get_speaker_embedding_model = lambda *_: (network.eval(), feats)
        script.get_voice_activity_detection_model = lambda *_: (
            lambda _wave: [{"value": regions}]
        )
        self.pipeline = script.Diarization3Dspeaker(device)

    def diarize(self, precision: str) -> None:
        """Run the pipeline, always in fp32."""
        self.pipeline(str(self.folder / "long.wav"))

    def cluster(self, method: str, emb_ND: np.ndarray) -> np.ndarray:
        """Return the speaker of each window."""
        np.random.seed(0)  # of its k-means
        if method == "spectral":
            return self.build_cluster()(emb_ND.copy())
        module = import_peer("speakerlab.process.cluster")
        return module.CommonClustering("AHC", mer_cos=0.8)(emb_ND.copy())


SIDES = {"ours": Ours, "3dspeaker": Peer}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows of the recording, of the drawn windows and of the given data."""
    if options.data and options.model is None:
        raise SystemExit("diarization.py: --data needs --model")
    if options.model is None:
        Process(
            "extract", "ours", folder=options.folder, model="campplus", device="cpu"
        ).close()
    seconds = make_recording(options)
    np.save(options.folder / "drawn.npy", draw_windows(options.windows))
    sides = start_sides(
        "diarization",
        options.threads,
        options.peers,
        folder=options.folder,
        model=options.model or options.folder / "campplus/model",
        device=options.device,
    )
    note = f"{seconds:.0f} s of audio"
    for precision in PRECISIONS:
        name = f"diarize.campplus.{precision}"
        if wants(options, name):
            runs = [run_of(side, precision=precision) for side in sides]
            turns = take_turns(runs, amount=seconds, seconds=0.0)  # as few as can be
            yield report(name, turns, unit="s/s", note=note, **peaks_of(sides))
    for method in METHODS:
        name = f"cluster.{method}"
        if wants(options, name):
            runs = [run_of(side, "run_cluster", method=method) for side in sides]
            turns = take_turns(runs, amount=options.windows, seconds=options.seconds)
            yield report(name, turns, unit="windows/s")
    for folder in options.data:
        yield from score_labels(options, sides, folder)
    close_sides(sides)


def make_recording(options: argparse.Namespace) -> float:
    """Write long.wav, utterances with pauses, and long.lab, their times; return its seconds."""
    import corpus

    audio_dir = corpus.find_folder(options, "audio", corpus.DEFAULTS)
    waves = list(
        corpus.synthetic.voices() if audio_dir is None else read_some(audio_dir)
    )
    pause_S = np.zeros(round(PAUSE_SECONDS * corpus.RATE), dtype=np.int16)
    parts, lines, start = [], [], 0
    for _, wave_S in itertools.cycle(waves):
        if start >= options.audio_seconds * corpus.RATE:
            break
        stop = start + len(wave_S)
        lines.append(f"{start / corpus.RATE:.3f} {stop / corpus.RATE:.3f} speech\n")
        parts += [wave_S, pause_S]
        start = stop + len(pause_S)
    corpus.audio.write(options.folder / "long.wav", np.concatenate(parts), corpus.RATE)
    (options.folder / "long.lab").write_text("".join(lines), encoding="utf-8")
    return start / corpus.RATE


def read_some(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator over the recordings of NUM_VOICES speakers of a folder, one of each."""
    import corpus

    paths = corpus.recordings(folder)
    utterance_of = {
        speaker: name for name, speaker in corpus.speakers_of(paths).items()
    }
    return corpus.read_waves(
        {name: paths[name] for name in list(utterance_of.values())[:NUM_VOICES]}
    )


def draw_windows(num_windows: int) -> np.ndarray:
    """Draw emb_ND of speakers in turns of ten windows."""
    rng = np.random.default_rng(0)
    centre_KD = rng.standard_normal((NUM_VOICES, DIM))
    speaker_N = np.repeat(rng.integers(NUM_VOICES, size=num_windows // 10 + 1), 10)[
        :num_windows
    ]
    return centre_KD[speaker_N] + SPREAD * rng.standard_normal((num_windows, DIM))


def score_labels(
    options: argparse.Namespace, sides: Sequence[Process], folder: Path
) -> Iterator[Any]:
    """Yield the row of each method: DER, and the recordings with the right number of speakers."""
    from rows import Row

    from speakerlab.data.tables import read_table
    from speakerlab.diarization.regions import Turn, merge_regions, read_rttm
    from speakerlab.diarization.resegmentation import find_segments
    from speakerlab.diarization.scoring import score_recordings, total
    from speakerlab.inference.speaker_model import load_model
    from speakerlab.inference.speech_windows import embed_windows

    names = {method: f"cluster.{method}.{folder.name}" for method in METHODS}
    if not any(wants(options, name) for name in names.values()):
        return
    reference, wavs = read_rttm(folder / "ref.rttm"), read_table(folder / "wav.scp")
    model = load_model(options.model)
    embedded = {}
    for name, turns in reference.items():
        embedded[name] = embed_windows(
            model, wavs[name], regions=merge_regions(t[:2] for t in turns)
        )
    source, labels = options.folder / "windows.npz", options.folder / "labels.npz"
    np.savez(source, **{name: windows.emb_ND for name, windows in embedded.items()})
    for method, row in names.items():
        if not wants(options, row):
            continue
        ders, counts = [], []
        for side in sides:
            side.ask("label", method=method, source=source, target=labels)
            turns = {}
            with np.load(labels) as speakers:
                for name, windows in embedded.items():
                    # Speakers as numbers without gaps, then one-hot for each window.
                    _, speaker_N = np.unique(speakers[name], return_inverse=True)
                    is_active_NK = np.eye(speaker_N.max() + 1)[speaker_N]
                    segments = find_segments(
                        windows.regions, windows.windows, is_active_NK
                    )
                    turns[name] = [Turn(*segment[:3]) for segment in segments]
            errors = list(score_recordings(reference, turns).values())
            ders.append(100 * (total(errors).der or 0.0))
            counts.append(
                sum(error.num_speakers == error.num_found for error in errors)
            )
        for end, values, unit in (
            ("der", ders, "DER %"),
            ("right", counts, "recordings"),
        ):
            peer = values[1] if len(values) > 1 else None
            score = Row(name=f"{row}.{end}", ours=values[0], peer=peer, unit=unit)
            say(score.line())
            yield score


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, help="a CAM++ model folder (default: random weights)")
    data_help = "data to score the clustering on"
    add("--data", type=Path, nargs="+", default=[], metavar="DIR", help=data_help)
    add("--audio", type=Path, metavar="DIR", help="a folder per speaker, flac or wav")
    add("--audio-seconds", type=float, default=900.0, help="of the recording (900)")
    add("--windows", type=int, default=4800, help="that are drawn (4800, an hour)")
    add_seconds(parser, 30.0)


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
