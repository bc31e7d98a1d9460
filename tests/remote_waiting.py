"""How long a training waits for shards in a store: measured on loopback, and simulated.

    python tests/remote_waiting.py SCRATCH                # needs 300 MB of disk and 3 minutes
    python tests/remote_waiting.py SCRATCH --simulate     # 18,000 crops/s

Measured: a server adds 20 ms to each request and sends 50 MB/s over each connection; one data
worker reads batches, as often as a training of CAM++ on a CPU asks for them. Simulated: connections
of the same kind, and a host of eight fast GPUs.
"""

import argparse
import heapq
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from speakerlab.data import audio, remote
from speakerlab.data.check import check_data_dirs
from speakerlab.data.loader import TrainCrops, micro_batches, train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.remote import PIECE_BYTES, Store
from speakerlab.data.remote_tables import local_folder
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.shards import Layout
from speakerlab.data.tables import write_data_dir

RATE = 16000
CROP = 3 * RATE
BATCH = 32
BATCHES = 45
CROPS_PER_SECOND = 60
LATENCY = 0.02  # s
BYTES_PER_SECOND = 50e6  # of a connection
# (crops read ahead, GB of the cache), in the order of the measurements. The second finds all that
# it needs in the cache.
CASES = {
    "empty cache": (1000, 1.0),
    "full cache": (1000, 1.0),
    "cache of half of the corpus": (60, 0.08),
    "no read-ahead": (1, 1.0),
}
# Of the simulation: (connections, crops read ahead).
SIMULATED = ((64, 47_000), (72, 47_000), (72, 98_000), (128, 24_000), (128, 47_000))
FAST = 18_000  # crops/s
UTTERANCE_BYTES = 288_000  # 9 s
WINDOW = 32_768  # utterances that are shuffled at once
NUM_WINDOWS = 5


def make_corpus(scratch: Path) -> None:
    """Pack 600 utterances of 8 s of noise into a folder that can be served."""
    base_S = np.random.default_rng(0).normal(0, 2000, 8 * RATE).astype(np.int16)
    wavs: dict[str, Path] = {}
    speakers: dict[str, str] = {}
    (scratch / "wav").mkdir(parents=True)
    for number in range(600):
        path = scratch / f"wav/u{number}.wav"
        audio.write(path, np.roll(base_S, number * 37), RATE)
        wavs[f"u{number}"] = path
        speakers[f"u{number}"] = f"s{number % 20}"
    write_data_dir(scratch / "train", wavs=wavs, speakers=speakers)
    check_data_dirs([scratch / "train"])
    layout = Layout.of_waves("pcm", sample_rate=RATE)
    store = Store(f"file://{scratch}/web/corpus")
    pack_data_dir(scratch / "train", layout=layout, store=store)


