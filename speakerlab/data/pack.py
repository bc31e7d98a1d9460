"""Packing: a checked data directory -> shards (see shards.py), in the order that training reads.

In: a data directory. Out: `shards/` (or `features/`) in it, and more lines in `rejected.tsv`.
Which utterances go into which shard follows from the tables alone, so that a packing that was
stopped goes on, and that several jobs share one. Each shard appears whole or not at all.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from speakerlab.core.atomic import alone, replacing
from speakerlab.core.faults import Faults
from speakerlab.core.process import die_with_parent
from speakerlab.data import audio
from speakerlab.data.arrays import map_arrays, write_arrays
from speakerlab.data.columns import Columns, read_columns, store_columns
from speakerlab.data.packed import FOLDERS, Kind, Packed, read_packed
from speakerlab.data.shards import Layout, ShardWriter, open_shards
from speakerlab.data.tables import read_rejected, write_rejected

MAX_SHARD_BYTES = 1 << 30
MIN_SHARD_BYTES = 1 << 25
LOCK = ".pack.lock"  # held by the process that makes the columns or joins the shards
REFUSED = "refused.tsv"  # what was too much to be rejected
FEWEST_SHARDS = 32  # of a corpus that has enough for them, so that jobs can share it
Features = Callable[[np.ndarray], np.ndarray]  # wave_S, int16 -> feats_TF, float32


@dataclass(frozen=True)
class Job:
    """What one process needs to write any shard of a packing."""

    folder: Path
    room: Path  # where the shards are written until all are there
    layout: Layout
    bounds: tuple[int, ...]  # rows at which the shards begin, and the end
    features: Features | None

    def stem(self, shard: int) -> Path:
        return self.room / f"shard-{shard:05d}"


def pack_data_dir(
    folder: Path,
    *,
    layout: Layout,
    features: Features | None = None,
    facts: dict[str, object] | None = None,
    allow_rejected: float = 0.01,
    num_workers: int = 1,
    part: tuple[int, int] = (1, 1),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Pack, or go on packing; the line that sums it up.

    features: what turns a wave into what is stored, for the fbank codec; facts: what they are
    made with. part: (I, N), this is job I of N that run at the same time on any hosts; the one
    that finds all shards written joins them. progress is told (done, total) utterances.
    Raises ValueError listing recordings that cannot be read, where there are more than
    `allow_rejected`, a share, in the directory; nothing is replaced then.
    """
    kind: Kind = "features" if layout.codec == "fbank" else "waves"
    made_with = {**(facts or {}), "codec": layout.codec}
    with alone(folder / LOCK):
        columns = store_columns(folder, sample_rate=layout.sample_rate)  # processes map them
    if is_packed(folder, kind, columns, layout, made_with):
        return f"{folder}: packed before, kept"
    if not len(columns):
        raise ValueError(f"{folder}: has no utterances to pack; run stage 1 again")
    bounds = shard_bounds(columns.num_samples_N)
    plan = [columns.sha256, asdict(layout), made_with, bounds]
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:12]
    room = folder / f".{FOLDERS[kind]}-{digest}"
    room.mkdir(exist_ok=True)
    job = Job(folder, room, layout, bounds, features)
    shards = range(part[0] - 1, len(bounds) - 1, part[1])
    try:
        _write_shards(job, shards, num_workers, progress)
    except OSError as error:
        if not room.exists():
            return f"{folder}: packed by another process meanwhile"
        raise OSError(error.errno, error.strerror, str(folder)) from error  # a full disk, say
    with alone(folder / LOCK):
        if not room.exists():
            return f"{folder}: {len(shards)} shards packed, all joined by another job"
        is_there = [job.stem(i).with_suffix(".done").exists() for i in range(len(bounds) - 1)]
        if not all(is_there):
            missing = is_there.count(False)
            return f"{folder}: {len(shards)} shards packed, {missing} are left to other jobs"
        return _join(job, columns, kind, made_with, allow_rejected)


def is_packed(
    folder: Path, kind: Kind, columns: Columns, layout: Layout, facts: dict[str, object]
) -> bool:
    """Whether there are whole shards of just these columns, laid out like this."""
    try:
        found = read_packed(folder, kind)
    except ValueError:  # a damaged index: packed anew
        return False
    if found is None or found.sha256 != columns.sha256 or found.facts != facts:
        return False
    return found.layout == layout and not list(found.cut_short())


