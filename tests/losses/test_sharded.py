"""A head split over 2 and 3 real ranks is the whole head, in float64, to 1e-12.

Letters: B rows of a rank, C classes, D embedding, G rows of all ranks.
"""

import math
import socket
import subprocess
import sys
from functools import partial

import pytest
import shard_ranks
import torch
from shard_ranks import AAM, BEGINNINGS, CASES, KEYS, SHARE, make_head, one_pass

from speakerlab.losses import HEADS
from speakerlab.losses.sharded import ShardedHead
from speakerlab.losses.shards import take_part
from speakerlab.training.distributed import start_ranks

CPU = torch.device("cpu")
exactly = partial(torch.testing.assert_close, rtol=0, atol=0)
nearly = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def alone():
    return start_ranks(timeout_minutes=1)


@pytest.fixture(scope="module")
def results(tmp_path_factory, alone):
    """Return world size -> results of each rank."""
    out = tmp_path_factory.mktemp("ranks")
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    command = [sys.executable, shard_ranks.__file__, str(out)]
    started = [
        subprocess.Popen([*command, str(rank), *ports], stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0, 0], "\n".join(errors)
    saved = {w: [torch.load(out / f"{w}_{r}.pt") for r in range(w)] for w in (2, 3)}
    return {1: [shard_ranks.everything(alone)], **saved}


def joined(parts: list[dict]) -> dict:
    """Join the head's rows of all ranks; require the other values to be equal on all."""
    whole = {}
    for name, value in parts[0].items():
        if name.endswith(("weight_CD", "bias_C")):
            whole[name] = torch.cat([part[name] for part in parts])
        else:
            for part in parts[1:]:
                exactly(part[name], value, msg=f"{name} differs between ranks")
            whole[name] = value
    return whole


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_loss_and_gradients_are_those_of_the_whole_head(results, index, world_size):
    name, num_classes, margin, args = CASES[index]
    expected = one_pass(None, make_head(None, name, num_classes, **args), num_classes, margin)
    got = joined([rank["cases"][index] for rank in results[world_size]])
    assert got.keys() == expected.keys()
    assert len(got["head.weight_CD"]) == num_classes and got["head.weight_CD"].any() == (
        num_classes > 1
    )
    for key, value in expected.items():
        nearly(got[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_the_cases_have_right_and_wrong_rows(results):
    counts = {int(case["num_correct"]) for case in results[1][0]["cases"]}
    assert {0, 12} < counts and len(counts) > 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ten_clipped_steps_end_with_the_same_parameters(results, world_size):
    expected = shard_ranks.ten_steps(None)
    got = joined([rank["steps"] for rank in results[world_size]])
    assert (expected["norms"] > 3).all()
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        nearly(got[key], value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nan_on_one_rank_is_seen_by_all(results, world_size):
    for rank in results[world_size]:
        assert not rank["poisoned"]["norm"].isfinite()
        assert not rank["poisoned"]["loss"].isfinite()
    assert sum(int(rank["poisoned"]["num_correct"]) for rank in results[world_size]) < 12


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_begin_as_those_of_the_whole_head(results, world_size):
    """The draw that follows is the same too."""
    for index, which in enumerate(BEGINNINGS):
        expected = shard_ranks.beginning(None, *which)
        ranks = [rank["beginning"][index] for rank in results[world_size]]
        exactly(joined([rank["own"] for rank in ranks]), expected["own"])
        first, *others = [rank["all"] for rank in ranks]
        exactly(first, expected["all"])
        assert not any(others)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_classes_are_sampled_by_any_number_of_ranks(results, world_size):
    taking_part = []
    for index in range(len(KEYS)):
        expected = results[1][0]["sampled"][index]
        got = joined([rank["sampled"][index] for rank in results[world_size]])
        for key, value in expected.items():
            nearly(got[key], value)
        taking_part.append(tuple(got["head.weight_CD"].any(dim=1).nonzero().flatten().tolist()))
    assert len(set(taking_part)) == len(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_sampled_classes_are_the_drawn_and_the_targets(results, alone, key):
    got = results[1][0]["sampled"][KEYS.index(key)]
    _, label_G = shard_ranks.batch_of(None, 400)
    drawn_C = take_part((0, 400), key=key, share=SHARE, device=CPU)
    drawn_C[label_G] = True
    assert got["head.weight_CD"].any(dim=1).tolist() == drawn_C.tolist()
    assert len(set(label_G.tolist())) < drawn_C.sum() < 400
    head = make_head(None, AAM, 400).double()  # a whole head of these classes alone
    head.weight_CD = torch.nn.Parameter(head.weight_CD.detach()[drawn_C])
    net = shard_ranks.Net(head)
    x_GI, _ = shard_ranks.batch_of(None, 400)
    loss, num_correct = net(x_GI, drawn_C.cumsum(0)[label_G] - 1, 0.2)
    loss.backward()
    nearly(got["loss"], loss.detach())
    nearly(got["head.weight_CD"][drawn_C], head.weight_CD.grad)
    assert got["num_correct"] == num_correct


@pytest.mark.parametrize("share", [0.001, 0.1, 0.7])
def test_a_share_of_the_classes_is_drawn(share):
    count = 200_000
    first = take_part((0, count), key=7, share=share, device=CPU)
    other = take_part((0, count), key=8, share=share, device=CPU)
    parts = [take_part(rows, key=7, share=share, device=CPU) for rows in ((0, 77), (77, count))]
    assert torch.equal(torch.cat(parts), first)
    for drawn, expected in ((first, share), (other, share), (first & other, share**2)):
        deviation = math.sqrt(count * expected * (1 - expected))
        assert abs(int(drawn.sum()) - count * expected) < 4 * deviation + 1


def test_hash_is_splitmix64():
    """The first draw of java.util.SplittableRandom(0) and of the reference C code."""
    from speakerlab.losses.shards import GAMMA, _mix, _signed

    assert int(_mix(torch.tensor(_signed(GAMMA)))) % 2**64 == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_first_of_equal_classes_is_decided_for(results, world_size):
    """As with argmax, even if the equal classes are on different ranks."""
    num_first = int((shard_ranks.batch_of(None, 4)[1] == 0).sum())
    assert 0 < num_first < 12
    assert shard_ranks.equal_classes(None)["num_correct"] == num_first
    for rank in results[world_size]:
        assert rank["equal"]["num_correct"] == num_first


def test_a_million_classes_take_no_memory_before_they_are_split(alone):
    """The whole head is built on the meta device."""
    made = []

    def make():
        made.append(HEADS[AAM](embed_dim=5, num_classes=6))
        return made[0]

    head = ShardedHead(make, shards=alone)
    assert made[0].weight_CD.is_meta and not head.weight_CD.is_meta
