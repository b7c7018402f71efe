"""Prompts and answers on instances of their own: keys and values go from one to the other, and what becomes of requests when either dies."""
# slow
import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import tempfile
import threading
import unittest

from pools_common import KINDS, LONG, SMALL, Answer, Compared, Pools, Refused, Waiting, check_replay
from serve_common import MODEL, PARVL, Server, ask, data_uri, need_model, png

MODULES = {"apart": "vision_encoder: {pool: encoder-pool, replicas: 1}", "inside": "vision_encoder: {pool: prefill-pool}"}
ENCODERS = "encoder-pool: {device: gpu-24gb, min_instances: 1, max_instances: 8}"
ALL_KINDS = {**KINDS, "greedy": {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": True}, "one token": {**LONG, "max_tokens": 1}}
TEXT = [{"role": "user", "content": "what color is the sky, and why is it so? " * 6}]


def allocation(encoder, decoders=2):
    return f"""
cluster:
  gpu_pools:
    {ENCODERS if encoder == "apart" else ""}
    prefill-pool: {{device: gpu-40gb, role: prefill}}
    decode-pool:  {{device: gpu-40gb, role: decode, max_instances: 8}}
model:
  modules:
    {MODULES[encoder]}
    llm_backbone:
      - {{pool: prefill-pool, replicas: 1}}
      - {{pool: decode-pool, replicas: {decoders}}}
"""


class Roles(Compared, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        pictures = [data_uri(png(color=color)) for color in ((200, 30, 40), (10, 90, 210))]
        cls.asked = {"text": TEXT, "picture": ask("what is in the picture?", pictures[0]), "pictures": ask("which is larger?", *pictures)}
        with Server("--dtype", "float32") as one:
            cls.want = {(name, kind): Answer(one, messages, **fields).read_all() for name, messages in cls.asked.items() for kind, fields in ALL_KINDS.items()}
            cls.choices = cls.three_choices(one)

    @classmethod
    def three_choices(cls, server):
        status, _, reply = server.request("POST", "/v1/chat/completions", {"messages": cls.asked["picture"], "n": 3, "max_tokens": 20, "temperature": 1, "seed": 3, "ignore_eos": True})
        assert status == 200, reply
        return [choice["message"]["content"] for choice in reply["choices"]]

    def start(self, encoder, decoders=2):
        """A server that ends with the test; then its record gives the same decisions again."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        record = pathlib.Path(folder.name) / "record"
        self.addCleanup(check_replay, record, 10)
        server = Pools(allocation(encoder, decoders), *SMALL, "--record", str(record))
        self.addCleanup(server.stop)
        server.wait_all_ready()
        return server

    @staticmethod
    def handovers(server, outcome):
        return server.figure("parvl_kv_handovers_total", f'outcome="{outcome}",pool="decode-pool"')

    @staticmethod
    def pids(server, pool):
        """By instance, in the processes that run now."""
        return {number: pid for number, (of, pid) in server.instances().items() if of == pool}

    def test_answers_are_those_of_one_process(self):
        for encoder in MODULES:
            server = self.start(encoder)
            for (name, kind), want in self.want.items():
                with self.subTest(encoder=encoder, name=name, kind=kind):
                    got = Answer(server, self.asked[name], **ALL_KINDS[kind]).read_all()
                    self.assert_same(got, want)
                    where = got.usage["ran_on"]
                    self.assertRegex(where["llm_backbone"], r"^instance \d of prefill-pool" + (r"$" if kind == "one token" else r", then \d of decode-pool$"))
                    encoded = {"apart": r"^instance \d of encoder-pool$", "inside": r"^instance \d of prefill-pool$"}[encoder]
                    self.assertRegex(where.get("vision_encoder", ""), "^$" if name == "text" else encoded)
            self.assertEqual(self.three_choices(server), self.choices)
            modules = server.request("GET", "/v1/models")[2]["data"][0]["parvl"]["modules"]
            self.assertEqual(modules["llm_backbone"], "prefill-pool (1 instance on cpu), decode-pool (2 instances on cpu)")
            answers = [Waiting(server, self.asked[name], **ALL_KINDS[kind]) for _ in range(3) for name, kind in self.want]
            for answer, want in zip(answers, 3 * list(self.want.values())):
                self.assert_same(answer.result(), want)
            self.assertGreaterEqual(self.handovers(server, "fetched"), 4 * len(self.want) / 2)
            self.assertEqual(self.handovers(server, "computed"), 0)
            self.check_pools_of_figures(server, {"apart": "encoder-pool", "inside": "prefill-pool"}[encoder])
            status = server.status()
            self.assertEqual({name: pool["role"] for name, pool in status["pools"].items() if name != "encoder-pool"}, {"prefill-pool": "prefill", "decode-pool": "decode"})
            self.assertEqual({one["running"] for one in status["instances"]}, {0})

    def check_pools_of_figures(self, server, encoder_pool):
        """In /metrics: a module's figures stand with the pools that hold it, and vLLM's are their sum."""
        text = server.request("GET", "/metrics")[2]
        busy = {(pool, module): float(value) for module, pool, value in re.findall(r'^parvl_busy_seconds_total\{module="(.*)",pool="(.*)"\} (.*)$', text, re.MULTILINE)}
        self.assertEqual(set(busy), {("prefill-pool", "llm_backbone"), ("decode-pool", "llm_backbone"), (encoder_pool, "vision_encoder")})
        self.assertGreater(min(busy.values()), 0, busy)
        self.assertNotIn("colocated", text)
        self.assertEqual(set(re.findall(r'^parvl_time_to_first_token_seconds_count\{pool="(.*)"\}', text, re.MULTILINE)), {"prefill-pool"})
        for name in ("mm_cache_queries_total", "prefix_cache_queries_total"):
            self.assertGreater(server.figure("vllm:" + name), 0)
            self.assertEqual(server.figure("parvl_" + name), server.figure("vllm:" + name))

    def test_an_answer_goes_on_when_its_decode_instance_is_killed(self):
        server, moved = self.start("apart", decoders=3), 0
        cases = [("pictures", kind, tokens) for kind in ("sampled", "stopped", "schema") for tokens in (1, 9, 30)]
        for name, kind, tokens in [*cases, ("text", "sampled", 2), ("text", "schema", 17)]:
            with self.subTest(name, kind=kind, tokens=tokens):
                answer = Answer(server, self.asked[name], **ALL_KINDS[kind]).read_until(tokens)
                for one in server.status()["instances"]:
                    if one["pool"] == "decode-pool" and one["running"] > 0:  # else it has said all before
                        os.kill(one["pids"][0], signal.SIGKILL)
                got = answer.read_all()
                self.assert_same(got, self.want[name, kind])
                moved += got.usage["ran_on"]["llm_backbone"].count("then") > 1
                server.wait_for(lambda: server.ready_in("decode-pool") >= 2)
        self.assertGreaterEqual(moved, 3)

    def test_an_answer_goes_on_when_its_prefill_instance_is_killed(self):
        server = self.start("apart")
        (prefill,) = self.pids(server, "prefill-pool")
        decoders = self.pids(server, "decode-pool").values()
        def begin(name, tokens, stopped=()):
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            answer = Answer(server, self.asked[name], **LONG).read_until(tokens)
            os.kill(self.pids(server, "prefill-pool")[prefill], signal.SIGKILL)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            self.assert_same(answer.read_all(), self.want[name, "sampled"])
            server.wait_all_ready()
        for name, tokens in (("text", 9), ("pictures", 1)):
            with self.subTest(name, tokens=tokens):  # whoever goes on needs it no more, or finds nothing to fetch
                begin(name, tokens)
        for name in ("text", "pictures"):
            with self.subTest(name, fetched=False):  # its keys and values are lost before anybody has taken them
                begin(name, 1, decoders)
        with self.subTest("it says nothing when the prompt comes"):
            os.kill(self.pids(server, "prefill-pool")[prefill], signal.SIGSTOP)
            self.assert_same(Answer(server, self.asked["pictures"], **LONG).read_all(), self.want["pictures", "sampled"])
            server.wait_all_ready()

    def test_images_inside_the_prompts_instances_outlive_a_lost_answer(self):
        server = self.start("inside", decoders=1)
        for tokens in (1, 9):
            with self.subTest(tokens=tokens):
                answer = Answer(server, self.asked["pictures"], **LONG).read_until(tokens)
                os.kill(*self.pids(server, "decode-pool").values(), signal.SIGKILL)
                self.assert_same(answer.read_all(), self.want["pictures", "sampled"])
                server.wait_all_ready()

    def test_without_a_decode_pool_nothing_new_is_taken_and_what_was_begun_waits(self):
        server = self.start("inside", decoders=1)
        (decode,) = self.pids(server, "decode-pool")
        os.kill(self.pids(server, "decode-pool")[decode], signal.SIGSTOP)
        answer = Answer(server, TEXT, **LONG).read_until(1)
        os.kill(self.pids(server, "decode-pool")[decode], signal.SIGKILL)
        server.wait_for(lambda: server.request("GET", "/readyz")[0] == 503)
        self.assertIn("decode-pool", server.request("GET", "/readyz")[2]["error"]["message"])
        self.assert_same(answer.read_all(), self.want["text", "sampled"])
        server.wait_all_ready()
        self.assert_same(Answer(server, TEXT, **LONG).read_all(), self.want["text", "sampled"])

    def test_each_of_many_requests_ends_once_whoever_dies(self):
        server, rng, results, lock = self.start("apart"), random.Random(5), [], threading.Lock()
        cases, before = iter([*self.want] * 10), server.descriptors()
        def client():
            while True:
                with lock:
                    case = next(cases, None)
                if case is None:
                    return
                answer = None  # refused, since a pool has nobody
                with contextlib.suppress(Refused):
                    answer = Answer(server, self.asked[case[0]], **ALL_KINDS[case[1]]).read_all()
                with lock:
                    results.append((case, answer))
        clients = [threading.Thread(target=client) for _ in range(6)]
        for thread in clients:
            thread.start()
        for _ in range(8):  # more often, and they would be started again too late for whoever waits
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice([*server.instances().values()])[1], rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
            clients[0].join(1)
        for thread in clients:
            thread.join()
        self.assertEqual(len(results), 10 * len(self.want))
        for case, answer in results:
            if answer is not None:
                self.assert_same(answer, self.want[case])
        self.assertGreaterEqual(sum(answer is not None for _, answer in results), len(self.want))
        server.wait_all_ready()
        self.assertEqual({one["running"] + one["waiting"] for one in server.status()["instances"]}, {0})
        # Shared memory is kept for the next images: as much as was in use at once.
        server.wait_for(lambda: server.descriptors()[1] <= before[1] + 4)
        self.assertLess(server.descriptors()[0], 64)
        self.check_keys_and_values_are_let_go(server)

    def check_keys_and_values_are_let_go(self, server):
        """Whoever computes prompts keeps as much of that memory as was in use at once, not what each answer left."""
        for name in 12 * [*self.asked]:
            self.assert_same(Answer(server, self.asked[name], **LONG).read_all(), self.want[name, "sampled"])
        (prefill,) = self.pids(server, "prefill-pool").values()
        self.assertLess(server.descriptors(prefill)[0], 24)


class Refusals(unittest.TestCase):
    def test_what_cannot_be_served_is_refused_before_weights(self):
        need_model()
        good = allocation("inside")
        between = good[good.index("model:"):good.index("      - {pool: prefill-pool")]
        for change, says in (((", role: decode", ""), "'cluster.gpu_pools.prefill-pool.role' is prefill, and no pool has the role decode"),
                             (("prefill-pool}", "decode-pool}"), "'cluster.gpu_pools.decode-pool.role' is decode, so decode-pool sees no images"),
                             (("decode-pool, replicas: 2", "decode-pool, replicas: 2, parallel: tensor, tp_size: 2"),
                              "'model.modules.llm_backbone.1.tp_size' (2): an instance of several devices with the role decode is not available yet"),
                             ((between, "    whole-pool: {device: gpu-40gb}\n" + between + "      - {pool: whole-pool}\n"),
                              "'cluster.gpu_pools.prefill-pool.role' is prefill, and whole-pool has the role llm: the two beside each other are not available yet")):
            with self.subTest(says), tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "a.yaml"
                path.write_text(good.replace(*change))
                done = subprocess.run([PARVL, "serve", "--model", MODEL, "--config", str(path), "--device-map", "gpu-40gb=cpu"], capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertRegex(done.stderr.strip().splitlines()[-1], r"a\.yaml:\d+: " + re.escape(says))
                self.assertNotIn("weights", done.stderr)


if __name__ == "__main__":
    unittest.main()
