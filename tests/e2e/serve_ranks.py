"""An engine whose LLM is cut over processes: what it answers, and what becomes of it when one of them dies."""
# slow
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
import unittest

from pools_common import LONG, SMALL, Answer, Compared, Pools, Waiting
from serve_common import MODEL, PARVL, Server, ask, data_uri, need_model, png

TWO_INSTANCES = """
cluster:
  gpu_pools:
    llm-pool: {device: gpu-40gb, devices: 4, min_instances: 1, max_instances: 2}
model:
  modules:
    vision_encoder: {pool: llm-pool}
    llm_backbone:   {pool: llm-pool, replicas: 2, parallel: tensor, tp_size: 2}
"""
TWO_PIPELINES = TWO_INSTANCES.replace("parallel: tensor, tp_size", "parallel: pipeline, pp_size")
LLM_ALONE = """
cluster:
  gpu_pools:
    encoder-pool: {device: gpu-24gb}
    llm-pool:     {device: gpu-40gb, devices: 2}
model:
  modules:
    vision_encoder: {pool: encoder-pool}
    llm_backbone:   {pool: llm-pool, parallel: tensor, tp_size: 2}
"""


def ranks_of(pid):
    """The other ranks that a process has started, by their process ids."""
    out = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            words = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if words[1:2] == [b"rank"]:
                out.append(child)
    return out


def is_there(pid):
    try:
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)  # nobody tells; the condition ends it
    return condition()


