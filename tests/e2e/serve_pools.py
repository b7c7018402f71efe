"""Instances in processes of their own: what they answer, and what becomes of requests when one dies, stops or hangs."""
# slow
import ctypes
import os
import pathlib
import random
import re
import shutil
import signal
import tempfile
import threading
import time
import unittest
import urllib.request

from pools_common import KINDS, LONG, POOLS, REPLICAS, SMALL, Answer, Compared, KilledForGood, Pools, Refused, Waiting, check_replay
from serve_common import MODEL, Server, ask, data_uri, need_model, png


def hang_busiest_thread(pid):
    """Stops the one thread of the process that has computed most, until the process is killed; its number, or None where that is not allowed."""
    seize, interrupt = 0x4206, 0x4207  # PTRACE_*
    folder = pathlib.Path(f"/proc/{pid}/task")
    def ticks(task):
        return int((task / "stat").read_text().rsplit(")", 1)[1].split()[11])
    thread = int(max(folder.iterdir(), key=ticks).name)
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return thread if ptrace(seize, thread, None, None) == 0 and ptrace(interrupt, thread, None, None) == 0 else None


class SeparatePools(Compared, unittest.TestCase):
    """Two encode instances and three that generate."""

    @classmethod
    def setUpClass(cls):
        need_model()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.record = pathlib.Path(cls.folder.name) / "record"
        cls.addClassCleanup(cls.check_record)
        cls.server = Pools(POOLS, *SMALL, "--record", str(cls.record))
        cls.addClassCleanup(cls.server.stop)
        with Server("--dtype", "float32") as one:
            cls.picture = ask("what is in the picture?", data_uri(png()))
            cls.want = {name: Answer(one, cls.picture, **fields).read_all() for name, fields in KINDS.items()}

    def setUp(self):
        self.server.wait_all_ready()

    @classmethod
    def check_record(cls):
        """Whatever these tests did to it: the same events give the same decisions again."""
        check_replay(cls.record, 50)

    def test_answers_are_those_of_one_process(self):
        for name, want in self.want.items():
            with self.subTest(name):
                got = Answer(self.server, self.picture, **KINDS[name]).read_all()
                self.assert_same(got, want)
                self.assertIn("of encoder-pool", got.usage["ran_on"]["vision_encoder"])
                self.assertIn("of llm-pool", got.usage["ran_on"]["llm_backbone"])

    def test_modules_lie_in_processes_of_their_own(self):
        modules = self.server.request("GET", "/v1/models")[2]["data"][0]["parvl"]["modules"]
        self.assertEqual(modules, {"vision_encoder": "encoder-pool (2 instances on cpu)", "projector": "encoder-pool (2 instances on cpu)",
                                   "llm_backbone": "llm-pool (3 instances on cpu)"})
        log = "".join(self.server.errors)
        self.assertEqual(log.count("weights of the encoder:"), log.count("of encoder-pool (process"), log)
        self.assertEqual(log.count("KV memory:"), log.count("of llm-pool (process"), log)

    def moved_answer(self, kind, tokens, sign):
        """Its text so far is read, then the process that generates gets `sign`; nobody else has the prompt's prefix, so it is known."""
        holder = Answer(self.server, self.picture, **{**LONG, "max_tokens": 1}).read_all().usage["ran_on"]["llm_backbone"]
        number = int(re.search(r"instance (\d+)", holder).group(1))
        answer = Answer(self.server, self.picture, **KINDS[kind]).read_until(tokens)
        os.kill(self.server.instances()[number][1], sign)
        return number, answer.read_all()

    def test_instances_of_a_pool_map_the_same_weights_and_so_does_one_that_is_started_again(self):
        def weights():
            maps = {}
            for _, (pool, pid) in self.server.instances().items():
                lines = [line.split() for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:parvl-weights" in line]
                self.assertTrue(lines, pool)
                self.assertEqual({line[1] for line in lines}, {"r--s"})
                maps.setdefault(pool, set()).update(line[4] for line in lines)
            self.assertEqual([len(blocks) for blocks in maps.values()], [1, 1])
            return maps
        before = weights()
        self.assertNotEqual(*before.values())
        _, (_, pid) = next(one for one in self.server.instances().items() if one[1][0] == "llm-pool")
        os.kill(pid, signal.SIGKILL)
        self.server.wait_for(lambda: pid not in [process for _, process in self.server.instances().values()])
        self.server.wait_all_ready()
        self.assertEqual(weights(), before)
        self.assertEqual("".join(self.server.errors).count("in memory that other instances map too"), 2)

    def test_an_answer_goes_on_elsewhere_when_its_process_is_killed(self):
        for kind, want in self.want.items():
            for tokens in (1, 7, 16, 33):
                with self.subTest(kind, tokens=tokens):
                    number, got = self.moved_answer(kind, tokens, signal.SIGKILL)
                    self.assert_same(got, want)
                    self.assertRegex(got.usage["ran_on"]["llm_backbone"], rf"^instance {number}, then \d of llm-pool$")
                    self.server.wait_for(lambda: self.server.ready_in("llm-pool") >= 2)

    def test_an_answer_goes_on_elsewhere_when_its_process_is_stopped(self):
        number, got = self.moved_answer("sampled", 5, signal.SIGSTOP)
        self.assert_same(got, self.want["sampled"])
        self.assertRegex(got.usage["ran_on"]["llm_backbone"], rf"^instance {number}, then \d of llm-pool$")
        self.server.wait_all_ready()

    def test_a_step_that_hangs_is_found_although_its_process_speaks(self):
        holder = Answer(self.server, self.picture, **{**LONG, "max_tokens": 200}).read_all().usage["ran_on"]["llm_backbone"]
        number = int(re.search(r"instance (\d+)", holder).group(1))
        fields = {**LONG, "max_tokens": 800}
        want = Answer(self.server, self.picture, **fields).read_all()
        answer = Answer(self.server, self.picture, **fields).read_until(5)
        thread = hang_busiest_thread(self.server.instances()[number][1])
        got = answer.read_all()
        if thread is None:
            self.skipTest("a thread of another process cannot be stopped here (ptrace is not allowed)")
        all_threads = 0x40000000  # __WALL
        while os.WIFSTOPPED(os.waitpid(thread, all_threads)[1]):
            pass  # whoever holds a thread must hear of its end, or its process stays
        self.assert_same(got, want)
        self.assertRegex(got.usage["ran_on"]["llm_backbone"], rf"^instance {number}, then \d of llm-pool$")
        self.assertIn(f"instance {number} of llm-pool failed (a step took too long)", "".join(self.server.errors))
        self.server.wait_all_ready()

    def test_an_image_is_encoded_elsewhere_when_its_encoder_is_stopped(self):
        fresh = data_uri(png(color=(1, 2, 3)))
        with Server("--dtype", "float32") as one:
            want = Answer(one, ask("what is it?", fresh), **LONG).read_all()
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            with self.subTest(sign=sign):
                fresh = data_uri(png(color=(1, 2, 3)) + sign.name.encode())  # what follows the picture makes it another file
                encoders = {number: pid for number, (pool, pid) in self.server.instances().items() if pool == "encoder-pool"}
                for pid in encoders.values():
                    os.kill(pid, signal.SIGSTOP)
                answer = Waiting(self.server, ask("what is it?", fresh), **LONG)
                self.server.wait_for(lambda: self.server.figure("vllm:num_requests_running") >= 1)
                first = min(encoders)
                if sign == signal.SIGKILL:
                    os.kill(encoders[first], signal.SIGKILL)
                for number, pid in encoders.items():
                    if number != first:
                        os.kill(pid, signal.SIGCONT)
                self.assert_same(answer.result(), want)
                self.server.wait_all_ready()

    def test_text_goes_on_while_every_encoder_is_dead(self):
        encoders = [pid for pool, pid in self.server.instances().values() if pool == "encoder-pool"]
        for pid in encoders:
            os.kill(pid, signal.SIGSTOP)
        text = Answer(self.server, [{"role": "user", "content": "what color is it?"}], **LONG).read_all()
        self.assertEqual((text.error, len(text.tokens)), (None, 48))
        self.assertNotIn("vision_encoder", text.usage["ran_on"])
        for pid in encoders:
            os.kill(pid, signal.SIGKILL)
        self.server.wait_for(lambda: self.server.request("GET", "/readyz")[0] == 503)
        self.assertIn("pool encoder-pool has no instance that is ready", self.server.request("GET", "/readyz")[2]["error"]["message"])
        # An image waits for the first encoder that comes back.
        self.assert_same(Answer(self.server, self.picture, **LONG).read_all(), self.want["sampled"])
        self.server.wait_all_ready()

    def kill_some(self, rng, clients):
        """Of what computes for the clients, twelve processes one after the other: one of a pool that has another, and the next when
        that is known, since what nobody is left for may be refused."""
        server, killed = self.server, 0
        while any(thread.is_alive() for thread in clients) and killed < 12:
            decoder = killed % 3 == 2
            targets = server.decoders() if decoder else [one for one in server.instances().values() if server.ready_in(one[0]) > 1]
            if not targets:
                clients[0].join(0.5)
                continue
            pool, target = rng.choice(targets)
            failed = lambda: "".join(server.errors).count(f" of {pool} failed (")
            before = failed()
            try:
                os.kill(target, signal.SIGKILL if decoder else rng.choice([signal.SIGKILL, signal.SIGSTOP]))
                killed += 1
                if not decoder:
                    server.wait_for(lambda: failed() > before)
            except ProcessLookupError:
                pass  # it waits to be started again
            clients[0].join(0.5)
        return killed

    def test_nothing_is_left_of_many_requests_among_kills(self):
        server, rng = self.server, random.Random(7)
        pictures = [data_uri(png(color=(i, 40, 90))) for i in range(12)]
        for at in range(0, 12, 4):  # so that what is made once has been made
            Answer(server, ask("what?", *pictures[at:at + 4]), **LONG).read_all()
        before, memory, files = server.descriptors(), server.memory(), set(os.listdir("/dev/shm"))
        ended, lock, encoders_gone = [], threading.Lock(), threading.Event()
        numbers = iter(range(300))

        def client():
            while True:
                with lock:
                    number = next(numbers, None)
                    seed = rng.random()
                if number is None:
                    return
                if number >= 200:
                    encoders_gone.wait()
                fields = {**LONG, "max_tokens": 20 + number % 40, "logprobs": False, "top_logprobs": 0}
                messages = ask(f"question {number}?", *pictures[number % 12:number % 12 + number % 3])
                try:
                    answer = Answer(server, messages, **fields)
                except Refused as refusal:
                    with lock:
                        ended.append(f"refused {refusal}")
                    continue
                if seed < 0.15:
                    answer.read_until(1)
                    answer.connection.close()
                    outcome = "left"
                else:
                    answer.read_all()
                    outcome = "done" if answer.done else f"error {answer.error}"
                with lock:
                    ended.append(outcome)

        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        killed = self.kill_some(rng, clients)
        server.wait_for(lambda: server.ready_in("llm-pool") > 1)
        with KilledForGood(server, "encoder-pool"):
            encoders_gone.set()
            for thread in clients:
                thread.join()
        self.assertIn("encodes, too", "".join(server.errors))
        self.assertEqual(len(ended), 300)
        self.assertGreater(killed, 3)
        self.assertEqual([outcome for outcome in ended if outcome.startswith("error")], [])
        # A picture that was in the hands of a decoder that was killed, or came while nobody could encode it.
        refused = [outcome for outcome in ended if outcome.startswith("refused")]
        self.assertEqual([outcome for outcome in refused if not re.match("refused 503 .*(killed from outside|no instance can take it)", outcome)], [])
        self.assertLess(len(refused), 30, refused[:3])
        server.wait_all_ready()
        server.wait_for(lambda: server.figure("vllm:num_requests_running") == 0 and server.figure("vllm:num_requests_waiting") == 0)
        # Shared memory is kept for the next images: as much as was in use at once.
        server.wait_for(lambda: server.descriptors()[1] <= before[1] + 4)
        self.assertLess(server.descriptors()[0], 64)
        server.wait_for(lambda: set(os.listdir("/dev/shm")) <= files)
        self.assertLess(server.memory(), memory + (24 << 20))
        self.assertEqual(Answer(server, self.picture, **LONG).read_all().text, self.want["sampled"].text)


class Replicas(unittest.TestCase):
    """Instances that hold every module."""

    def test_answers_and_the_end(self):
        need_model()
        picture = ask("what is in the picture?", data_uri(png()))
        with Server("--dtype", "float32") as one:
            want = Answer(one, picture, **LONG).read_all()
        server = Pools(REPLICAS, *SMALL)
        try:
            got = Answer(server, picture, **LONG).read_all()
            self.assertEqual((got.text, got.done), (want.text, True))
            pids = [pid for _, pid in server.instances().values()]
            self.assertEqual(len(pids), 2)
        finally:
            self.assertEqual(server.stop(), 0)
        for pid in pids:
            self.assertFalse(pathlib.Path(f"/proc/{pid}").exists(), "an instance outlives its gateway")

    def test_the_queues_are_those_of_the_allocation(self):
        server = Pools(REPLICAS.replace("replicas: 2", "replicas: 1") + "queues: {text: {limit: 1}, image: {limit: 0}}\n", *SMALL, "--max-num-seqs", "1")
        with server:
            text = [{"role": "user", "content": "what color is it?"}]
            long = {**LONG, "max_tokens": 900, "logprobs": False, "top_logprobs": 0}
            running = [Answer(server, text, **long) for _ in range(2)]  # the second one is made ready beside the first
            waiting = Waiting(server, text, **{**long, "max_tokens": 1})
            server.wait_for(lambda: server.figure("parvl_queue_requests") >= 1)
            status, headers, body = server.chat(messages=text, max_tokens=1)
            self.assertEqual((status, body["error"]["message"]), (429, "the queue is full: 1 text request waits (queues.text.limit)"))
            self.assertGreaterEqual(int(headers["Retry-After"]), 1)
            status, _, body = server.chat(messages=ask("what?", data_uri(png())), max_tokens=1)
            self.assertEqual((status, body["error"]["message"]), (429, "the queue is full: 0 image requests wait (queues.image.limit)"))
            for answer in running:
                self.assertTrue(answer.read_all().done)
            self.assertTrue(waiting.result().done)

    def test_who_waits_hears_at_once_that_the_last_llm_instance_is_drained(self):
        with Pools(REPLICAS.replace("replicas: 2", "replicas: 1"), *SMALL, "--max-num-seqs", "1") as server:
            text = [{"role": "user", "content": "what color is it?"}]
            long = {**LONG, "max_tokens": 900, "logprobs": False, "top_logprobs": 0}
            running = Answer(server, text, **long, n=6)  # one after the other
            waiting = [Waiting(server, text, **long) for _ in range(4)]
            server.wait_for(lambda: server.figure("parvl_queue_requests") >= 4)
            drain = urllib.request.Request(server.ready_line.split()[4] + "/drain?instance=0", method="POST")
            urllib.request.urlopen(drain, timeout=30).close()
            for one in waiting:
                with self.assertRaisesRegex(Refused, r"503 .*no_healthy_instance.*no instance can take it \(llm-pool: instance 0 is (draining|gone)\)"):
                    one.result()
            self.assertTrue(running.read_all().done)
            self.assertEqual(server.stop(), 0)

    def test_an_instance_that_is_started_again_refuses_other_weights(self):
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model"
            shutil.copytree(MODEL, model)
            with Pools(REPLICAS.replace("replicas: 2", "replicas: 1"), *SMALL, model=model) as server:
                weights = max(model.glob("*.safetensors"), key=lambda file: file.stat().st_size)
                shutil.copy2(weights, folder + "/new")
                os.rename(folder + "/new", weights)
                os.kill(server.instances()[0][1], signal.SIGKILL)
                why = f"the files of {model} have changed since the server started"
                server.wait_for(lambda: why in server.status()["instances"][0]["reason"])
                self.assertRegex("".join(server.errors), f"instance 0 of llm-pool failed \\({why}, .*; restart the server\\)")
                status, _, body = server.chat(messages=[{"role": "user", "content": "what color is it?"}], max_tokens=1)
                self.assertEqual((status, body["error"]["code"]), (503, "no_healthy_instance"))
                self.assertIn(why, body["error"]["message"])

    def test_instances_end_with_a_gateway_that_is_killed(self):
        server = Pools(REPLICAS, *SMALL)
        pids = [pid for _, pid in server.instances().values()]
        server.process.kill()
        server.stop()
        end = time.monotonic() + 10
        while time.monotonic() < end and any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.05)
        self.assertEqual([pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()], [])

    def test_an_instance_that_cannot_start_ends_the_server_with_its_reason(self):
        with self.assertRaisesRegex(AssertionError, r"instance \d of llm-pool cannot start: .*--kv-cache-memory-bytes"):
            Pools(REPLICAS, "--kv-cache-memory-bytes", "1000")


class Slo(unittest.TestCase):
    def test_the_slo_bounds_the_steps_that_answers_wait_for(self):
        """Beside an answer a prompt goes in pieces where no step is quick enough, and in one step where nothing is asked of it."""
        need_model()
        steps = []
        for slo in ("", "slo: {tpot_ms: 0.001}\n"):
            with Pools(REPLICAS.replace("replicas: 2", "replicas: 1") + slo, *SMALL) as server:
                answer = Answer(server, ask("count"), max_tokens=800, ignore_eos=True, logprobs=True).read_until(1)
                other = Answer(server, ask("red square " * 40), max_tokens=1).read_all()
                self.assertEqual(len(answer.read_all().tokens), 800)
                steps.append(server.figure("parvl_work_total", 'work="prefill"'))
        self.assertLessEqual(steps[0], 3)  # of the warm-up and of both prompts
        self.assertGreaterEqual(steps[1], (other.usage["prompt_tokens"] - 32) // 16)  # the first blocks are those of the answer's prompt
        self.assertGreater(steps[1], steps[0])


if __name__ == "__main__":
    unittest.main()
