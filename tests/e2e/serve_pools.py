"""Instances in processes of their own: what they answer, and what becomes of requests when one dies, stops or hangs."""
# slow
import http.client
import json
import os
import pathlib
import re
import signal
import tempfile
import threading
import unittest

from serve_common import MODEL, Server, ask, data_uri, need_model, png

REPLICAS = """
cluster:
  gpu_pools:
    llm-pool: {device: gpu-40gb, min_instances: 1, max_instances: 8}
model:
  modules:
    vision_encoder: {pool: llm-pool}
    llm_backbone:   {pool: llm-pool, replicas: 2}
"""
# Long answers of a model that would say one word: every token is sampled.
LONG = {"max_tokens": 48, "ignore_eos": True, "temperature": 1, "seed": 11, "logprobs": True, "top_logprobs": 2}


class Pools(Server):
    """A server with an allocation; `instances()` are the processes that it has told of, by instance."""

    def __init__(self, allocation, *flags):
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name) / "allocation.yaml"
        path.write_text(allocation)
        super().__init__("--config", str(path), "--device-map", "gpu-24gb=cpu,gpu-40gb=cpu" if "24gb" in allocation else "gpu-40gb=cpu", "--dtype", "float32", *flags)

    def instances(self):
        found = re.findall(r"instance (\d+) of (\S+) \(process (\d+)\) takes on", "".join(self.errors))
        return {int(instance): (pool, int(pid)) for instance, pool, pid in found}

    def stop(self, seconds=60):
        try:
            return super().stop(seconds)
        finally:
            self.folder.cleanup()


class Answer:
    """One streamed answer, read event by event; `tokens` are (text, logprob) pairs as they come."""

    def __init__(self, server, messages, **fields):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body))
        self.reply = self.connection.getresponse()
        assert self.reply.status == 200, (self.reply.status, self.reply.read())
        self.tokens, self.text, self.finish, self.usage, self.error, self.done = [], "", None, None, None, False

    def read_until(self, tokens):
        while len(self.tokens) < tokens and self.read_event():
            pass
        return self

    def read_event(self):
        event = None
        while True:
            line = self.reply.readline().decode()
            if not line:
                return False
            line = line.rstrip("\n")
            if line.startswith("event: "):
                event = line[7:]
            if line.startswith("data: "):
                break
        if line == "data: [DONE]":
            self.done = True
            return False
        data = json.loads(line[6:])
        if event == "error":
            self.error = data
            return False
        if data.get("usage"):
            self.usage = data["usage"]
        for choice in data["choices"]:
            self.text += choice["delta"].get("content") or ""
            for token in (choice.get("logprobs") or {}).get("content") or []:
                self.tokens.append((token["token"], token["logprob"]))
            self.finish = choice["finish_reason"] or self.finish
        return True

    def read_all(self):
        while self.read_event():
            pass
        self.connection.close()
        return self


class Replicas(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.server = Pools(REPLICAS)
        cls.addClassCleanup(cls.server.stop)

    def assert_same(self, got, want):
        self.assertEqual((got.error, got.done), (None, True))
        self.assertEqual((got.text, got.finish), (want.text, want.finish))
        self.assertEqual([token for token, _ in got.tokens], [token for token, _ in want.tokens])
        for (_, a), (_, b) in zip(got.tokens, want.tokens):
            self.assertAlmostEqual(a, b, delta=1e-4)
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            self.assertEqual(got.usage[count], want.usage[count])

    def busy_instance(self):
        """The instance whose engine computes now: the others' threads sleep."""

    def wait_ready(self, seconds=60):
        wait_for(lambda: self.server.request("GET", "/readyz")[0] == 200 and len(self.server.alive()) == 2, seconds)

    def test_a_request_goes_on_elsewhere_from_every_token(self):
        messages = ask("what is in the picture?", data_uri(png()))
        want = Answer(self.server, messages, **LONG).read_all()
        for at in range(1, 48, 6):
            answer = Answer(self.server, messages, **LONG).read_until(at)
            for instance, (_, pid) in self.server.instances().items():
                print(instance, pid)
            break


if __name__ == "__main__":
    unittest.main()
