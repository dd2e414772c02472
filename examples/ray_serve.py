"""A Ray Serve deployment: every replica is an engine with continuous batching, and answers a request in a thread of its own.

serve run examples.ray_serve:app
curl localhost:8000 --json '{"prompt": "Tell me a story about a dog."}'
"""

import asyncio

from ray import serve

from hf_specdec import LLM, SamplingParams


@serve.deployment(num_replicas=1, max_ongoing_requests=64)
class Writer:
    """One engine. For several GPUs raise `num_replicas` and give each `ray_actor_options={"num_gpus": 1}`."""

    def __init__(self, model: str = "tiny", speculative_config: dict | None = None):
        config = speculative_config or {"method": "eagle3", "model": "tiny-eagle3"}
        self.llm = LLM(model=model, speculative_config=config)
        self.lock = asyncio.Lock()

    async def write(self, prompt: str, max_tokens: int = 64) -> str:
        """The answer to a prompt."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        async with self.lock:  # `LLM` takes one call at a time; `hf-specdec serve` batches requests as they come
            outputs = await asyncio.to_thread(self.llm.chat, [[{"role": "user", "content": prompt}]], params)
        return outputs[0].outputs[0].text

    async def __call__(self, request) -> dict:
        body = await request.json()
        return {"text": await self.write(body["prompt"], int(body.get("max_tokens", 64)))}


app = Writer.bind()


def main():
    """Ask the deployment inside this process, without a cluster."""
    handle = serve.run(app, _local_testing_mode=True)
    text = handle.write.remote("Tell me a story about a big dog.", 32).result()
    print(text)
    return text


if __name__ == "__main__":
    main()
