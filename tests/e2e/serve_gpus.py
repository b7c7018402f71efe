"""Serving on GPUs: instances on GPUs of their own, and engines cut over several, against one GPU."""
# slow
import os
import pathlib
import re
import subprocess
import tempfile
import unittest
import unittest.mock

from pools_common import LONG, SMALL, Answer, Compared, Pools, Waiting
from serve_common import MODEL, PARVL, Server, ask, data_uri, need_model, png

APART = """
cluster:
  gpu_pools:
    encoder-pool: {device: gpu-24gb}
    llm-pool:     {device: gpu-40gb, max_instances: 64}
model:
  modules:
    vision_encoder: {pool: encoder-pool}
    llm_backbone:   {pool: llm-pool, replicas: 1}
"""
ROLES = """
cluster:
  gpu_pools:
    encoder-pool: {device: gpu-24gb}
    prefill-pool: {device: gpu-40gb, role: prefill}
    decode-pool:  {device: gpu-40gb, role: decode}
model:
  modules:
    vision_encoder: {pool: encoder-pool}
    llm_backbone: [{pool: prefill-pool}, {pool: decode-pool}]
"""


def ask_driver(*flags):
    """What nvidia-smi says, line by line; nothing where it is missing."""
    try:
        done = subprocess.run(["nvidia-smi", *flags], capture_output=True, text=True, timeout=60)
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


GPUS = [re.search(r"UUID: ([\w-]+)", line).group(1) for line in ask_driver("--list-gpus")]


def need_gpus(count):
    return unittest.skipIf(len(GPUS) < count, f"{count} GPU{'s are' if count > 1 else ' is'} needed; this machine has {len(GPUS)}")


class OnGpus(Compared, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        pictures = [data_uri(png(64 + 28 * i, 64, (40 * i, 200, 30))) for i in range(4)]
        cls.asked = {"picture": ask("what is in the picture?", data_uri(png())), "pictures": ask("what is in them?", *pictures), "text": ask("what is it?")}
        with Server("--dtype", "float32", "--device", "cuda", *SMALL) as one:
            cls.want = {name: Answer(one, messages, **LONG).read_all() for name, messages in cls.asked.items()}

    def assert_answers(self, server):
        for name, messages in self.asked.items():
            with self.subTest(name):
                self.assert_same(Answer(server, messages, **LONG).read_all(), self.want[name])
        together = [(name, Waiting(server, messages, **LONG)) for _ in range(4) for name, messages in self.asked.items()]
        for name, answer in together:
            with self.subTest(name, beside="others"):
                self.assert_same(answer.result(), self.want[name])

    def assert_on_gpus_of_their_own(self, server, numbers):
        """`numbers`: by pool, of the machine's GPUs."""
        pids = {pool: pid for pool, pid in server.instances().values()}
        seen = dict(map(str.strip, line.split(",")) for line in ask_driver("--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"))
        if seen:  # a container's driver may not tell of processes
            self.assertEqual({pool: seen.get(str(pids[pool])) for pool in numbers}, {pool: GPUS[number] for pool, number in numbers.items()})
        told = {instance["pool"]: instance["device"] for instance in server.status()["instances"] if instance["pool"] in numbers}
        self.assertEqual(told, {pool: f"cuda:{number}" for pool, number in numbers.items()})


@need_gpus(1)
class Instances(OnGpus):
    def test_the_llm_on_a_gpu_and_the_encoder_on_the_cpu(self):
        for visible in (None, "0", GPUS[0]):
            with self.subTest(visible=visible), shown(visible), Pools(APART, *SMALL, devices="gpu-24gb=cpu") as server:
                self.assert_answers(server)
                self.assert_on_gpus_of_their_own(server, {"llm-pool": 0})

    def refusal(self, *flags):
        run = subprocess.run([PARVL, "serve", "--model", MODEL, "--port", "0", *flags], capture_output=True, text=True, timeout=120)
        self.assertEqual((run.returncode, run.stdout), (2, ""), run.stderr)
        return run.stderr

    def test_more_than_there_are_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "allocation.yaml"
            path.write_text(APART.replace("replicas: 1", f"replicas: {len(GPUS)}"))
            self.assertIn(f"the pools need {len(GPUS) + 1} GPUs (encoder-pool 1 × 1, llm-pool {len(GPUS)} × 1), and this machine has {len(GPUS)};",
                          self.refusal("--config", path))
        if len(GPUS) < 16:
            self.assertIn(f"--tensor-parallel-size 4 and --pipeline-parallel-size 4 need 16 GPUs, and this machine has {len(GPUS)};",
                          self.refusal("--device", "cuda", "-tp", "4", "-pp", "4"))


@need_gpus(2)
class TwoGpus(OnGpus):
    def test_engines_that_are_cut_answer_like_one_gpu(self):
        """Each rank of a tensor-parallel group encodes other pictures."""
        for flag in ("-tp", "-pp"):
            with self.subTest(flag), Server("--dtype", "float32", "--device", "cuda", *SMALL, flag, "2") as server:
                self.assert_answers(server)

    def test_each_instance_has_a_gpu_of_its_own(self):
        with Pools(APART, *SMALL, devices="") as server:
            self.assert_answers(server)
            self.assert_on_gpus_of_their_own(server, {"encoder-pool": 0, "llm-pool": 1})

    def test_keys_and_values_go_from_one_gpu_to_the_other(self):
        with Pools(ROLES, *SMALL, devices="gpu-24gb=cpu") as server:
            self.assert_answers(server)
            self.assert_on_gpus_of_their_own(server, {"prefill-pool": 0, "decode-pool": 1})
            self.assertGreater(server.figure("parvl_kv_handovers_total", 'outcome="fetched"'), 0)


def shown(visible):
    return unittest.mock.patch.dict(os.environ, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
