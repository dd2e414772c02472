"""Weights that are updated through the server: in the shapes of vLLM and of SGLang, from disk and over a process group."""

import copy
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest
import torch
import torch.distributed as dist
from fastapi.testclient import TestClient
from helpers_server import free_port, in_thread
from helpers_weights import EAGLE3, plain
from oracle import load_bundled
from torch.distributed import distributed_c10d as c10d

import hf_specdec
from hf_specdec.serve.engine.weights import broadcast
from hf_specdec.serve.http.api import make_app
from hf_specdec.serve.http.server import Limits, Server
from hf_specdec.serve.http.weights import ROUTES
from hf_specdec.serve.trainer import WeightSender


def test_without_the_flag_every_path_is_refused(tiny_tokenizer):
    client = TestClient(make_app(Server(tiny_tokenizer, ["tiny"], Limits())))
    for route in ROUTES:
        answer = client.request(route.method, route.path)
        assert answer.status_code == 403, route.path
        message = "This needs a server that was started with --enable-weight-updates."
        assert answer.json()["error"]["message"] == message


@pytest.fixture(scope="module")
def server():
    with in_thread(EAGLE3, updates_weights=True) as server:
        yield server


def get(server, path):
    return httpx2.get(server.url + path).json()


def ask(server, path, body=None):
    status, _, answer = server.post(path, {} if body is None else body)
    assert status == 200, answer
    return answer


def written(server, prompts, **more):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 24, **more}
    answer = client.completions.create(**body, extra_body={"return_token_ids": True})
    return [choice.token_ids for choice in answer.choices]


def restore(server):
    ask(server, "/update_weights", {"update_info": {"path": hf_specdec.bundled("tiny")}})


def test_from_disk_in_both_shapes(server, three_prompts, both_texts, new_folder):
    for path, body in (
        ("/update_weights", lambda at: {"update_info": {"path": at}}),
        ("/update_weights_from_disk", lambda at: {"model_path": at}),
    ):
        assert written(server, three_prompts) == both_texts[0]
        assert ask(server, path, body(new_folder)).get("success", True)
        assert written(server, three_prompts) == both_texts[1]
        status, _, answer = server.post(path, body("/nothing"))
        assert status == 400 and answer["error"]["message"] == "'/nothing' is no folder on the server's machine."
        assert written(server, three_prompts) == both_texts[1]
        ask(server, path, body(hf_specdec.bundled("tiny")))


def trainers_group(address, port, name):
    """The trainer's side as trainers for SGLang's servers make it: a group beside torch's default one."""
    store, rank, size = next(c10d.rendezvous(f"tcp://{address}:{port}", 0, 2))
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), store, group_name=name, timeout=dist.default_pg_timeout
    )
    return group


