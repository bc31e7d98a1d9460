"""Packing: a checked data directory -> shards (see shards.py), in the order that training reads.

In: a data directory. Out: `shards/` (or `features/`) in it, and more lines in `rejected.tsv`.
The tables alone determine the shard of each utterance, so that an interrupted packing can continue
and several jobs can share one. Shards are written atomically. With an object store, each complete
shard is uploaded, and after all shards the tables; `shards/` then only refers to the store.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from speakerlab.core import done
from speakerlab.core.atomic import locked, replacing
from speakerlab.core.bars import progress_bar
from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.parallel import map_in_processes
from speakerlab.data import audio, levels
from speakerlab.data.arrays import Strings, read_arrays, write_arrays
from speakerlab.data.columns import Columns, read_columns, store_columns
from speakerlab.data.remote import RemoteShards, Store, read_reference
from speakerlab.data.remote_tables import upload_tables
from speakerlab.data.shards import (
    INDEX,
    Layout,
    Packed,
    ShardWriter,
    open_shard,
    read_packed,
    without_readers,
)
from speakerlab.data.tables import (
    Rejection,
    keep_roots,
    read_rejected,
    read_table,
    require_checked,
    write_rejected,
)

log = logging.getLogger(__name__)
MAX_SHARD_BYTES = 1 << 30
MIN_SHARD_BYTES = 1 << 25
# Held while the shards are joined, and while `check` may change the tables.
LOCK = ".pack.lock"
REFUSED = "refused.tsv"  # broken recordings, where they were too many to be rejected
FEWEST_SHARDS = 32  # for a corpus that is large enough, so that jobs can share it
# wave_S, int16 -> feats_TF, float32
Features = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Job:
    """Facts that a process needs to write any shard of a packing."""

    folder: Path
    columns: Columns
    work_dir: Path  # the folder of the shards until all are written
    layout: Layout
    bounds: tuple[int, ...]  # rows at which the shards begin, and the end
    features: Features | None
    store: Store | None  # where the shards are uploaded to; None: they stay here

    def done_file(self, shard: int) -> Path:
        """Return the marker file of a complete shard; it is written last."""
        return self.work_dir / f"shard-{shard:05d}.done"

    def is_complete(self, shard: int) -> bool:
        """Return whether a shard and its done file are there.

        Another process may move the folder to its place before this one writes its done file. The
        done file then creates the folder again, and is alone in it.
        """
        done_file = self.done_file(shard)
        if self.store is not None:
            return done_file.exists()  # written after the upload
        return done_file.exists() and done_file.with_suffix(".tar").exists()

    def rows(self, shard: int) -> range:
        """Return the rows of the utterances of a shard."""
        first = self.bounds[shard]
        end = self.bounds[shard + 1]
        return range(first, end)


def pack_data_dir(
    folder: Path,
    *,
    layout: Layout,
    features: Features | None = None,
    facts: dict[str, object] | None = None,
    allow_rejected: float = 0.01,
    num_workers: int = 1,
    part: tuple[int, int] = (1, 1),
    store: Store | None = None,
) -> str:
    """Pack, or continue packing; return a one-line summary.

    features: computes the stored features of a wave, for the fbank codec; facts: their settings.
    part: (I, N) for job I of N jobs that run at the same time on any hosts; the job that finds all
    shards written joins them.
    store: where to write the shards to; by default they stay where they are, at first here.
    Raises ValueError listing recordings that cannot be read, where they are a larger share of the
    directory than `allow_rejected`; nothing is replaced then.
    """
    made_with = dict(facts or {})
    made_with["codec"] = layout.codec
    with keep_roots([folder]) as fault:
        require_checked(folder)
        columns = read_columns(folder, sample_rate=layout.sample_rate)
        made_with["recordings"] = recordings_digest(folder)
        if _is_packed_from(columns, folder, layout, made_with, store=store):
            store_columns(folder, sample_rate=layout.sample_rate)
            if store is not None:  # tables of other labels may have changed
                upload_tables(folder, layout.folder, sample_rate=layout.sample_rate)
            return f"{folder}: already packed"
        if fault:
            raise fault

        # Refuse readers before the work, not only when the shards are joined. The lock waits for a
        # check, which may change the tables, or for another packing.
        with locked(folder / LOCK) as waited, without_readers(folder):
            if waited:
                columns = read_columns(folder, sample_rate=layout.sample_rate)
        if waited and _is_packed_from(columns, folder, layout, made_with, store=store):
            return f"{folder}: already packed"
        old_codec = packed_codec(folder / layout.folder)
        if old_codec is not None:
            log.info(
                "%s: packed before as %s, from other recordings or in another way;"
                " packing again as %s",
                folder,
                old_codec,
                layout.codec,
            )
        if not len(columns):
            raise ValueError(
                f"{folder}: has no utterances to pack; see {folder}/rejected.tsv"
            )
        if store is not None:
            _refuse_other_shards(store, folder / layout.folder)
        job = _plan_job(columns, folder, layout, made_with, features, store=store)
        return _pack(
            job, made_with, part, allow_rejected=allow_rejected, num_workers=num_workers
        )


def packed_codec(place: Path) -> str | None:
    """Return the codec of the shards in a folder; None if there are none, or they are damaged."""
    try:
        packed = read_packed(place)
    except ValueError:
        return None
    if packed is None:
        return None
    return packed.layout.codec


def recordings_digest(folder: Path) -> str:
    """Return the SHA-256 of the paths of the recordings, with the size and time of each file."""
    wavs = read_table(folder / "wav.scp")
    paths = list(wavs.values())
    stamped_paths = list(zip(paths, done.stamps(paths)))
    return done.digest(stamped_paths)


def _is_packed_from(
    columns: Columns,
    folder: Path,
    layout: Layout,
    made_with: dict[str, object],
    *,
    store: Store | None,
) -> bool:
    """Return whether all shards are there, made from these utterances in this way.

    store: they must be in this store; None: they may be anywhere.
    """
    try:
        packed = read_packed(folder / layout.folder)
    # A damaged index, or one that another packing is replacing: packed again.
    except (ValueError, FileNotFoundError):
        return False
    if packed is None or packed.sha256 != columns.sha256:
        return False
    if store is not None and (packed.remote is None or packed.remote.store != store):
        return False

    # The index of earlier versions has no digest of the recordings; it is still valid.
    missing_facts = made_with.keys() - packed.facts.keys()
    if missing_facts - {"recordings"}:
        return False
    expected_facts = dict(made_with)
    for name in missing_facts:
        del expected_facts[name]
    if packed.facts != expected_facts or packed.layout != layout:
        return False
    return not any(packed.cut_short())


def _plan_job(
    columns: Columns,
    folder: Path,
    layout: Layout,
    made_with: dict[str, object],
    features: Features | None,
    *,
    store: Store | None,
) -> Job:
    """Divide the utterances into shards, and make the folder that they are written to."""
    bounds = shard_bounds(columns.num_samples_N)
    # Jobs on several hosts must find the same folder, so the times of the recordings, which may
    # differ between hosts, are left out.
    shared_facts = dict(made_with)
    shared_facts.pop("recordings", None)
    inputs = [columns.sha256, asdict(layout), shared_facts, bounds]
    if store is not None:
        # Each store has a folder of its own: a shard that is done for another place, or for this
        # host, has not been uploaded to this store.
        inputs.append(store.url)
    plan = json.dumps(inputs)
    digest = hashlib.sha256(plan.encode()).hexdigest()
    work_dir = folder / f".{layout.folder}-{digest[:12]}"
    work_dir.mkdir(exist_ok=True)
    return Job(
        folder=folder,
        columns=columns,
        work_dir=work_dir,
        layout=layout,
        bounds=bounds,
        features=features,
        store=store,
    )


def _refuse_other_shards(store: Store, place: Path) -> None:
    """Raise ValueError if a store has an index that the folder of the shards does not refer to."""
    if INDEX not in store.sizes():
        return
    remote = read_reference(place)
    if remote is None or remote.store != store:
        raise ValueError(
            f"--out: {store.url} has the shards of another data directory, or of a copy"
            " of this one; choose another address, or remove them"
        )


def _pack(
    job: Job,
    made_with: dict[str, object],
    part: tuple[int, int],
    *,
    allow_rejected: float,
    num_workers: int,
) -> str:
    """Write the shards of one part; if all shards are complete then, join them."""
    folder = job.folder
    num_shards = len(job.bounds) - 1
    part_number, num_parts = part
    shards = range(part_number - 1, num_shards, num_parts)
    try:
        _write_shards(job, shards, num_workers)
    except OSError as error:
        if not job.work_dir.exists():
            return f"{folder}: packed by another process meanwhile"
        # Such as a full disk: name the folder, not a file in it.
        raise OSError(
            error.errno,
            error.strerror,
            str(folder),
        ) from error

    packed_shards = count_of(len(shards), "shard")
    # Only one job joins: the others find the folder moved to its place.
    with locked(folder / LOCK):
        if not job.work_dir.exists():
            return f"{folder}: {packed_shards} packed, all joined by another job"
        num_missing = 0
        for shard in range(num_shards):
            if not job.is_complete(shard):
                num_missing += 1
        if num_missing:
            # A done file without its shard must never be joined.
            if _is_packed_from(
                job.columns, folder, job.layout, made_with, store=job.store
            ):
                shutil.rmtree(job.work_dir)
                return f"{folder}: packed by another process meanwhile"
            return (
                f"{folder}: {packed_shards} packed, left to other jobs: {num_missing}"
            )
        with without_readers(folder):
            return _join(job, made_with, allow_rejected)


def shard_bounds(num_samples_N: np.ndarray) -> tuple[int, ...]:
    """Return the rows at which shards begin, and the end: about 1 GB of 16-bit audio in each."""
    end_bytes_N = np.cumsum(2 * num_samples_N)  # 2 bytes a sample
    total_bytes = int(end_bytes_N[-1])
    shard_bytes = max(total_bytes // FEWEST_SHARDS, MIN_SHARD_BYTES)
    shard_bytes = min(shard_bytes, MAX_SHARD_BYTES)
    num_shards = max(1, round(total_bytes / shard_bytes))

    # Shard i begins at the first utterance that ends at or after i equal shares of the bytes.
    shard_numbers = np.arange(1, num_shards)
    share_bytes = total_bytes * shard_numbers / num_shards
    inner_bounds = np.searchsorted(end_bytes_N, share_bytes)
    # An utterance larger than a share is the bound of several shards: merge these.
    num_utterances = len(num_samples_N)
    bounds = np.unique([0, *inner_bounds, num_utterances])
    return tuple(bounds.tolist())


def _write_shards(job: Job, shards: Sequence[int], num_workers: int) -> None:
    """Write the shards that are not complete yet, in several processes."""
    num_utterances: dict[int, int] = {}
    for shard in shards:
        if not job.is_complete(shard):
            num_utterances[shard] = len(job.rows(shard))
    incomplete_shards = list(num_utterances)

    written_shards = map_in_processes(
        partial(write_shard, job),
        incomplete_shards,
        min(num_workers, len(incomplete_shards)),
    )
    total = sum(num_utterances.values())
    with progress_bar(total=total, unit="utterances") as bar:
        for shard in written_shards:
            bar.update(num_utterances[shard])


def write_shard(job: Job, shard: int) -> int:
    """Write one shard, then its done file with the index of the shard; return its number."""
    columns = job.columns
    done_file = job.done_file(shard)
    packed_rows: list[int] = []
    rejected: dict[str, Rejection] = {}
    kind_of: dict[str, str] = {}  # of utterances that may be no speech
    with (
        replacing(done_file.with_suffix(".tar")) as partial_file,
        partial_file.open("wb") as file,
    ):
        writer = ShardWriter(file, job.layout)
        for row in job.rows(shard):
            utterance = columns.ids[row]
            path = columns.paths[row]
            start = int(columns.start_N[row])
            num_samples = int(columns.num_samples_N[row])
            try:
                # whole=True: a recording that is cut short is rejected even where the cut is
                # behind this utterance.
                wave_S = audio.read(path, start, num_samples, whole=True)
            except (ValueError, OSError) as error:
                rejected[utterance] = (path, str(error))
                continue
            packed_rows.append(row)
            kind = levels.find_kind(wave_S, sample_rate=job.layout.sample_rate)
            if kind is not None:
                kind_of[utterance] = kind
            units = wave_S
            if job.features is not None:
                units = job.features(wave_S)
            writer.add(utterance, units)
        writer.tar.close()
    if job.store is not None:
        tar = done_file.with_suffix(".tar")
        job.store.upload(tar, tar.name)
        tar.unlink()  # the next shards may need its room

    # Written after the shard has its final name, because this file marks it as complete.
    arrays = writer.arrays()
    arrays["row"] = np.array(packed_rows, np.int64)
    write_arrays(done_file, arrays, {"rejected": rejected, "levels": kind_of})
    return shard


def _join(job: Job, facts: dict[str, object], allow_rejected: float) -> str:
    """Write the index over all shards and the rejections, and move the shards to their place."""
    folder = job.folder
    layout = job.layout
    num_shards = len(job.bounds) - 1
    shard_arrays: list[dict[str, np.ndarray]] = []
    rejected: dict[str, Rejection] = {}
    kind_of: dict[str, str] = {}  # of utterances that may be no speech
    for shard in range(num_shards):
        arrays, shard_facts = read_arrays(job.done_file(shard))
        shard_arrays.append(arrays)
        rejected |= shard_facts["rejected"]
        # Shards of an earlier version lack them.
        kind_of |= shard_facts.get("levels", {})
    _refuse_rejected(job, rejected, allow_rejected)
    refused_list = folder / REFUSED
    refused_list.unlink(missing_ok=True)

    packed = _join_arrays(job, shard_arrays, facts)
    # Rejections change the columns, and with them the digest that the index belongs to.
    if rejected:
        all_rejected = read_rejected(folder)
        all_rejected |= rejected
        write_rejected(folder, all_rejected)
        columns = read_columns(folder, sample_rate=layout.sample_rate)
        packed = replace(packed, sha256=columns.sha256)
    _write_index(job, packed)
    _move_to_place(job)
    store_columns(folder, sample_rate=layout.sample_rate)

    # Noise and rooms have levels that speech has not.
    if (folder / "utt2spk").exists():
        lines = levels.describe_kinds(
            kind_of,
            len(job.columns),
            where=str(folder),
            unit="utterances",
        )
        for line in lines:
            log.warning("%s", line)

    place = folder / layout.folder
    if job.store is not None:
        place = job.store.url
        upload_tables(folder, layout.folder, sample_rate=layout.sample_rate)
    num_bytes = sum(packed.num_bytes_of_shards)
    line = (
        f"{place}: {count_of(len(packed), 'utterance')} in"
        f" {count_of(num_shards, 'shard')},"
        f" {num_bytes / 2**30:.2f} GiB"
    )
    if not rejected:
        return line
    return f"{line}; {len(rejected)} cannot be read, see {folder}/rejected.tsv"


def _join_arrays(
    job: Job,
    shard_arrays: Sequence[dict[str, np.ndarray]],
    facts: dict[str, object],
) -> Packed:
    """Return the index over all shards, from the arrays of each shard's done file.

    facts: how the shards were made.
    """
    layout = job.layout
    num_shards = len(shard_arrays)
    # The arrays of all shards, one after another.
    joined: dict[str, np.ndarray] = {}
    for name in shard_arrays[0]:
        arrays_of_shards = [arrays[name] for arrays in shard_arrays]
        joined[name] = np.concatenate(arrays_of_shards)
    shard_names = [f"{job.done_file(shard).stem}.tar" for shard in range(num_shards)]
    shard_sizes = [len(arrays["row"]) for arrays in shard_arrays]  # utterances
    shard_numbers = np.arange(num_shards, dtype=np.int32)
    utterances = [job.columns.ids[row] for row in joined["row"]]

    # Where the blocks of each utterance begin: block_N has one more element than utterances.
    num_blocks_N = -(-joined["num_units"] // layout.block_units)  # rounded up
    block_N = np.concatenate([[0], np.cumsum(num_blocks_N)])
    block_start_K = joined["block_start"]
    block_size_K = joined["block_size"]
    if layout.codec != "flac":
        # Only compressed blocks need their places; others follow from the size of a block.
        block_start_K = block_start_K[:0]
        block_size_K = block_size_K[:0]
    return Packed(
        folder=job.work_dir,
        layout=layout,
        sha256=job.columns.sha256,
        facts=dict(facts),
        shards=tuple(shard_names),
        ids=Strings.of(utterances),
        shard_N=np.repeat(shard_numbers, shard_sizes),
        start_N=joined["start"],
        num_units_N=joined["num_units"],
        block_N=block_N.astype(np.int64),
        crc_K=joined["crc"],
        block_start_K=block_start_K,
        block_size_K=block_size_K,
    )


def _write_index(job: Job, packed: Packed) -> None:
    """Write the index beside the shards: for those in a store, into it, and a reference here."""
    packed.write()
    store = job.store
    if store is None:
        return
    index = job.work_dir / INDEX
    store.upload(index, INDEX)
    remote = RemoteShards(
        url=store.url,
        index_sha256=done.file_digest(index),
        index_bytes=index.stat().st_size,
    )
    remote.write_reference(job.work_dir)
    index.unlink()


def _move_to_place(job: Job) -> None:
    """Move the folder of all shards and their index into the data directory."""
    for path in job.work_dir.glob("*.done"):
        path.unlink()
    # In one step, so that no reader finds only a part of the shards; readers of the replaced shards
    # have ended.
    place = job.folder / job.layout.folder
    shutil.rmtree(place, ignore_errors=True)
    job.work_dir.rename(place)
    open_shard.cache_clear()  # other files have taken their places

    # Remove abandoned packings. Renamed first: their jobs must never find half of a folder.
    for abandoned_dir in job.folder.glob(f".{job.layout.folder}-*"):
        renamed_dir = abandoned_dir.rename(f"{abandoned_dir}-gone")
        shutil.rmtree(renamed_dir, ignore_errors=True)


def _refuse_rejected(
    job: Job, rejected: dict[str, Rejection], allow_rejected: float
) -> None:
    """Raise ValueError if there are too many; the next run writes their shards again."""
    total = len(job.columns)
    num_rejected = len(rejected)
    max_rejected = allow_rejected * total
    if num_rejected <= max_rejected and num_rejected < total:
        return

    # By then the recordings may have been repaired.
    num_shards = len(job.bounds) - 1
    for shard in range(num_shards):
        done_file = job.done_file(shard)
        _, facts = read_arrays(done_file)
        if facts["rejected"]:
            done_file.unlink()

    # Several utterances of a recording have the same reason.
    faults = Faults()
    reasons = {reason for _, reason in rejected.values()}
    for reason in sorted(reasons):
        faults.add("broken recordings", reason)
    write_rejected(job.folder, rejected, name=REFUSED)
    faults.raise_if_any(
        f"{job.folder}: at most {allow_rejected:.2%} of the utterances may be broken,"
        f" got {num_rejected} of {total}, listed in {job.folder / REFUSED}; repair"
        " them, or raise --allow-rejected"
    )
