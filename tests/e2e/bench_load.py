"""`parvl bench` against a server that does what the test says: what is sent and when, and what counts as failed."""
# slow
import json
import pathlib
import signal
import subprocess
import tempfile
import threading
import unittest

from bench_common import LIMIT_S, Fake, answer_all, bench, command, text_chunk, wait_progress


def words(request):
    return len(request["messages"][0]["content"][-1]["text"].split())


class AgainstFake(unittest.TestCase):
    def test_what_is_sent(self):
        with Fake(answer_all) as server:
            report, _ = bench(server.url, "--synthetic", "images=1x20x10,text=60,output=4", "--rate", 1000, "--requests", 5)
        self.assertEqual(report["requests"]["completed"], 5)
        self.assertEqual(report["tokens"], {"prompt": 25, "output": 20, "output_asked": 20})
        self.assertEqual((report["model"], report["loop"], report["tokens_per_word"]), ("fake", "open", 3))
        self.assertEqual([words(request) for request in server.requests], [20] * 5)
        for request in server.requests:
            self.assertEqual((request["model"], request["max_tokens"], request["ignore_eos"], request["stream"]), ("fake", 4, True, True))
            self.assertEqual(request["stream_options"], {"include_usage": True})
        self.assertEqual(len({json.dumps(request["messages"]) for request in server.requests}), 5)

    def test_words_are_counted_without_tokenize(self):
        def answer(handler, number, request):
            if number >= 2:  # after the two probes
                return handler.whole_answer(request)
            self.assertEqual(request["max_tokens"], 1)
            handler.whole_answer(request, 50 + 4 * len(request["messages"][0]["content"].split()))
        with Fake(answer, has_tokenize=False) as server:
            report, _ = bench(server.url, "--synthetic", "text=60,output=4", "--rate", 1000, "--requests", 5)
        self.assertEqual((report["tokens_per_word"], report["requests"]["sent"], len(server.requests)), (4, 5, 7))
        self.assertEqual([words(request) for request in server.requests[2:]], [15] * 5)

    def test_a_slow_server_does_not_delay_sending(self):
        def answer(handler, number, request):
            handler.server.wait_requests(60)  # nothing is answered before everything is here
            handler.whole_answer(request)
        with Fake(answer) as server:
            report, _ = bench(server.url, "--synthetic", "text=9,output=2", "--rate", 500, "--requests", 60, "--timeout", LIMIT_S)
        self.assertEqual((report["requests"]["completed"], report["requests"]["failed"]), (60, 0))
        self.assertEqual(server.most_under_way, 60)
        self.assertIsNotNone(report["send_lateness_ms"]["p99"])

    def test_a_closed_loop_keeps_its_number(self):
        def answer(handler, number, request):
            handler.server.wait_requests(3)  # so that the three are seen together
            handler.whole_answer(request)
        with Fake(answer) as server:
            report, _ = bench(server.url, "--synthetic", "text=9,output=2", "--concurrency", 3, "--requests", 12)
        self.assertEqual(report["requests"]["completed"], 12)
        self.assertEqual(server.most_under_way, 3)
        self.assertEqual((report["loop"], report["send_lateness_ms"]), ("closed", None))
        self.assertLessEqual(server.connections, 4)  # kept and used again, whatever was asked before the test

    def test_times_of_a_trace(self):
        lines = [{"t": t, "text_tokens": 6, "output_tokens": n} for t, n in ((0.3, 3), (0, 1), (0.15, 2))]
        with tempfile.TemporaryDirectory() as folder, Fake(answer_all) as server:
            trace, out = pathlib.Path(folder, "t.jsonl"), pathlib.Path(folder, "out.jsonl")
            trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
            report, _ = bench(server.url, "--trace", trace, "--out", out)
            records = [json.loads(line) for line in out.read_text().splitlines()]
        self.assertEqual(report["requests"]["completed"], 3)
        self.assertEqual([record["due_s"] for record in records], [0, 0.15, 0.3])
        self.assertEqual([record["output_tokens"] for record in records], [1, 2, 3])
        for record in records:
            self.assertGreaterEqual(record["sent_s"], record["due_s"])  # never early
        self.assertIsNone(records[0]["tpot_ms"])

    def test_real_messages(self):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        with tempfile.TemporaryDirectory() as folder, Fake(answer_all) as server:
            trace = pathlib.Path(folder, "t.jsonl")
            trace.write_text(json.dumps({"t": 0, "messages": messages, "output_tokens": 2}) + "\n")
            report, _ = bench(server.url, "--trace", trace, "--model", "other", "--requests", 4, "--concurrency", 2)
        self.assertEqual(report["requests"]["completed"], 4)
        self.assertTrue(all(request["messages"] == messages and request["model"] == "other" for request in server.requests))

    def test_an_answer_that_ends_with_its_connection(self):
        def answer(handler, number, request):
            handler.send_response(200)
            handler.send_header("Connection", "close")
            handler.end_headers()
            usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
            events = [text_chunk("a"), text_chunk("b"), usage] + (["[DONE]"] if number != 1 else [])
            for event in events:
                handler.wfile.write(f"data: {event if event == '[DONE]' else json.dumps(event)}\n\n".encode())
            handler.server.end()
        with Fake(answer) as server:
            report, _ = bench(server.url, "--synthetic", "text=9,output=2", "--concurrency", 1, "--requests", 4)
        self.assertEqual((report["requests"]["completed"], report["tokens"]["prompt"]), (3, 21))
        self.assertEqual([(f["reason"], f["count"]) for f in report["requests"]["failures"]], [("cut stream", 1)])

    def test_failures_by_reason(self):
        def answer(handler, number, request):
            if number % 5 == 0:
                return handler.whole_answer(request)
            if number % 5 == 1:
                return handler.reply(429, {"error": {"message": "the queue is full"}})
            handler.begin_stream()
            handler.send_event(text_chunk("quick"))
            if number % 5 == 2:
                handler.cut()
            elif number % 5 == 3:
                handler.send_event({"error": {"message": "out of memory"}})
                handler.cut()
            else:  # a stream that ends as if all were well
                handler.wfile.write(b"0\r\n\r\n")
        with Fake(answer) as server:
            report, _ = bench(server.url, "--synthetic", "text=9,output=2", "--concurrency", 1, "--requests", 20,
                              "--slo-ttft-ms", 60_000)
        self.assertEqual((report["requests"]["completed"], report["requests"]["failed"]), (4, 16))
        failures = {f["reason"]: (f["count"], f["example"]) for f in report["requests"]["failures"]}
        self.assertEqual(failures["HTTP 429"], (4, "the queue is full"))
        self.assertEqual(failures["error in the stream"], (4, "out of memory"))
        self.assertEqual(failures["connection lost"][0], 4)
        self.assertEqual(failures["cut stream"], (4, "the answer ended without [DONE]"))
        self.assertEqual(report["tokens"]["output"], 8)  # what failed counts for nothing
        self.assertAlmostEqual(report["violation_rate"], 0.8)

    def test_a_request_over_its_time(self):
        release = threading.Event()

        def answer(handler, number, request):
            if number == 0:
                return handler.whole_answer(request)
            release.wait(LIMIT_S)
        with Fake(answer) as server:
            report, _ = bench(server.url, "--synthetic", "text=9,output=2", "--concurrency", 1, "--requests", 2, "--timeout", 3)
            release.set()
        self.assertEqual([(f["reason"], f["count"]) for f in report["requests"]["failures"]], [("timeout", 1)])

    def test_the_limit_of_open_streams(self):
        release = threading.Event()

        def answer(handler, number, request):
            release.wait(LIMIT_S)
            handler.whole_answer(request)
        with Fake(answer) as server:
            run = subprocess.Popen(command(server.url, "--json", "--synthetic", "text=9,output=2", "--rate", 1000, "--requests", 9,
                                           "--max-open", 4, "--model", "m"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait_progress(run, lambda counts: counts["failed"] == 5)
            release.set()
            out, errors = run.communicate(timeout=LIMIT_S)
        report = json.loads(out)
        self.assertEqual((run.returncode, report["requests"]["sent"], report["requests"]["completed"]), (0, 4, 4), errors)
        self.assertEqual([(f["reason"], f["count"]) for f in report["requests"]["failures"]], [("too many open", 5)])

    def test_interruption(self):
        held = threading.Event()

        def answer(handler, number, request):
            if number >= 4:
                held.wait(LIMIT_S)
            handler.whole_answer(request)
        with Fake(answer) as server:
            run = subprocess.Popen(command(server.url, "--json", "--synthetic", "text=9,output=2", "--concurrency", 2, "--requests", 50),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            server.wait_requests(6)  # four were answered, two are held
            run.send_signal(signal.SIGINT)
            out, errors = run.communicate(timeout=LIMIT_S)
            held.set()
        report = json.loads(out)
        self.assertEqual(run.returncode, 0, errors)
        counts = {key: report["requests"][key] for key in ("sent", "completed", "failed", "unfinished")}
        self.assertEqual(counts, {"sent": 6, "completed": 4, "failed": 0, "unfinished": 2})


if __name__ == "__main__":
    unittest.main()
