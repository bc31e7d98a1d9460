"""Embeddings made by hand, and the command that scores them."""

import json

import numpy as np

from speakerlab.bin import score
from speakerlab.scoring.embeddings import EmbeddingTable

DIM = 16
SHA = "5" * 64
CHAINS = [
    "cosine",
    "mean+cosine",
    "mean+cosine+asnorm",
    "mean+cosine+asnorm+qmf",
]


def write_table(path, table):
    """Write a Kaldi table in the order of the dictionary."""
    rows = [f"{key} {value}\n" for key, value in table.items()]
    path.write_text("".join(rows))


def write_set(folder, exp, speakers, *, per_speaker, seed, trials=True):
    """A data directory and its embeddings: a centre a speaker, noise, and what all share."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    spoken_by = {}
    for speaker in speakers:
        for number in range(per_speaker):
            spoken_by[f"{speaker}-{number}"] = speaker
    ids = list(spoken_by)
    seconds = {name: 2.0 + 12.0 * rng.random() for name in ids}
    centre = {speaker: rng.normal(size=DIM) for speaker in speakers}
    offset = np.full(DIM, 1.5)
    emb = []
    for name in ids:
        # the longer an utterance, the less its noise
        noise = 4 / np.sqrt(seconds[name]) * rng.normal(size=DIM) / 1.4
        emb.append(offset + centre[spoken_by[name]] + noise)

    write_table(folder / "utt2spk", spoken_by)
    durations = {name: f"{value:.3f}" for name, value in seconds.items()}
    write_table(folder / "utt2dur", durations)
    devices = {name: f"d{name[-1]}" for name in ids}
    write_table(folder / "utt2device", devices)
    genders = {}
    for speaker in speakers:
        genders[speaker] = "mf"[int(speaker[1:]) % 2]
    write_table(folder / "spk2gender", genders)
    if trials:
        lines = []
        for number, enrol in enumerate(ids):
            for test in ids[:number]:
                is_target = spoken_by[enrol] == spoken_by[test]
                label = "target" if is_target else "nontarget"
                lines.append(f"{enrol} {test} {label}\n")
        (folder / "trials").write_text("".join(lines))
    stem = exp / "embeddings" / folder.name / "trained"
    stem.parent.mkdir(parents=True)
    emb_ND = np.array(emb, dtype=np.float32)
    EmbeddingTable(ids, emb_ND, SHA).save(stem)


SIZES = {"embed_dim": 16, "parameters": 1000}


def make_experiment(tmp_path):
    """An experiment without a model, and its data: train, with 36 held-out speakers, and test."""
    exp = tmp_path / "exp"
    data = tmp_path / "data"
    model = exp / "model"
    model.mkdir(parents=True)
    (model / "embedder.safetensors").touch()
    card = {"sha256": SHA, "commit": "abc", **SIZES}
    (model / "card.json").write_text(json.dumps(card))
    layers = f"model: {{name: campplus}}\ndata: {{dir: {data}, train: [train]}}\n"
    layers += "frontend: {sample_rate: 16000}\n"
    for folder in (model, exp):
        (folder / "config.yaml").write_text(layers)
    trained = [f"t{i}" for i in range(100)]
    names = []
    for speed in ("", "#0.9", "#1.1"):
        names += [f"{name}{speed}\n" for name in trained]
    (model / "speakers.txt").write_text("".join(names))
    held_out = [f"v{i}" for i in range(36)]
    write_set(
        data / "train",
        exp,
        trained + held_out,
        per_speaker=6,
        seed=1,
        trials=False,
    )
    of_test = [f"s{i}" for i in range(44)]
    write_set(data / "test", exp, of_test, per_speaker=4, seed=2)
    return exp, data


def rows_of(exp, *options):
    trials = exp.parent / "data/test/trials"
    arguments = ["--exp", str(exp), "--trials", str(trials)]
    score.main([*arguments, *options])
    return json.loads((exp / "results.json").read_text())
