"""Packing: a checked data directory -> shards (see shards.py), in the order that training reads.

In: a data directory. Out: `shards/` (or `features/`) in it, and more lines in `rejected.tsv`.
Which utterances go into which shard follows from the tables alone, so that an interrupted packing
continues, and several jobs can share one. Each shard appears whole or not at all.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from speakerlab.core.atomic import alone, replacing
from speakerlab.core.faults import Faults
from speakerlab.core.process import map_in_processes
from speakerlab.data import audio
from speakerlab.data.arrays import Strings, read_arrays, write_arrays
from speakerlab.data.manifest import Columns, read_columns
from speakerlab.data.shards import Layout, Packed, ShardWriter, open_shard, read_packed, unread
from speakerlab.data.tables import read_rejected, write_rejected

MAX_SHARD_BYTES = 1 << 30
MIN_SHARD_BYTES = 1 << 25
LOCK = ".pack.lock"  # held while the shards are joined, or checked for readers
REFUSED = "refused.tsv"  # the broken recordings, where they were too many to be rejected
FEWEST_SHARDS = 32  # of a corpus that has enough for them, so that jobs can share it
Features = Callable[[np.ndarray], np.ndarray]  # wave_S, int16 -> feats_TF, float32


@dataclass(frozen=True)
class Job:
    """What one process needs to write any shard of a packing."""

    folder: Path
    columns: Columns
    work_dir: Path  # where the shards are written until all are there
    layout: Layout
    bounds: tuple[int, ...]  # rows at which the shards begin, and the end
    features: Features | None

    def done_file(self, shard: int) -> Path:
        """Return the file whose existence says that the shard is complete; it is written last."""
        return self.work_dir / f"shard-{shard:05d}.done"


def pack_data_dir(
    folder: Path,
    *,
    layout: Layout,
    features: Features | None = None,
    facts: dict[str, object] | None = None,
    allow_rejected: float = 0.01,
    num_workers: int = 1,
    part: tuple[int, int] = (1, 1),
) -> str:
    """Pack, or continue packing; return a line that sums it up.

    features: what turns a wave into what is stored, for the fbank codec; facts: what they are
    made with. part: (I, N), this is job I of N that run at the same time on any hosts; the one
    that finds all shards written joins them.
    Raises ValueError listing recordings that cannot be read, where they are a larger share of the
    directory than `allow_rejected`; nothing is replaced then.
    """
    made_with = {**(facts or {}), "codec": layout.codec}
    columns = read_columns(folder, sample_rate=layout.sample_rate)
    try:
        found = read_packed(folder / layout.folder)
    except ValueError:  # a damaged index: packed again
        found = None
    wanted = [columns.sha256, made_with, layout]
    if found and [found.sha256, found.facts, found.layout] == wanted and not any(found.cut_short()):
        return f"{folder}: already packed"
    with alone(folder / LOCK), unread(folder):
        pass  # refuse before the work, not only when the shards are joined
    if not len(columns):
        raise ValueError(f"{folder}: has no utterances to pack; run stage 1 again")
    bounds = shard_bounds(columns.num_samples_N)
    plan = [columns.sha256, asdict(layout), made_with, bounds]
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:12]
    work_dir = folder / f".{layout.folder}-{digest}"
    work_dir.mkdir(exist_ok=True)
    job = Job(folder, columns, work_dir, layout, bounds, features)
    shards = range(part[0] - 1, len(bounds) - 1, part[1])
    try:
        _write_shards(job, shards, num_workers)
    except OSError as error:
        if not work_dir.exists():
            return f"{folder}: packed by another process meanwhile"
        raise OSError(error.errno, error.strerror, str(folder)) from error  # a full disk
    with alone(folder / LOCK):
        if not work_dir.exists():
            return f"{folder}: {len(shards)} shards packed, all joined by another job"
        missing = [i for i in range(len(bounds) - 1) if not job.done_file(i).exists()]
        if missing:
            return f"{folder}: {len(shards)} shards packed, {len(missing)} are left to other jobs"
        with unread(folder):
            return _join(job, made_with, allow_rejected)


def shard_bounds(num_samples_N: np.ndarray) -> tuple[int, ...]:
    """Return the rows at which shards begin, and the end: about 1 GB of 16-bit audio in each."""
    ends_N = np.cumsum(2 * num_samples_N)
    total = int(ends_N[-1])
    size = min(max(total // FEWEST_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    count = max(1, round(total / size))
    inner = np.searchsorted(ends_N, total * np.arange(1, count) / count)
    return tuple(map(int, np.unique([0, *inner, len(num_samples_N)])))


def _write_shards(job: Job, shards: Sequence[int], num_workers: int) -> None:
    left = [shard for shard in shards if not job.done_file(shard).exists()]
    sizes = {shard: job.bounds[shard + 1] - job.bounds[shard] for shard in left}
    total = sum(sizes.values())
    with tqdm(total=total, unit=" utterances", disable=None) as bar:  # None: only on a terminal
        for shard in map_in_processes(partial(write_shard, job), left, min(num_workers, len(left))):
            bar.update(sizes[shard])


def write_shard(job: Job, shard: int) -> int:
    """Write one shard and what is known of it; return its number."""
    columns, done_file = job.columns, job.done_file(shard)
    kept, rejected = list[int](), dict[str, tuple[str, str]]()
    with replacing(done_file.with_suffix(".tar")) as partial, partial.open("wb") as file:
        writer = ShardWriter(file, job.layout)
        for row in range(job.bounds[shard], job.bounds[shard + 1]):
            start, count = int(columns.start_N[row]), int(columns.num_samples_N[row])
            try:
                wave_S = audio.read(columns.paths[row], start, count, whole=True)
            except (ValueError, OSError) as error:
                rejected[columns.ids[row]] = (columns.paths[row], str(error))
                continue
            kept.append(row)
            writer.add(columns.ids[row], job.features(wave_S) if job.features else wave_S)
        writer.tar.close()
    arrays = {"row": np.array(kept, dtype=np.int64), **writer.arrays()}
    write_arrays(done_file, arrays, {"rejected": rejected})
    return shard


def _join(job: Job, facts: dict[str, object], allow_rejected: float) -> str:
    """Write the index over all shards and the rejections, and move the shards to their place."""
    found = [read_arrays(job.done_file(i)) for i in range(len(job.bounds) - 1)]
    rejected: dict[str, tuple[str, str]] = {}
    for _, known in found:
        rejected |= known["rejected"]
    _refuse_rejected(job, rejected, allow_rejected)
    (job.folder / REFUSED).unlink(missing_ok=True)
    column = {name: np.concatenate([arrays[name] for arrays, _ in found]) for name in found[0][0]}
    blocks = -(-column["num_units"] // job.layout.block_units)
    of_flac = slice(None) if job.layout.codec == "flac" else slice(0)
    shard_sizes = [len(arrays["row"]) for arrays, _ in found]
    columns = job.columns
    if rejected:
        write_rejected(job.folder, {**read_rejected(job.folder), **rejected})
        columns = read_columns(job.folder, sample_rate=job.layout.sample_rate)
    packed = Packed(
        folder=job.work_dir,
        layout=job.layout,
        sha256=columns.sha256,
        facts=dict(facts),
        shards=tuple(f"{job.done_file(i).stem}.tar" for i in range(len(found))),
        ids=Strings.of(job.columns.ids[row] for row in column["row"]),
        shard_N=np.repeat(np.arange(len(found), dtype=np.int32), shard_sizes),
        start_N=column["start"],
        num_units_N=column["num_units"],
        block_N=np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64),
        crc_K=column["crc"],
        block_start_K=column["block_start"][of_flac],
        block_size_K=column["block_size"][of_flac],
    )
    packed.write()
    for path in job.work_dir.glob("*.done"):
        path.unlink()
    place = job.folder / job.layout.folder
    shutil.rmtree(place, ignore_errors=True)
    job.work_dir.rename(place)
    open_shard.cache_clear()  # other files have taken their places
    for old in job.folder.glob(f".{job.layout.folder}-*"):  # renamed: its job must not find half
        shutil.rmtree(old.rename(f"{old}-gone"), ignore_errors=True)
    size = sum((place / name).stat().st_size for name in packed.shards)
    line = f"{place}: {len(packed)} utterances in {len(found)} shards, {size / 2**30:.2f} GiB"
    if not rejected:
        return line
    return f"{line}; {len(rejected)} cannot be read, see {job.folder}/rejected.tsv"


def _refuse_rejected(job: Job, rejected: dict[str, tuple[str, str]], allow_rejected: float) -> None:
    """Raise ValueError if they are too many; next time their shards are written again."""
    total = len(job.columns)
    if len(rejected) <= allow_rejected * total and len(rejected) < total:
        return
    for i in range(len(job.bounds) - 1):
        if read_arrays(job.done_file(i))[1]["rejected"]:
            job.done_file(i).unlink()
    faults = Faults()
    for reason in sorted({reason for _, reason in rejected.values()}):
        faults.add("broken recordings", reason)
    write_rejected(job.folder, rejected, name=REFUSED)
    faults.raise_if_any(
        f"{job.folder}: at most {allow_rejected:.2%} of the utterances may be broken, got "
        f"{len(rejected)} of {total}, listed in {job.folder / REFUSED}; repair them, or "
        "raise --allow-rejected"
    )
