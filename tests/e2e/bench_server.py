"""`parvl bench` against `parvl serve`, one that is killed, and nobody; and what its command line refuses."""
# slow
import json
import pathlib
import socket
import subprocess
import tempfile
import unittest

from bench_common import LIMIT_S, bench, command, wait_progress
from serve_common import PARVL, Server, need_model


class AgainstServer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.server = Server("--max-queue", "256", "--api-key", "secret")
        cls.addClassCleanup(cls.server.stop)

    def bench(self, *flags, code=0):
        return bench(self.server.url, "--api-key", "secret", *flags, code=code)

    def test_counts_and_tokens(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "out.jsonl")
            report, _ = self.bench("--synthetic", "images=1x32x32,text=40,output=6", "--rate", 40, "--requests", 30, "--out", out)
            records = [json.loads(line) for line in out.read_text().splitlines()]
        self.assertEqual((report["requests"]["sent"], report["requests"]["completed"]), (30, 30))
        self.assertEqual(report["tokens"]["output"], 30 * 6)
        self.assertEqual(sum(record["output_tokens"] for record in records), 30 * 6)
        self.assertEqual(sum(record["prompt_tokens"] for record in records), report["tokens"]["prompt"])
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            figures = report[name]
            self.assertTrue(0 < figures["p50"] <= figures["p90"] <= figures["p95"] <= figures["p99"], report)
        self.assertGreater(report["e2e_ms"]["mean"], report["ttft_ms"]["mean"])

    def test_how_busy_the_server_was(self):
        report, _ = self.bench("--synthetic", "images=1x64x64,text=20,output=8", "--concurrency", 2, "--requests", 20)
        server = report["server"]
        self.assertEqual(set(server["busy"]), {"colocated/llm_backbone", "colocated/vision_encoder"})
        for share in server["busy"].values():
            self.assertTrue(0 < share <= 1, server)
        self.assertTrue(0 < server["gateway_overhead_ms"]["p50"] <= server["gateway_overhead_ms"]["p99"], server)

    def test_texts_have_about_the_asked_length(self):
        means = {}
        for tokens in (100, 300):
            report, _ = self.bench("--synthetic", f"text={tokens},output=1", "--concurrency", 4, "--requests", 8)
            means[tokens] = report["tokens"]["prompt"] / 8
        self.assertAlmostEqual(means[300] - means[100], 200, delta=20)

    def test_a_table_for_people(self):
        done = subprocess.run(command(self.server.url, "--api-key", "secret", "--synthetic", "text=9,output=3", "--concurrency", 2, "--requests", 4,
                                      "--slo-ttft-ms", 100_000, "--slo-tpot-ms", 100_000), capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual(done.returncode, 0, done)
        self.assertIn("requests   4 sent, 4 completed, 0 failed", done.stdout)
        self.assertIn("output 12 of 12 asked for", done.stdout)
        self.assertIn("violations 0.0 %", done.stdout)
        self.assertRegex(done.stdout, r"(?m)^server     busy: colocated/llm_backbone \d+\.\d %, .* p50 \d+\.\d\d ms")
        for row in ("TTFT", "TPOT", "ITL", "e2e"):
            self.assertRegex(done.stdout, rf"(?m)^{row}( +\d+\.\d\d){{5}}$")

    def test_a_wrong_key(self):
        done = subprocess.run(command(self.server.url, "--api-key", "wrong", "--synthetic", "text=9,output=3", "--concurrency", 1),
                              capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("the server answers /v1/models with HTTP 401: ", done.stderr.splitlines()[-1])


class ServerThatDies(unittest.TestCase):
    def test_it_is_killed_within_the_test(self):
        need_model()
        with tempfile.TemporaryDirectory() as folder, Server() as server:
            trace = pathlib.Path(folder, "t.jsonl")  # short ones first; then some that outlive the server
            lengths = [1] * 4 + [900] * 300
            trace.write_text("".join(json.dumps({"t": 0, "text_tokens": 4, "output_tokens": n}) + "\n" for n in lengths))
            run = subprocess.Popen(command(server.url, "--json", "--trace", trace, "--concurrency", 2), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
            wait_progress(run, lambda counts: counts["completed"] >= 4)
            server.process.kill()
            out, errors = run.communicate(timeout=LIMIT_S)
        report = json.loads(out)
        self.assertEqual(run.returncode, 0, errors)
        self.assertEqual(report["requests"]["completed"] + report["requests"]["failed"], 304)
        self.assertGreater(report["requests"]["failed"], 0)
        reasons = {f["reason"] for f in report["requests"]["failures"]}
        self.assertTrue(reasons <= {"connect", "connection lost"}, reasons)

    def test_nobody_listens(self):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else's
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            done = subprocess.run(command(url, "--synthetic", "text=9,output=3", "--concurrency", 1), capture_output=True, text=True, timeout=LIMIT_S)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertEqual(done.stderr, "parvl: the server of --target does not answer: Connection refused\n")
            report, last = bench(url, "--synthetic", "images=1x8x8,output=3", "--rate", 100, "--requests", 3, "--model", "m", code=1)
        self.assertEqual((report["requests"]["completed"], report["requests"]["failed"]), (0, 3))
        self.assertEqual(last, "parvl: no request completed; 3 failed with connect: Connection refused")


class Usage(unittest.TestCase):
    def refused(self, *flags):
        done = subprocess.run([PARVL, "bench", *map(str, flags)], capture_output=True, text=True, timeout=LIMIT_S)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done)
        return done.stderr.splitlines()[-1].removeprefix("parvl: ")

    def test_refusals(self):
        url = ("--target", "http://127.0.0.1:1")
        one = (*url, "--synthetic", "text=1,output=1")
        for flags, says in (((), "--target is missing"), (url, "give either --trace or --synthetic"),
                            ((*one, "--trace", "t"), "give either --trace or --synthetic"),
                            (one, "--synthetic does not say when requests come; add --rate or --concurrency"),
                            ((*one, "--rate", 1, "--concurrency", 1), "leave one of them out"),
                            ((*one, "--rate", -1), "--rate must be above 0"),
                            ((*one, "--concurrency", -1), "--concurrency must be between 1 and 1000000, found -1"),
                            ((*one, "--rate", 1, "--repeat-images", 2), "--repeat-images is a share between 0 and 1"),
                            ((*one, "--rate", 1, "--timeout", 0), "--timeout must be between"),
                            ((*one, "--rate", 1, "--api-key", "a\nb"), "--api-key may hold only visible ASCII characters"),
                            ((*url, "--synthetic", "text=1", "--rate", 1), "--synthetic: the number of output tokens must be between"),
                            ((*url, "--trace", "/nowhere/t.jsonl"), "/nowhere/t.jsonl"),
                            (("--target", "127.0.0.1:8000", "--synthetic", "text=1,output=1", "--rate", 1), "must be like http://127.0.0.1:8000"),
                            (("--config", "a", "--against", "b", "--model", "m"), "comparing two configurations is not available yet")):
            with self.subTest(flags):
                self.assertIn(says, self.refused(*flags))

    def test_a_trace_with_a_wrong_line(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder, "t.jsonl")
            trace.write_text('{"t": 0, "text_tokens": 1, "output_tokens": 1}\n{"t": 0, "audio_s": [2], "output_tokens": 1}\n')
            target = ("--target", "http://127.0.0.1:1")
            self.assertEqual(self.refused(*target, "--trace", trace), f"{trace} line 2: audio in a trace is not available yet")
            trace.write_text('{"t": 0, "text_tokens": 1, "output_tokens": 1}\n')
            self.assertIn("--requests 5 is more than the 1 times in", self.refused(*target, "--trace", trace, "--requests", 5))


if __name__ == "__main__":
    unittest.main()
