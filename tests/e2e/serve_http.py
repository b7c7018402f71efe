"""A running server under requests that go wrong: the error table, limits, disconnects, shutting down."""
# slow
import base64
import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

from serve_common import MODEL, PARVL, Server, ask, data_uri, need_model, png

QUESTION = "what color is the shape?"
LONG = {"ignore_eos": True, "max_tokens": 100_000}  # as long as the context goes


class ErrorTable(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.allowed = pathlib.Path(cls.folder.name).resolve() / "pictures"
        cls.allowed.mkdir()
        (cls.allowed / "red.png").write_bytes(png())
        (cls.allowed.parent / "secret.png").write_bytes(png())
        (cls.allowed / "link.png").symlink_to("../secret.png")
        cls.server = Server("--allowed-local-media-path", str(cls.allowed), "--limit-mm-per-prompt", "image=3",
                            "--max-body-bytes", "2000000")
        cls.addClassCleanup(cls.server.stop)

    def check(self, wanted, reply, param=None, says=()):
        status, headers, body = reply
        self.assertEqual(status, wanted, body)
        error = body["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertTrue(0 < len(error["message"]) <= 1000)
        if param is not None:
            self.assertEqual(error["param"], param)
        for text in [says] if isinstance(says, str) else says:
            self.assertIn(text, error["message"])
        self.assertIn("X-Request-Id", headers)

    def chat(self, **fields):
        fields.setdefault("messages", ask(QUESTION))
        return self.server.chat(**fields)

    def image(self, url):
        return self.chat(messages=ask(QUESTION, url), max_tokens=3)

    def test_bodies(self):
        post = lambda body: self.server.request("POST", "/v1/chat/completions", body)
        for body in ("", "{", "null", "[]", '"x"', '{"messages": 5}', "\xff", "{" * 10_000, '{"messages": [{"role": "user"}]}'):
            self.check(400, post(body.encode("latin-1")))
        self.check(413, post("x" * 2_000_001), says="2000000")

    def test_fields(self):
        for field, value in (("temperature", "hot"), ("temperature", -1), ("top_p", 0), ("max_tokens", 0), ("n", 0), ("n", "x"),
                             ("stop", 5), ("stream", "yes"), ("logit_bias", {"a": 1}), ("top_logprobs", 3), ("seed", "x"),
                             ("tools", [{}]), ("response_format", {"type": "xml"}), ("model", 5)):
            self.check(400, self.chat(**{field: value}), param=field)
        self.check(404, self.chat(model="other"), param="model")
        status, _, _ = self.chat(max_tokens=2, some_new_field={"x": 1}, another=None)
        self.assertEqual(status, 200)

    def test_routes(self):
        self.check(404, self.server.request("GET", "/"))
        self.check(405, self.server.request("GET", "/v1/chat/completions"))
        self.check(400, self.server.request("POST", "/v1/completions", {}), says="'prompt' is missing", param="prompt")
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_metrics(self):
        line = re.compile(r'[a-z_:][a-z0-9_:]*(\{([a-z_]+="[^"]*",?)+\})? [0-9.e+-]+')
        self.assertEqual(self.chat(max_tokens=3, ignore_eos=True)[0], 200)
        status, headers, text = self.server.request("GET", "/metrics")
        self.assertEqual(status, 200)
        self.assertTrue(headers["Content-Type"].startswith("text/plain; version=0.0.4"))
        for row in text.splitlines():
            self.assertTrue(row.startswith(("# HELP ", "# TYPE ")) or line.fullmatch(row), row)
        figures = dict(row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#"))
        for name, labels in (("vllm:", '{model_name="tiny"}'), ("parvl_", '{pool="colocated"}')):
            value = lambda figure: float(figures[name + figure + labels])
            self.assertGreaterEqual(value("generation_tokens_total"), 3)
            self.assertGreaterEqual(value("prompt_tokens_total"), 1)
            self.assertGreaterEqual(value("prefix_cache_queries_total"), 1)
            self.assertGreaterEqual(value("time_to_first_token_seconds_count"), 1)
            self.assertEqual(value("num_requests_waiting"), 0)
            self.assertLess(value("kv_cache_usage_perc"), 1)

    def test_images(self):
        good = png()
        for url in (data_uri(good), data_uri(good).replace("data:", "DATA:", 1), (self.allowed / "red.png").as_uri(),
                    "data:image/png;base64," + base64.urlsafe_b64encode(good).decode().rstrip("="),
                    "data:image/png;base64," + base64.encodebytes(good).decode()):
            self.assertEqual(self.image(url)[0], 200, url[:80])
        for url in (data_uri(good[:50]), data_uri(b"text"), data_uri(b""), "data:image/png;base64,!!!!", "data:image/png;base64",
                    (self.allowed / "missing.png").as_uri()):
            self.check(422, self.image(url), says="image 1")
        self.check(400, self.image("http://127.0.0.1/a.png"), says="--allowed-private-media-hosts")
        for url in ("file:///etc/passwd", (self.allowed.parent / "secret.png").as_uri(), (self.allowed / "link.png").as_uri(),
                    (self.allowed / ".." / "secret.png").as_posix().replace("/", "file:///", 1), "ftp://x/y", "", "nonsense"):
            self.check(400, self.image(url))
        self.check(400, self.chat(messages=ask(QUESTION, *[data_uri(png(8, 8))] * 4)), says="3 images")
        self.check(422, self.chat(messages=ask(QUESTION, data_uri(good), data_uri(good[:40]))), says="image 2")
        for kind in ("input_audio", "video_url"):
            self.check(400, self.chat(messages=[{"role": "user", "content": [{"type": kind}]}]), says="not available yet")

    def test_huge_header_of_a_picture_costs_nothing(self):
        bomb = bytearray(png(8, 8))
        bomb[16:24] = (60_000).to_bytes(4, "big") + (60_000).to_bytes(4, "big")
        status, _, body = self.image(data_uri(bytes(bomb)))
        self.assertIn(status, (413, 422), body)

    def test_prompt_over_the_context(self):
        self.check(400, self.chat(messages=ask("word " * 100_000)), says="limited to")
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_request_id(self):
        self.assertEqual(self.server.request("GET", "/livez", headers={"X-Request-Id": "my-id"})[1]["X-Request-Id"], "my-id")

    def test_stream_on_the_wire(self):
        events = self.server.events(messages=ask(QUESTION), max_tokens=4, stream_options={"include_usage": True})
        self.assertEqual(events[-1], "[DONE]")
        chunks = [json.loads(event) for event in events[:-1]]
        self.assertEqual(chunks[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        self.assertEqual(chunks[-2]["choices"][0]["delta"], {})
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertEqual(chunks[-1]["usage"]["completion_tokens"], chunks[-1]["usage"]["total_tokens"] -
                         chunks[-1]["usage"]["prompt_tokens"])


class Lifecycle(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()

    def start_stream(self, server):
        """A long generation whose first bytes are here: (connection, reply)."""
        connection = server.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": ask("go on"), "stream": True, **LONG}))
        reply = connection.getresponse()
        self.assertEqual(reply.status, 200)
        self.assertTrue(reply.readline().startswith(b"data: "))
        return connection, reply

    def test_disconnects_leave_the_server_well(self):
        with Server() as server:
            for i in range(10):
                connection, reply = self.start_stream(server)
                connection.sock.shutdown(socket.SHUT_RDWR)
                reply.close()
                connection.close()
            begin = time.monotonic()
            self.assertEqual(server.chat(messages=ask(QUESTION), max_tokens=2)[0], 200)
            self.assertLess(time.monotonic() - begin, 10)  # nobody waits for those who left

    def test_burst_over_the_queue(self):
        with Server("--max-queue", "2", "--max-num-seqs", "1") as server:
            statuses = []

            def one():
                statuses.append(server.chat(messages=ask(QUESTION, data_uri(png())), max_tokens=60, ignore_eos=True))

            threads = [threading.Thread(target=one) for _ in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            codes = sorted(status for status, _, _ in statuses)
            self.assertEqual(len(codes), 16)
            self.assertEqual(set(codes) - {200, 429}, set())
            self.assertGreaterEqual(codes.count(200), 1)
            self.assertGreaterEqual(codes.count(429), 1)
            for status, headers, body in statuses:
                if status == 429:
                    self.assertIn("Retry-After", headers)
                    self.assertEqual(body["error"]["code"], "queue_full")
            self.assertEqual(server.chat(messages=ask(QUESTION), max_tokens=2)[0], 200)

    def test_sigterm_finishes_what_runs(self):
        server = Server()
        connection, reply = self.start_stream(server)
        server.process.send_signal(signal.SIGTERM)
        rest = reply.read().decode()
        self.assertIn("data: [DONE]", rest)
        connection.close()
        self.assertEqual(server.process.wait(60), 0)  # a second signal would end it at once
        server.stop()

    def test_sigterm_at_rest_is_quick(self):
        server = Server()
        self.assertEqual(server.request("GET", "/livez")[0], 200)
        begin = time.monotonic()
        self.assertEqual(server.stop(), 0)
        self.assertLess(time.monotonic() - begin, 10)

    def test_listening_before_loading(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen([PARVL, "serve", "--model", MODEL, "--port", str(port)], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
        try:
            seen = set()
            while "ready" not in seen:
                self.assertIsNone(process.poll())
                try:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                    connection.request("GET", "/livez")
                    live = connection.getresponse()
                    live.read()
                    connection.request("GET", "/readyz")
                    ready = connection.getresponse()
                    ready.read()
                    connection.close()
                except ConnectionRefusedError:
                    continue
                self.assertEqual(live.status, 200)
                self.assertIn(ready.status, (200, 503))
                seen.add("ready" if ready.status == 200 else "loading")
            self.assertEqual(process.stdout.readline(), f"parvl ready http://127.0.0.1:{port}\n")
        finally:
            process.terminate()
            self.assertEqual(process.wait(30), 0)
            process.stdout.close()


class CommandLine(unittest.TestCase):
    def test_json_log(self):
        with Server("--log-format", "json", "--log-requests") as server:
            server.request("GET", "/livez")
            server.request("GET", "/version", headers={"X-Request-Id": "mine", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
            server.chat(messages=ask("nobody may read this"), max_tokens=1)
        lines = [json.loads(line) for line in server.errors]
        mine = next(line for line in lines if line.get("request_id") == "mine")
        self.assertEqual((mine["path"], mine["status"], mine["trace_id"]), ("/version", 200, "ab" * 16))
        self.assertFalse(any(line.get("path") == "/livez" for line in lines))
        self.assertTrue(any(line.get("path") == "/v1/chat/completions" for line in lines))
        self.assertNotIn("nobody", "".join(server.errors))

    def run_parvl(self, *arguments):
        return subprocess.run([PARVL, *arguments], capture_output=True, text=True, timeout=120)

    def test_refusals(self):
        for flags, says in (((), "--model"),
                            (("--model", "x", "--config", "no/such.yaml"), "no/such.yaml"),
                            (("--model", "x", "-tp", "0"), "--tensor-parallel-size must be at least 1"),
                            (("--model", "x", "--tensor-parallel-size", "2", "--config", "no/such.yaml"), "tp_size: 2"),
                            (("--model", "x", "--device-map", "a=cpu"), "--device-map is about an allocation; give its file with --config"),
                            (("--model", "x", "--print-config"), "--print-config is about an allocation; give its file with --config"),
                            (("--model", "x", "--port", "99999"), "--port"),
                            (("--model", "x", "--limit-mm-per-prompt", "image=x"), "--limit-mm-per-prompt"),
                            (("--model", "x", "--dtype", "int3"), "--dtype"),
                            (("--model", "x", "--max-body-bytes", "0"), "--max-body-bytes must be between 1 and"),
                            (("--model", "x", "--max-body-bytes", "500000000"), "--max-body-bytes must be between 1 and"),
                            (("--model", "x", "--allowed-media-domains", "a.test,http://b.test"), "--allowed-media-domains"),
                            (("--model", "x", "--allowed-private-media-hosts", "10.0.0.0/8"), "--allowed-private-media-hosts"),
                            (("--model", "x", "--no-such-flag"), "--no-such-flag"),
                            (("--model", "no/such/folder", "--port", "0"), "no/such/folder")):
            done = self.run_parvl("serve", *flags)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))
            self.assertIn(says, done.stderr.strip().splitlines()[-1], flags)
            self.assertNotIn("parvl ready", done.stdout)

    def test_limits_that_make_no_sense(self):
        need_model()
        for flag, value, valid in (("--max-num-seqs", 10**15, "between 1 and 65536"), ("--max-num-batched-tokens", 10**15, "between 1 and 16777216"),
                                   ("--kv-cache-memory-bytes", -5, f"between 0 and {2**50}"), ("--encoder-cache-bytes", -5, f"between 0 and {2**50}"),
                                   ("--record-max-bytes", 5, "at least 4096")):
            done = subprocess.run([PARVL, "serve", "--model", MODEL, "--port", "0", flag, str(value)], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertTrue(done.stderr.strip().endswith(f"{flag} must be {valid}, found {value}"), done.stderr)

    def test_tensor_parallel_of_one_is_accepted(self):
        done = self.run_parvl("serve", "--model", "no/such/folder", "-tp", "1", "--port", "0")
        self.assertIn("no/such/folder", done.stderr.strip().splitlines()[-1])

    def test_help(self):
        for command in ("serve", "generate"):
            done = self.run_parvl(command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("--model", done.stdout)


if __name__ == "__main__":
    unittest.main()
