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
from speakerlab.losses.shards import sample_classes
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
    # Two free ports: the processes meet as 3 ranks, then two of them as 2 ranks.
    sockets = [socket.socket() for _ in range(2)]
    ports = []
    for each in sockets:
        each.bind(("127.0.0.1", 0))
        _, port = each.getsockname()
        ports.append(str(port))
    for each in sockets:
        each.close()

    started = []
    for rank in range(3):
        command = [
            sys.executable,
            shard_ranks.__file__,
            str(out),
            str(rank),
            *ports,
        ]
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    errors = []
    try:
        for process in started:
            _, error = process.communicate(timeout=120)
            errors.append(error)
    finally:
        for process in started:
            process.kill()
    exit_codes = [process.returncode for process in started]
    assert exit_codes == [0, 0, 0], "\n".join(errors)

    results = {1: [shard_ranks.everything(alone)]}
    for world_size in (2, 3):
        results[world_size] = []
        for rank in range(world_size):
            path = out / f"{world_size}_{rank}.pt"
            results[world_size].append(torch.load(path))
    return results


def joined(parts: list[dict]) -> dict:
    """Join the head's rows of all ranks; require the other values to be equal on all."""
    whole = {}
    for name, value in parts[0].items():
        if name.endswith(("weight_CD", "bias_C")):
            shards = [part[name] for part in parts]
            whole[name] = torch.cat(shards)
        else:
            for part in parts[1:]:
                exactly(part[name], value, msg=f"{name} differs between ranks")
            whole[name] = value
    return whole


def case_id(index: int) -> str:
    return "-".join(map(str, CASES[index]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("index", range(len(CASES)), ids=case_id)
def test_loss_and_gradients_are_those_of_the_whole_head(results, index, world_size):
    name, num_classes, margin, args = CASES[index]
    whole_head = make_head(None, name, num_classes, **args)
    expected = one_pass(None, whole_head, num_classes, margin)

    parts = [rank["cases"][index] for rank in results[world_size]]
    got = joined(parts)
    assert got.keys() == expected.keys()
    head_grad_CD = got["head.weight_CD"]
    assert len(head_grad_CD) == num_classes
    # With a single class the loss is always zero.
    assert head_grad_CD.any() == (num_classes > 1)
    for key, value in expected.items():
        nearly(got[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_the_cases_have_right_and_wrong_rows(results):
    (alone,) = results[1]
    counts = {int(case["num_correct"]) for case in alone["cases"]}
    assert {0, 12} < counts
    assert len(counts) > 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ten_clipped_steps_end_with_the_same_parameters(results, world_size):
    expected = shard_ranks.ten_steps(None)
    parts = [rank["steps"] for rank in results[world_size]]
    got = joined(parts)
    # All of them are above the limit of 3: each step is clipped.
    assert (expected["norms"] > 3).all()
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        nearly(got[key], value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nan_on_one_rank_is_seen_by_all(results, world_size):
    total = 0
    for rank in results[world_size]:
        poisoned = rank["poisoned"]
        assert not poisoned["norm"].isfinite()
        assert not poisoned["loss"].isfinite()
        total += int(poisoned["num_correct"])
    assert total < 12


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_begin_as_those_of_the_whole_head(results, world_size):
    """The draw that follows is the same too."""
    for index, case in enumerate(BEGINNINGS):
        expected = shard_ranks.beginning(None, *case)
        ranks = [rank["beginning"][index] for rank in results[world_size]]
        rows = joined([rank["own"] for rank in ranks])
        exactly(rows, expected["own"])

        # Rank 0 alone has the rows of all ranks.
        first, *others = [rank["all"] for rank in ranks]
        exactly(first, expected["all"])
        assert not any(others)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_classes_are_sampled_by_any_number_of_ranks(results, world_size):
    (alone,) = results[1]
    taking_part = set()
    for index in range(len(KEYS)):
        expected = alone["sampled"][index]
        parts = [rank["sampled"][index] for rank in results[world_size]]
        got = joined(parts)
        for key, value in expected.items():
            nearly(got[key], value)

        # Only the classes that take part have a gradient.
        is_sampled_C = got["head.weight_CD"].any(dim=1)
        taking_part.add(tuple(is_sampled_C.tolist()))
    assert len(taking_part) == len(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_sampled_classes_are_the_drawn_and_the_targets(results, alone, key):
    index = KEYS.index(key)
    (rank,) = results[1]
    got = rank["sampled"][index]
    head_grad_CD = got["head.weight_CD"]
    x_GI, label_G = shard_ranks.batch_of(None, 400)
    drawn_C = sample_classes((0, 400), key=key, share=SHARE, device=CPU)
    drawn_C[label_G] = True
    is_sampled_C = head_grad_CD.any(dim=1)
    assert is_sampled_C.tolist() == drawn_C.tolist()
    num_targets = len(label_G.unique())
    assert num_targets < drawn_C.sum() < 400

    # The same as a whole head of these classes alone.
    head = make_head(None, AAM, 400).double()
    sampled_SD = head.weight_CD.detach()[drawn_C]
    head.weight_CD = torch.nn.Parameter(sampled_SD)
    net = shard_ranks.Net(head)
    new_label_C = drawn_C.cumsum(0) - 1
    loss, num_correct = net(x_GI, new_label_C[label_G], 0.2)
    loss.backward()
    nearly(got["loss"], loss.detach())
    nearly(head_grad_CD[drawn_C], head.weight_CD.grad)
    assert got["num_correct"] == num_correct


@pytest.mark.parametrize("share", [0.001, 0.1, 0.7])
def test_a_share_of_the_classes_is_drawn(share):
    count = 200_000
    sample = partial(sample_classes, share=share, device=CPU)
    first = sample((0, count), key=7)
    other = sample((0, count), key=8)
    parts = [
        sample((0, 77), key=7),
        sample((77, count), key=7),
    ]
    assert torch.equal(torch.cat(parts), first)

    # Binomial: within four standard deviations. Draws of two keys are independent.
    for drawn, probability in (
        (first, share),
        (other, share),
        (first & other, share**2),
    ):
        expected = count * probability
        deviation = math.sqrt(expected * (1 - probability))
        difference = int(drawn.sum()) - expected
        assert abs(difference) < 4 * deviation + 1


def test_hash_is_splitmix64():
    """The first draw of java.util.SplittableRandom(0) and of the reference C code."""
    from speakerlab.losses.shards import GAMMA, _mix, _signed

    gamma = torch.tensor(_signed(GAMMA))
    first_draw = int(_mix(gamma)) % 2**64
    assert first_draw == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_first_of_equal_classes_is_decided_for(results, world_size):
    """As with argmax, even if the equal classes are on different ranks."""
    _, label_G = shard_ranks.batch_of(None, 4)
    num_first = int((label_G == 0).sum())
    assert 0 < num_first < 12
    assert shard_ranks.equal_classes(None)["num_correct"] == num_first
    for rank in results[world_size]:
        assert rank["equal"]["num_correct"] == num_first


def test_a_million_classes_take_no_memory_before_they_are_split(alone):
    """The whole head is built on the meta device."""
    made = []

    def make():
        head = HEADS[AAM](embed_dim=5, num_classes=6)
        made.append(head)
        return head

    head = ShardedHead(make, shards=alone)
    assert made[0].weight_CD.is_meta
    assert not head.weight_CD.is_meta
