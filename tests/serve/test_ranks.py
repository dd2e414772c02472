"""Targets whose shards are on two processes: texts equal one whole process's, rank 0 decides, errors stop all.

The cases are in ranked_cases.py. Two processes start once and run all of them; each test here looks at one.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import BUILDERS, ROOT

from hf_specdec.core.ranks import digest

pytestmark = pytest.mark.ci


def start(output, *cases, ranks=2, timeout=240):
    """Run cases on several processes. Returns the completed process, and what each rank found."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    (output.parent / f"{output.name}.models").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
         str(BUILDERS / "ranked_cases.py"), str(output), *cases],
        env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    files = [Path(f"{output}.{rank}") for rank in range(ranks)]
    return done, [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done, results = start(tmp_path_factory.mktemp("ranks") / "found")
    assert done.returncode == 0 and all(results), done.stdout[-2000:] + done.stderr[-4000:]
    return results


def test_every_method_gives_the_text_of_one_process(found):
    for each in found:
        assert set(each["methods"].values()) == {True}, each["methods"]


def test_mixtures_of_experts(found):
    for each in found:
        assert set(each["mixture"].values()) == {True}, each["mixture"]


def test_lengths_are_those_that_rank_0_measures(found):
    for each in found:
        assert set(each["lengths_by_clock"].values()) == {True}, each["lengths_by_clock"]


def test_sampling_without_a_seed_uses_that_of_rank_0(found):
    first, second = (each["unseeded"] for each in found)
    assert first == second and isinstance(first, list)


def test_a_seed_means_what_it_means_to_one_process(found):
    for each in found:
        assert each["seeded"] == [True, True]


def test_distributions_of_drafts_are_those_of_rank_0(found):
    first, second = (each["rejection"] for each in found)
    assert first == second and isinstance(first, list)


def test_unlike_drafts_do_no_harm(found):
    for each in found:
        assert set(each["unlike_drafts"].values()) == {True}, each["unlike_drafts"]


@pytest.mark.parametrize(
    ("name", "failing", "kind", "message"),
    [
        ("streamer 0", 0, "OSError", "the pipe is broken"),
        ("streamer 1", 1, "OSError", "the pipe is broken"),
        ("drafter 1", 1, "ZeroDivisionError", "division by zero"),
        ("criterion 0", 0, "KeyError", "criterion"),
    ],
)
def test_an_error_on_one_rank_stops_both(found, name, failing, kind, message):
    own, other = found[failing]["errors"][name], found[1 - failing]["errors"][name]
    assert own[0] == kind and message in own[1]
    assert other[0] == "RankError" and f"rank {failing} raised {kind}" in other[1] and message in other[1]
    assert max(own[2], other[2]) < 5.0


def test_ranks_with_unlike_arguments_are_told_so(found):
    for each in found:
        kind, message, _ = each["errors"]["unlike inputs"]
        assert kind == "RankError" and "Give every rank the same arguments" in message
        assert each["errors"]["after"] is True


def test_rank_0_decides_what_ends_the_text(found):
    first, second = (each["stopping"] for each in found)
    assert first["max_time"] == second["max_time"] and len(first["max_time"][0]) < 200
    assert first["random"] == second["random"]
    for each in (first, second):
        assert each["string"] == each["string of whole"]
        assert each["overlapping"] is True


def test_a_hook_on_one_rank(found):
    for each in found:
        assert each["hook_on_one_rank"] == [True] * 4


def test_a_rank_keeps_its_heads_keys_only(found):
    for each in found:
        sharded, whole = each["bytes_per_rank"]
        assert sharded * 2 == whole > 0


def test_options_follow_the_shards(found):
    for each in found:
        options = dict(each["options"])
        assert options.pop("draft tp") == [True, True, True]
        assert set(options.values()) == {True}, options


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kv heads", "has 1 KV heads, which 2 ranks cannot share"),
        ("pipeline", "is split into 2 pipeline stages"),
        ("native", "a whole model on the CPU"),
        ("draft tp", "is 3, and the target has 2 ranks: it can be 1 (a whole drafter on every rank) or 2"),
    ],
)
def test_what_is_refused(found, name, message):
    for each in found:
        assert message in each["refusals"][name][1]
        assert each["refusals"]["native is off"] is True


def test_the_engine_follows_rank_0(found):
    first, second = (each["engine"] for each in found)
    assert first == second and len(first["greedy"]) == 3
    predicted, constrained, other = first["brought"]  # rows with drafts of their own, on every rank
    assert [predicted, other] == [first["greedy"][0], first["greedy"][2]] and constrained != first["greedy"][1]


def test_digests_do_not_depend_on_the_process():
    assert digest([1, 2], "a", torch.arange(3)) == 2207853863
    assert digest([1, 2]) != digest([2, 1])


# ---- slow -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_methods(tmp_path, ranks):
    done, results = start(tmp_path / "found", "all_methods", ranks=ranks, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    for each in results:
        methods = dict(each["all_methods"])
        if ranks > 2:
            kind, message, _ = methods.pop("deterministic")
            assert kind == "UnsupportedModel" and "works with 2 ranks" in message
        assert set(methods.values()) == {True}, methods


@pytest.mark.slow
def test_experts_on_ranks_of_their_own(tmp_path):
    done, results = start(tmp_path / "found", "experts", timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    for each in results:
        assert set(map(tuple, each["experts"].values())) == {(True, True)}, each["experts"]


@pytest.mark.slow
def test_an_error_inside_a_forward_ends_the_other_process(tmp_path):
    """No message can reach a rank that waits in a collective, so its process ends, within seconds."""
    done, _ = start(tmp_path / "found", "error_in_a_forward", timeout=120)
    assert done.returncode != 0
    said = done.stderr + done.stdout
    assert re.search(
        r"the process of rank 0 ends, because rank 1 raised .*ZeroDivisionError \(division by zero\)", said
    )