def test_the_group_of_trainers_for_sglang(server, three_prompts, both_texts, new_model):
    port, names = free_port(), [name for name, _ in new_model.named_parameters()]
    where = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "updates",
        "backend": "gloo",
    }
    tensors = [weight.detach().bfloat16() for weight in new_model.parameters()]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "/init_weights_update_group", where)
        group = trainers_group("127.0.0.1", port, "updates")
        assert asked.result()["success"]
        what = {
            "names": names,
            "dtypes": ["bfloat16"] * len(names),
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        asked = pool.submit(ask, server, "/update_weights_from_distributed", what)
        for tensor in tensors:
            broadcast(group, tensor)
        assert asked.result()["success"]
    rounded = copy.deepcopy(new_model)
    with torch.no_grad():
        for weight, tensor in zip(rounded.parameters(), tensors, strict=True):
            weight.copy_(tensor)
    assert written(server, three_prompts) == plain(rounded, three_prompts)
    restore(server)


def test_a_stream_of_tensors(server, three_prompts, both_texts, new_model):
    sender = WeightSender(server.url, free_port())
    sender.connect()
    for _ in range(2):
        ask(server, "/start_weight_update")
        sender.send(new_model.named_parameters())
        assert (
            server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1, "max_time": 0.2})[2][
                "usage"
            ]["completion_tokens"]
            == 0
        )
        ask(server, "/finish_weight_update")
        assert written(server, three_prompts) == both_texts[1]
    state = dict(load_bundled("tiny").named_parameters())
    for wrong, message in (
        ({**state, "no": torch.ones(3)}, "no weight 'no'"),
        ({**state, "model.norm.weight": torch.ones(2)}, "has the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            sender.send(wrong.items())
        assert written(server, three_prompts) == both_texts[1]  # and the group is as useful as before
    sender.send(state.items())
    assert written(server, three_prompts) == both_texts[0]
    sender.close()


def test_a_transfer_that_is_cut_off(server, three_prompts, both_texts, new_model):
    """Requests wait until all that is missing has been sent."""
    sender, tensors = WeightSender(server.url, free_port()), list(new_model.named_parameters())
    sender.connect()
    metadata = [(name, "float32", list(weight.shape)) for name, weight in tensors]
    ask(server, "/start_weight_update")
    with ThreadPoolExecutor(1) as pool:
        names, dtypes, shapes = zip(*metadata, strict=True)
        body = {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
        asked = pool.submit(server.post, "/update_weights", body)
        for _, weight in tensors[:3]:
            broadcast(sender._group, weight.detach())
        sender.close()
        status, _, answer = asked.result()
    message = answer["error"]["message"]
    assert status == 400 and "The transfer was cut off before" in message and "send all weights again." in message
    status, _, answer = server.post("/finish_weight_update", {})
    assert status == 400 and "weights are missing, such as" in answer["error"]["message"]
    status, _, answer = server.post("/update_weights", body)
    assert status == 400 and "There is no trainer's group" in answer["error"]["message"]
    sender.connect()
    sender.send(tensors)
    ask(server, "/finish_weight_update")
    assert written(server, three_prompts) == both_texts[1]
    restore(server)


def test_pauses_and_sleep(server, three_prompts, both_texts):
    assert get(server, "/get_world_size") == {"world_size": 1}
    assert get(server, "/server_info?config_format=json")["vllm_config"]["model_config"] == {
        "logprobs_mode": "raw_logprobs"
    }
    for path, undo, state, name in (
        ("/pause?mode=keep", "/resume", "/is_paused", "is_paused"),
        ("/pause?mode=wait&clear_cache=true", "/resume", "/is_paused", "is_paused"),
        ("/sleep?level=1", "/wake_up?tags=weights&tags=kv_cache", "/is_sleeping", "is_sleeping"),
    ):
        assert get(server, state) == {name: False}
        ask(server, path)
        assert get(server, state) == {name: True}
        waits = {"model": "tiny", "prompt": "a", "max_tokens": 1, "max_time": 0.2}
        assert server.post("/v1/completions", waits)[2]["usage"]["completion_tokens"] == 0
        ask(server, undo)
        assert get(server, state) == {name: False}
    status, headers, answer = server.post("/pause?mode=keep&clear_cache=true", {"other": 1})
    assert (status, answer) == (200, {"status": "paused"}) and headers["x-ignored-fields"] == "clear_cache, other"
    assert ask(server, "/resume") == {"status": "resumed"} and ask(server, "/reset_prefix_cache") == {"success": True}
    assert written(server, three_prompts) == both_texts[0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause?mode=later", {}, "mode: Input should be 'abort', 'wait' or 'keep'."),
        ("/sleep?level=3", {}, "level: Input should be 1, 2"),
        ("/wake_up?tags=all", {}, "tags"),
        ("/finish_weight_update", {}, "No update of the weights has begun."),
        ("/update_weights", {}, "update_info: Field required."),
        ("/update_weights", {"update_info": {}}, "give either path or names, dtype_names and shapes."),
        ("/update_weights", {"update_info": {"names": ["a"], "packed": True}}, "update_info.packed: Input should be False."),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [[-1]]}, "shapes.0.0: Input should be greater than"),
        ("/init_weights_update_group", {"master_address": "a", "master_port": 1, "backend": "nccl"}, "backend 'nccl': use 'gloo'"),
        ("/init_weights_update_group", {"master_address": "a", "master_port": 1, "world_size": 3}, "world_size is 2 and rank_offset 1"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(server, path, body, message):
    status, _, answer = server.post(path, body)
    assert status == 400 and message in answer["error"]["message"]


def test_metrics_tell_of_updates(server, three_prompts, new_folder):
    ask(server, "/update_weights_from_disk", {"model_path": new_folder})
    before = server.metrics()["hf_specdec_weights_updates"]
    for _ in range(3):
        written(server, three_prompts)
    restore(server)
    metrics = server.metrics()
    assert (
        metrics["hf_specdec_weights_updates"] == before + 1 and metrics["hf_specdec_weights_best_accepted_length"] > 1
    )
    assert "hf_specdec_weights_accepted_length" not in metrics


def test_token_ids_in_place_of_texts(server, three_prompts):
    """TRL and verl read log-probabilities by token id."""
    more = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = ask(server, "/v1/completions", {"model": "tiny", "prompt": three_prompts[0], "logprobs": 0, **more})[
        "choices"
    ][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [name] for name in choice["logprobs"]["tokens"]
    ]
    messages = [{"role": "user", "content": "Hello"}]
    choice = ask(server, "/v1/chat/completions", {"model": "tiny", "messages": messages, "logprobs": True, **more})[
        "choices"
    ][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