@contextmanager
def slow_server(folder: Path) -> Iterator[str]:
    """Serve a folder from another process; yield its address."""
    code = f"""
import sys
from pathlib import Path
from object_server import served
with served(Path({str(folder)!r})) as server:
    server.latency = {LATENCY}
    server.bytes_per_second = {BYTES_PER_SECOND}
    print(server.url, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


def measure(scratch: Path) -> None:
    """Print the seconds to the first batch and the share of waiting of each case."""
    with slow_server(scratch / "web") as url:
        for name, (num_ahead, cache_gb) in CASES.items():
            if name != "full cache":
                shutil.rmtree(scratch / "cache", ignore_errors=True)
            remote.use_cache(str(scratch / "cache"), cache_gb)
            local_folder.cache_clear()
            folder = local_folder(f"{url}/corpus")
            first_seconds, wait_share = read_batches(folder, num_ahead)
            print(
                f"{name}: first batch after {first_seconds:.2f} s, then waiting"
                f" {100 * wait_share:.1f} % of the time",
                flush=True,
            )


def read_batches(folder: Path, num_ahead: int) -> tuple[float, float]:
    """Return the seconds to the first batch, and the share of waiting for all others."""
    manifest = read_manifest([folder], sample_rate=RATE)
    crops = TrainCrops(
        manifest,
        {},
        crop_samples=CROP,
        label_KN=np.arange(20)[None],
        seed=0,
    )
    order = EpochOrder(
        manifest.num_samples_N,
        crop_samples=CROP,
        global_batch=BATCH,
        seed=0,
    )
    batches = train_loader(
        crops,
        micro_batches(order, start_step=0, stop_step=BATCHES, micro_batch=BATCH),
        num_workers=1,
        pin_memory=False,
        num_ahead=num_ahead,
    )
    began = time.monotonic()
    next(batches)
    first_seconds = time.monotonic() - began

    waited = 0.0
    began = time.monotonic()
    for _ in range(BATCHES - 1):
        time.sleep(BATCH / CROPS_PER_SECOND)
        asked = time.monotonic()
        next(batches)
        waited += time.monotonic() - asked
    total = time.monotonic() - began
    batches.close()
    return first_seconds, waited / total


def simulate(num_connections: int, num_ahead: int) -> tuple[float, float]:
    """Return the seconds of waiting in the first window, and the share of waiting in the others.

    A crop may be asked for when the one `num_ahead` before it has been used. Letters: C crops.
    """
    draws = np.random.default_rng(0)
    crop_bytes = 2 * CROP
    crops_per_utterance = UTTERANCE_BYTES // crop_bytes
    windows: list[np.ndarray] = []
    for first in range(0, NUM_WINDOWS * WINDOW, WINDOW):
        rows = np.repeat(np.arange(first, first + WINDOW), crops_per_utterance)
        windows.append(draws.permutation(rows))
    utterance_C = np.concatenate(windows)
    offset_C = draws.integers(0, UTTERANCE_BYTES - crop_bytes, len(utterance_C))
    start_C = utterance_C * UTTERANCE_BYTES + offset_C
    first_piece_C = start_C // PIECE_BYTES
    last_piece_C = (start_C + crop_bytes) // PIECE_BYTES

    piece_seconds = LATENCY + PIECE_BYTES / BYTES_PER_SECOND
    free_at = [0.0] * num_connections  # a heap
    ready_at: dict[int, float] = {}  # of each piece
    crop_ready_at = np.zeros(len(utterance_C))
    used_at = np.zeros(len(utterance_C) + 1)  # when so many crops have been used
    asked = 0
    now = 0.0
    waited = 0.0
    first_window = len(utterance_C) // NUM_WINDOWS
    waited_first = 0.0
    for crop in range(len(utterance_C)):
        while asked < len(utterance_C) and asked <= crop + num_ahead:
            allowed_at = used_at[asked - num_ahead] if asked >= num_ahead else 0.0
            for piece in {first_piece_C[asked], last_piece_C[asked]}:
                if piece not in ready_at:
                    begin = max(heapq.heappop(free_at), allowed_at)
                    ready_at[piece] = begin + piece_seconds
                    heapq.heappush(free_at, begin + piece_seconds)
                crop_ready_at[asked] = max(crop_ready_at[asked], ready_at[piece])
            asked += 1
        waited += max(crop_ready_at[crop] - now, 0)
        now = max(crop_ready_at[crop], now) + 1 / FAST
        used_at[crop + 1] = now
        if crop == first_window:
            waited_first = waited
            first_end = now
    return waited_first, (waited - waited_first) / (now - first_end)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "scratch", type=Path, help="folder for the corpus and the cache"
    )
    parser.add_argument("--simulate", action="store_true", help="do not measure")
    args = parser.parse_args()
    if args.simulate:
        for num_connections, num_ahead in SIMULATED:
            waited_first, wait_share = simulate(num_connections, num_ahead)
            print(
                f"{num_connections} connections, {num_ahead} crops ahead: waits"
                f" {waited_first:.1f} s in the first window, then"
                f" {100 * wait_share:.0f} % of the time",
                flush=True,
            )
        return
    if not (args.scratch / "web").exists():
        make_corpus(args.scratch)
    measure(args.scratch)


if __name__ == "__main__":
    main()
