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
