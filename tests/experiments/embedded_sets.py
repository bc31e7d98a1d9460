"""Embeddings made by hand, and the command that scores them."""

import json

import numpy as np

from speakerlab.bin import score
from speakerlab.scoring.embeddings import EmbeddingTable

DIM, SHA = 16, "5" * 64
CHAINS = ["cosine", "mean+cosine", "mean+cosine+asnorm", "mean+cosine+asnorm+qmf"]


def write_set(folder, exp, speakers, *, per_speaker, seed, trials=True):
    """A data directory and its embeddings: a centre a speaker, noise, and what all share."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    ids = [f"{speaker}-{i}" for speaker in speakers for i in range(per_speaker)]
    spoken_by = {name: name.split("-")[0] for name in ids}
    seconds = {name: 2.0 + 12.0 * rng.random() for name in ids}
    centre = {speaker: rng.normal(size=DIM) for speaker in speakers}
    offset = np.full(DIM, 1.5)
    emb = [
        offset + centre[spoken_by[name]] + 4 / np.sqrt(seconds[name]) * rng.normal(size=DIM) / 1.4
        for name in ids
    ]
    (folder / "utt2spk").write_text("".join(f"{n} {s}\n" for n, s in spoken_by.items()))
    (folder / "utt2dur").write_text("".join(f"{n} {s:.3f}\n" for n, s in seconds.items()))
    (folder / "utt2device").write_text("".join(f"{n} d{n[-1]}\n" for n in ids))
    (folder / "spk2gender").write_text("".join(f"{s} {'mf'[int(s[1:]) % 2]}\n" for s in speakers))
    if trials:
        lines = [
            f"{a} {b} {'target' if spoken_by[a] == spoken_by[b] else 'nontarget'}\n"
            for i, a in enumerate(ids)
            for b in ids[:i]
        ]
        (folder / "trials").write_text("".join(lines))
    stem = exp / "embeddings" / folder.name / "trained"
    stem.parent.mkdir(parents=True)
    EmbeddingTable(ids, np.array(emb, dtype=np.float32), SHA).save(stem)


SIZES = {"embed_dim": 16, "parameters": 1000}


def make_experiment(tmp_path):
    """An experiment without a model, and its data: train, with 36 held-out speakers, and test."""
    exp, data = tmp_path / "exp", tmp_path / "data"
    model = exp / "model"
    model.mkdir(parents=True)
    (model / "embedder.safetensors").touch()
    (model / "card.json").write_text(json.dumps({"sha256": SHA, "commit": "abc", **SIZES}))
    layers = f"model: {{name: campplus}}\ndata: {{dir: {data}, train: [train]}}\n"
    layers += "frontend: {sample_rate: 16000}\n"
    for folder in (model, exp):
        (folder / "config.yaml").write_text(layers)
    trained = [f"t{i}" for i in range(100)]
    names = [f"{name}{speed}\n" for speed in ("", "#0.9", "#1.1") for name in trained]
    (model / "speakers.txt").write_text("".join(names))
    held_out = [f"v{i}" for i in range(36)]
    write_set(data / "train", exp, trained + held_out, per_speaker=6, seed=1, trials=False)
    write_set(data / "test", exp, [f"s{i}" for i in range(44)], per_speaker=4, seed=2)
    return exp, data


def rows_of(exp, *options):
    score.main(["--exp", str(exp), "--trials", str(exp.parent / "data/test/trials"), *options])
    return json.loads((exp / "results.json").read_text())
