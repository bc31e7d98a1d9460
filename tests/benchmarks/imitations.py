"""Small imitations of the packages of 3D-Speaker and WeSpeaker, for test_benchmark_cases.py."""

from pathlib import Path


def imitate(folder: Path, package: str, mark: str, sources: dict[str, str]) -> Path:
    """Write a package of a peer's layout."""
    for name, source in sources.items():
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (folder / mark).parent.mkdir(parents=True, exist_ok=True)
    if not (folder / mark).exists():
        (folder / mark).touch()
    return folder


# 3D-Speaker's package whose model is ours, its embeddings multiplied by FACTOR.
OPEN = "__path__.append({path!r})\n"
CAMPPLUS = """
import importlib.util
spec = importlib.util.spec_from_file_location("ours", {path!r})
ours = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ours)

class CAMPPlus(ours.CAMPPlus):
    def __init__(self, feat_dim, embedding_size):
        super().__init__(feat_dim=feat_dim, embed_dim=embedding_size)

    def forward(self, feats_BTF):
        return {factor} * super().forward(feats_BTF)
"""
# What the data and frontend cases use of 3D-Speaker, doing little; features as it has them.
PROCESSOR = """
import torchaudio
from torchaudio.compliance import kaldi

class WavReader:
    def __init__(self, sample_rate, duration, speed_pertub):
        self.num_samples = int(duration * sample_rate)

    def __call__(self, path):
        return torchaudio.load(path)[0][0, : self.num_samples], 0

class SpkLabelEncoder:
    def __init__(self, data_file):
        pass

class SpkVeriAug:
    def __init__(self, prob, noise_file, reverb_file):
        pass

    def __call__(self, wave_S):
        return wave_S

class FBank:
    def __init__(self, num_bins, sample_rate, mean_nor):
        self.num_bins = num_bins

    def __call__(self, wave_S):
        feats_TF = kaldi.fbank(wave_S[None], num_mel_bins=self.num_bins, dither=0.0)
        return FACTOR * (feats_TF - feats_TF.mean(0))
"""
DATASET = """
import csv

class WavSVDataset:
    def __init__(self, data_file, parts):
        with open(data_file) as file:
            self.data_points = {row.pop("ID"): row for row in csv.DictReader(file)}
        self.rows, self.parts = list(self.data_points.values()), parts

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        wave_S, _ = self.parts["wav_reader"](self.rows[index]["path"])
        return self.parts["feature_extractor"](self.parts["augmentations"](wave_S)), 0
"""
# What scoring.py uses of WeSpeaker; scores are wrong by OFFSET.
LOOP = """
import kaldiio
from sklearn.metrics.pairwise import cosine_similarity
from tqdm import tqdm

def trials_cosine_score(eval_scp_path, store_dir, mean_vec, trials):
    found = dict(kaldiio.load_scp_sequential(eval_scp_path))
    with open(trials[0]) as lines, open(f"{store_dir}/head.score", "w") as out:
        for line in tqdm(lines.readlines(), desc="trials"):
            a, b, label = line.split()
            score = cosine_similarity(found[a][None], found[b][None])[0][0] + OFFSET
            out.write(f"{a} {b} {score:.5f} {label}\\n")
"""
METRICS = """
import numpy as np

def compute_pmiss_pfa_rbst(scores, labels):
    labels = labels[np.argsort(scores)]
    return np.cumsum(labels) / labels.sum(), 1 - np.cumsum(1 - labels) / (1 - labels).sum()

def compute_eer(fnr, fpr, scores):
    after = np.flatnonzero(fnr >= fpr)[0]
    gap = fpr - fnr
    share = gap[after - 1] / (gap[after - 1] - gap[after])
    return fnr[after - 1] + share * (fnr[after] - fnr[after - 1]), scores[after]

def compute_c_norm(fnr, fpr, p):
    return (p * fnr + (1 - p) * fpr).min() / min(p, 1 - p)
"""