class Ranks(Compared, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # More pictures than ranks, of several sizes: they are dealt out over the ranks' encoders.
        pictures = [data_uri(png(64 + 28 * i, 64, (40 * i, 200, 30))) for i in range(4)]
        cls.asked = {"picture": ask("what is in the picture?", data_uri(png())), "pictures": ask("what is in them?", *pictures), "text": ask("what is it?")}
        with Server("--dtype", "float32", *SMALL) as one:
            cls.want = {name: Answer(one, messages, **LONG).read_all() for name, messages in cls.asked.items()}

    def test_answers_are_those_of_one_process(self):
        for flags in (("-tp", "2"), ("--tensor-parallel-size", "4"), ("-pp", "2"), ("-tp=2", "--pipeline-parallel-size", "2")):
            with self.subTest(flags):
                server = Server("--dtype", "float32", *SMALL, *flags)
                try:
                    ranks = ranks_of(server.process.pid)
                    self.assertEqual(len(ranks), (4 if "4" in flags or len(flags) == 3 else 2) - 1)
                    for name, messages in self.asked.items():
                        self.assert_same(Answer(server, messages, **LONG).read_all(), self.want[name])
                finally:
                    self.assertEqual(server.stop(), 0)
                self.assertEqual([pid for pid in ranks if is_there(pid)], [], "a rank outlives its engine")

    def test_a_rank_that_is_killed_ends_its_engine_with_a_clear_error(self):
        for flag in ("-tp", "-pp"):
            with self.subTest(flag):
                self.kill_a_rank_while_it_answers(flag)

    def kill_a_rank_while_it_answers(self, flag):
        with Server("--dtype", "float32", *SMALL, flag, "2") as server:
            answer = Answer(server, self.asked["text"], **{**LONG, "max_tokens": 400}).read_until(3)
            os.kill(ranks_of(server.process.pid)[0], signal.SIGKILL)
            answer.read_all()
            self.assertIn("rank 1 of the 2 that compute together was ended by SIGKILL", str(answer.error))
            status, _, body = server.chat(messages=self.asked["text"])
            self.assertEqual(status, 503, body)
            self.assertEqual(server.request("GET", "/health")[0], 503)
            self.assertIn("rank 1 of the 2 that compute together was ended by SIGKILL", "".join(server.errors))

    def test_a_rank_that_hangs_ends_its_engine_too(self):
        for flag in ("-tp", "-pp"):
            with self.subTest(flag), Server("--dtype", "float32", *SMALL, flag, "2") as server:
                self.assert_same(Answer(server, self.asked["text"], **LONG).read_all(), self.want["text"])
                os.kill(ranks_of(server.process.pid)[0], signal.SIGSTOP)
                status, _, body = server.chat(messages=self.asked["text"])
                self.assertEqual(status, 503, body)
                self.assertRegex(str(body), r"a step of \d+ tokens has not ended within \d+\.\d s: of the 2 ranks that compute together one hangs")
                self.assertEqual(server.request("GET", "/health")[0], 503)
                self.assertTrue(wait_until(lambda: not ranks_of(server.process.pid)))

    def test_an_idle_engine_hears_of_a_lost_rank(self):
        with Server("--dtype", "float32", *SMALL, "-tp", "2") as server:
            os.kill(ranks_of(server.process.pid)[0], signal.SIGKILL)
            self.assertTrue(wait_until(lambda: server.request("GET", "/health")[0] == 503), "".join(server.errors))

    def test_ranks_end_with_a_server_that_is_killed(self):
        server = Server("--dtype", "float32", *SMALL, "-tp", "2")
        ranks = ranks_of(server.process.pid)
        server.process.kill()
        server.stop()
        self.assertTrue(wait_until(lambda: not any(map(is_there, ranks))))

    def test_a_cut_that_cannot_be_is_refused(self):
        run = subprocess.run([PARVL, "serve", "--model", MODEL, "--port", "0", "-tp", "3"], capture_output=True, text=True, timeout=120)
        self.assertEqual(run.returncode, 2)
        self.assertIn("--tensor-parallel-size (3) must divide the 4 attention heads of llm_backbone; valid here: 1, 2, 4", run.stderr)

    def test_more_stages_than_layers_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "allocation.yaml"
            path.write_text(TWO_PIPELINES.replace("pp_size: 2", "pp_size: 9").replace("devices: 4", "devices: 18"))
            for flags, says in ((("-pp", "9"), "--pipeline-parallel-size (9) must not be above the 4 layers of llm_backbone"),
                                (("--config", str(path), "--device-map", "gpu-40gb=cpu"),
                                 f"{path}:8: 'model.modules.llm_backbone.pp_size' (9) must not be above the 4 layers of llm_backbone")):
                run = subprocess.run([PARVL, "serve", "--model", MODEL, "--port", "0", *flags], capture_output=True, text=True, timeout=120)
                self.assertEqual(run.returncode, 2)
                self.assertIn(says, run.stderr)

    def test_requests_go_on_elsewhere_when_a_rank_of_their_instance_dies(self):
        for allocation in (TWO_INSTANCES, TWO_PIPELINES):
            with self.subTest(allocation):
                self.kill_ranks_of_instances(allocation)

    def kill_ranks_of_instances(self, allocation):
        server = Pools(allocation, *SMALL)
        try:
            self.assert_same(Answer(server, self.asked["picture"], **LONG).read_all(), self.want["picture"])
            for name, tokens in (("picture", 5), ("text", 20)):
                with self.subTest(name):
                    holder = Answer(server, self.asked[name], **{**LONG, "max_tokens": 1}).read_all().usage["ran_on"]["llm_backbone"]
                    number = int(re.search(r"instance (\d+)", holder).group(1))
                    answer = Answer(server, self.asked[name], **LONG).read_until(tokens)
                    os.kill(ranks_of(server.instances()[number][1])[0], signal.SIGKILL)
                    self.assert_same(answer.read_all(), self.want[name])
                    self.assertRegex(answer.usage["ran_on"]["llm_backbone"], rf"^instance {number}, then \d of llm-pool$")
                    server.wait_for(lambda: server.ready_in("llm-pool") == 2)
        finally:
            self.assertEqual(server.stop(), 0)

    def test_images_of_a_rank_that_dies_are_encoded_elsewhere(self):
        server = Pools(TWO_INSTANCES, *SMALL)
        try:
            holder = Answer(server, self.asked["text"], **{**LONG, "max_tokens": 1}).read_all().usage["ran_on"]["llm_backbone"]
            rank = ranks_of(server.instances()[int(re.search(r"instance (\d+)", holder).group(1))][1])[0]
            os.kill(rank, signal.SIGSTOP)  # whatever it is given to encode stays undone
            answers = [Waiting(server, self.asked["pictures"], **LONG) for _ in range(2)]
            server.wait_for(lambda: server.figure("vllm:num_requests_running") >= 1)
            os.kill(rank, signal.SIGKILL)
            for answer in answers:
                self.assert_same(answer.result(), self.want["pictures"])
            server.wait_all_ready()
        finally:
            self.assertEqual(server.stop(), 0)

    def test_an_llm_alone_takes_features_from_its_encode_pool(self):
        server = Pools(LLM_ALONE, *SMALL)
        try:
            for name, messages in self.asked.items():
                self.assert_same(Answer(server, messages, **LONG).read_all(), self.want[name])
        finally:
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main()
