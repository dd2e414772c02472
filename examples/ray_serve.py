"""Two replicas of the server behind one address, by Ray Serve (`hf_specdec.serve.ray`).

serve run examples.ray_serve:app
curl localhost:8000/v1/completions --json '{"prompt": "Once upon a time", "max_tokens": 32}'
"""

import json
import urllib.request

import ray
from ray import serve

from hf_specdec.serve.ray import Arguments, application

SETTINGS = {
    "speculative_config": {"method": "eagle3", "model": "tiny-eagle3"}, "max_model_len": 256, "kv_cache_memory_bytes": 32 << 20,
}  # fmt: skip
app = application(Arguments("tiny", num_replicas=2, num_cpus=0.5, llm=SETTINGS))


def main():
    """Start a cluster on this machine, ask one question, and stop."""
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": 8432})
        serve.run(app)
        body = json.dumps({"prompt": "Once upon a time, there was a big dog.", "max_tokens": 32, "temperature": 0})
        request = urllib.request.Request(
            "http://127.0.0.1:8432/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.loads(answer.read())["choices"][0]["text"]
    finally:
        serve.shutdown()
        ray.shutdown()
    print(text)
    return text


if __name__ == "__main__":
    main()
