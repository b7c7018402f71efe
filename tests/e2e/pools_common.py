"""What the tests of servers with an allocation share: starting one, reading its streams, waiting for its instances."""
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request

from serve_common import MODEL, PARVL, Server

POOLS = """
cluster:
  gpu_pools:
    encoder-pool: {device: gpu-24gb, min_instances: 1, max_instances: 8}
    llm-pool:     {device: gpu-40gb, min_instances: 1, max_instances: 8}
model:
  modules:
    vision_encoder: {pool: encoder-pool, replicas: 2}
    llm_backbone:   {pool: llm-pool, replicas: 3}
"""
SMALL = ("--kv-cache-memory-bytes", "67108864", "--encoder-cache-bytes", "16777216")
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
COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}, "n": {"type": "integer", "minimum": 100000}}, "required": ["color", "n"]}
# What a request that is moved must keep up: seeds and log-probabilities, stop strings across the border, a grammar.
KINDS = {"sampled": LONG,
         "stopped": {**LONG, "stop": ["circlecircle", "triangleteal", "zzz"], "presence_penalty": 0.3, "frequency_penalty": 0.2},
         "schema": {"max_tokens": 160, "temperature": 1, "seed": 5, "logprobs": True, "ignore_eos": True,
                    "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "array", "items": COLOR, "minItems": 30}}}}}


def check_replay(record, decisions):
    """The same events give the same decisions again, of which there were more than so many."""
    replay = subprocess.run([PARVL, "replay", "--json", str(record)], capture_output=True, text=True, timeout=120)
    assert replay.returncode == 0, replay.stderr
    report = json.loads(replay.stdout)
    assert report["equal"] and report["decisions"] > decisions, report


class Compared:
    """What tests have beside their own that compare answers to those of one process."""

    def assert_same(self, got, want):
        self.assertEqual((got.error, got.done), (None, True))
        self.assertEqual((got.text, got.finish), (want.text, want.finish))
        self.assertEqual([token for token, _ in got.tokens], [token for token, _ in want.tokens])
        for (_, a), (_, b) in zip(got.tokens, want.tokens):
            self.assertAlmostEqual(a, b, delta=1e-4)
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            self.assertEqual(got.usage[count], want.usage[count])


class Pools(Server):
    """A server with an allocation; `instances()` are the processes that it has told of, by instance.
    `devices`: what --device-map says, by default that all is the CPU; with "" nothing is."""

    def __init__(self, allocation, *flags, devices=None, model=MODEL):
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name) / "allocation.yaml"
        path.write_text(allocation)
        if devices is None:
            devices = "gpu-24gb=cpu,gpu-40gb=cpu" if "24gb" in allocation else "gpu-40gb=cpu"
        on = ("--device-map", devices) if devices else ()
        super().__init__("--config", str(path), *on, "--dtype", "float32", *flags, model=model)

    def status(self):
        with urllib.request.urlopen(self.ready_line.split()[4] + "/status", timeout=30) as reply:
            return json.loads(reply.read())

    def instances(self):
        found = re.findall(r"instance (\d+) of (\S+) \(process (\d+)\) takes on", "".join(self.errors))
        return {int(instance): (pool, int(pid)) for instance, pool, pid in found}

    def figure(self, name, label=""):
        """The sum of those of its series that have the label, as it stands in the text: NAME="VALUE"."""
        labels = rf"\{{[^}}]*{re.escape(label)}[^}}]*\}}" if label else r"(?:\{[^}]*\})?"
        values = re.findall(rf"^{re.escape(name)}{labels} (\S+)$", self.request("GET", "/metrics")[2], re.MULTILINE)
        assert values, f"/metrics has no {name}"
        return sum(map(float, values))

    def wait_for(self, condition, seconds=90):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "".join(self.errors[-30:])
            time.sleep(0.05)  # nobody tells; the condition ends it

    def wait_all_ready(self):
        """Every instance whose failure has been noticed is ready again."""
        self.wait_for(lambda: all(one["state"] == "ready" for one in self.status()["instances"]))

    def ready_in(self, pool):
        return self.status()["pools"][pool]["ready"]

    def descriptors(self, pid=None):
        """Of the gateway, or of another process: how many of shared memory, and of all else."""
        folder, memory, others = f"/proc/{pid or self.process.pid}/fd", 0, 0
        for name in os.listdir(folder):
            try:
                shared = os.readlink(f"{folder}/{name}").startswith("/memfd:")
            except FileNotFoundError:
                continue
            memory, others = memory + shared, others + (not shared)
        return memory, others

    def memory(self):
        """Bytes of the gateway's own memory."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return sum(1024 * int(re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE).group(1)) for name in ("RssAnon", "RssShmem"))

    def decoders(self):
        """(name, pid) of each process that decodes pictures."""
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task").iterdir()  # each has those that it has started
        children = [pid for task in tasks for pid in (task / "children").read_text(encoding="utf-8").split()]
        names = [(pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip(), int(pid)) for pid in children]
        return [one for one in names if one[0].startswith("parvl-media")]

    def stop(self, seconds=60):
        try:
            return super().stop(seconds)
        finally:
            self.folder.cleanup()


class KilledForGood:
    """While it lasts, each process of a pool is killed as soon as it has been told what to be."""

    def __init__(self, server, pool):
        self.server, self.pool, self.over, self.killed = server, pool, threading.Event(), set()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.over.is_set():
            for pool, pid in self.server.instances().values():
                if pool == self.pool and pid not in self.killed:
                    self.killed.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.over.wait(0.02)

    def __enter__(self):
        self.thread.start()
        self.server.wait_for(lambda: self.server.ready_in(self.pool) == 0)
        return self

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()


class Waiting:
    """A streamed answer that is asked for on a thread of its own."""

    def __init__(self, server, messages, **fields):
        self.answer, self.failure = None, None
        def run():
            try:
                self.answer = Answer(server, messages, **fields).read_all()
            except Exception as failure:  # pylint: disable=broad-except
                self.failure = failure
        self.thread = threading.Thread(target=run)
        self.thread.start()

    def result(self):
        self.thread.join()
        if self.failure is not None:
            raise self.failure
        return self.answer


class Refused(AssertionError):
    """A status that is not 200, and the reason."""


class Answer:
    """One streamed answer, read event by event; `tokens` are (text, logprob) pairs as they come."""

    def __init__(self, server, messages, **fields):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body))
        self.reply = self.connection.getresponse()
        if self.reply.status != 200:
            raise Refused(f"{self.reply.status} {self.reply.read().decode()}")
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