def shard_bounds(num_samples_N: np.ndarray) -> tuple[int, ...]:
    """Rows at which shards begin, and the end: about a gigabyte of 16-bit audio in each."""
    ends_N = np.cumsum(2 * num_samples_N)
    total = int(ends_N[-1])
    size = min(max(total // FEWEST_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    count = max(1, round(total / size))
    inner = np.searchsorted(ends_N, total * np.arange(1, count) / count)
    return tuple(map(int, np.unique([0, *inner, len(num_samples_N)])))


def _write_shards(
    job: Job, shards: Sequence[int], num_workers: int, progress: Callable[[int, int], None]
) -> None:
    """Those that are not there yet; several processes where that is wanted."""
    _columns_of.cache_clear()  # the tables may have changed since another packing
    sizes = {shard: job.bounds[shard + 1] - job.bounds[shard] for shard in shards}
    left = [shard for shard in shards if not job.stem(shard).with_suffix(".done").exists()]
    total, done = sum(sizes.values()), sum(sizes.values()) - sum(sizes[shard] for shard in left)
    for shard in _each(job, left, min(num_workers, len(left))):
        done += sizes[shard]
        progress(done, total)


def _each(job: Job, shards: Sequence[int], num_workers: int) -> Iterator[int]:
    if num_workers < 2:
        yield from (write_shard(job, shard) for shard in shards)
        return
    with ProcessPoolExecutor(num_workers, initializer=die_with_parent) as pool:
        yield from pool.map(write_shard, *zip(*((job, shard) for shard in shards)))


@lru_cache(maxsize=1)
def _columns_of(folder: Path, sample_rate: int) -> Columns:
    """Opened once by each process: all of them is read for their checksum."""
    return read_columns(folder, sample_rate=sample_rate)


def write_shard(job: Job, shard: int) -> int:
    """One shard and what is known of it; the `.done` file, written last, makes it count."""
    columns = _columns_of(job.folder, job.layout.sample_rate)
    stem, kept, rejected = job.stem(shard), list[int](), dict[str, tuple[str, str]]()
    with replacing(stem.with_suffix(".tar")) as partial, partial.open("wb") as file:
        writer = ShardWriter(file, job.layout)
        for row in range(job.bounds[shard], job.bounds[shard + 1]):
            try:
                wave_S = _read_whole(columns, row)
            except (ValueError, OSError) as error:
                rejected[columns.ids[row]] = (_path(columns, row), str(error))
                continue
            kept.append(row)
            writer.add(columns.ids[row], job.features(wave_S) if job.features else wave_S)
        writer.close()
    written = writer.written
    arrays = {
        "row": np.array(kept, dtype=np.int64),
        "start": np.array(written.start, dtype=np.int64),
        "num_units": np.array(written.num_units, dtype=np.int64),
        "crc": np.array(written.block_crc, dtype=np.uint32),
        "block_start": np.array(written.block_start, dtype=np.int64),
        "block_size": np.array(written.block_size, dtype=np.int32),
    }
    write_arrays(stem.with_suffix(".done"), arrays, {"rejected": rejected})
    return shard


def _read_whole(columns: Columns, row: int) -> np.ndarray:
    """wave_S of an utterance; ValueError where its recording is not whole, even behind it."""
    count = int(columns.num_samples_N[row])
    return audio.read(_path(columns, row), int(columns.start_N[row]), count, whole=True)


def _path(columns: Columns, row: int) -> str:
    return columns.files[int(columns.file_N[row])]


def _join(
    job: Job, columns: Columns, kind: Kind, facts: dict[str, object], allow_rejected: float
) -> str:
    """The index over all shards, the rejections, and the shards where they belong."""
    found = [map_arrays(job.stem(i).with_suffix(".done")) for i in range(len(job.bounds) - 1)]
    rejected: dict[str, tuple[str, str]] = {}
    for _, known in found:
        rejected.update(known["rejected"])  # pyright: ignore[reportArgumentType, reportCallIssue]
    _refuse_rejected(job, columns, rejected, allow_rejected)
    (job.folder / REFUSED).unlink(missing_ok=True)
    per_row = {
        name: np.concatenate([arrays[name] for arrays, _ in found])
        for name in ("row", "start", "num_units", "crc", "block_start", "block_size")
    }
    blocks = -(-per_row["num_units"] // job.layout.block_units)
    is_flac = job.layout.codec == "flac"
    nothing = slice(None) if is_flac else slice(0)
    packed = Packed(
        folder=job.room,
        layout=job.layout,
        sha256="",
        facts=dict(facts),
        shards=tuple(f"{job.stem(i).name}.tar" for i in range(len(found))),
        ids=columns.ids.take(per_row["row"]),
        shard_N=np.repeat(
            np.arange(len(found), dtype=np.int32), [len(arrays["row"]) for arrays, _ in found]
        ),
        start_N=per_row["start"],
        num_units_N=per_row["num_units"],
        block_N=np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64),
        crc_K=per_row["crc"],
        block_start_K=per_row["block_start"][nothing],
        block_size_K=per_row["block_size"][nothing],
    )
    if rejected:
        write_rejected(job.folder, {**read_rejected(job.folder), **rejected})
        columns = store_columns(job.folder, sample_rate=job.layout.sample_rate)
    replace(packed, sha256=columns.sha256).write()
    for path in job.room.glob("*.done"):
        path.unlink()
    place = job.folder / FOLDERS[kind]
    shutil.rmtree(place, ignore_errors=True)
    job.room.rename(place)
    open_shards.close()
    for old in job.folder.glob(f".{FOLDERS[kind]}-*"):
        shutil.rmtree(old, ignore_errors=True)
    size = sum((place / name).stat().st_size for name in packed.shards)
    line = f"{place}: {len(packed)} utterances in {len(found)} shards, {size / 2**30:.2f} GiB"
    if not rejected:
        return line
    return f"{line}; {len(rejected)} cannot be read, see {job.folder}/rejected.tsv"


def _refuse_rejected(
    job: Job, columns: Columns, rejected: dict[str, tuple[str, str]], allow_rejected: float
) -> None:
    """Too many: what was rejected is tried again next time, it may have been mended."""
    if len(rejected) <= allow_rejected * len(columns) and len(rejected) < len(columns):
        return
    for i in range(len(job.bounds) - 1):
        done = job.stem(i).with_suffix(".done")
        if map_arrays(done)[1]["rejected"]:
            done.unlink()
    faults = Faults()
    for reason in sorted({reason for _, reason in rejected.values()}):
        faults.add("broken recordings", reason)
    write_rejected(job.folder, rejected, name=REFUSED)
    faults.raise_if_any(
        f"{job.folder}: refused, at most {allow_rejected:.2%} of the utterances may be broken, got "
        f"{len(rejected)} of {len(columns)}, all listed in {job.folder / REFUSED}; mend them, or "
        "raise --allow-rejected"
    )
