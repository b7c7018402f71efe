"""The contract's HTTP side, row by row (conformance_table.py), against the program with the example model."""
# slow
import json
import threading
import unittest

import conformance_table as table
from conformance_rows import Rows
from serve_common import Server, ask, data_uri, png

LONG = {"ignore_eos": True, "max_tokens": 100_000}


class Fields(Rows):
    """What is taken and what is refused."""

    def check_field(self, path, base, field, value, status):
        reply = self.server.request("POST", path, base | {field: value})
        if status == 200:
            self.assertEqual(reply[0], 200, reply[2])
            self.assertTrue(reply[2]["choices"])
        else:
            self.check_error(reply, status, param=field)

    def run_fields(self, path, base, fields):
        for field, (taken, refused) in fields.items():
            beside = base | table.BESIDE.get(field, {})
            for value in taken:
                self.row(f"{path} {field}", f"{str(value)[:60]} is taken", self.check_field, path, beside, field, value, 200)
            for value in refused:
                self.row(f"{path} {field}", f"{str(value)[:60]} is refused", self.check_field, path, beside, field, value, 400)

    def test_chat_fields(self):
        self.run_fields("/v1/chat/completions", {"messages": table.QUESTION, "max_tokens": 5}, table.CHAT)

    def test_completion_fields(self):
        self.run_fields("/v1/completions", {"prompt": "hi", "max_tokens": 5}, table.COMPLETION)

    def test_messages(self):
        for name, messages, status, param in table.MESSAGES:
            self.row("messages", name, lambda m=messages, s=status, p=param: self.check_error(
                self.server.chat(messages=m, max_tokens=2), s, param=p))

    def check_endpoint(self, method, path, body, status, code, headers):
        got, answered, text = self.server.request(method, path, body)
        self.assertEqual(got, status, text)
        self.assertIn("X-Request-Id", answered)
        for name in headers:
            self.assertIn(name, answered)
        if method in ("HEAD", "OPTIONS"):
            self.assertEqual(text, "")
        elif status >= 400:
            self.check_error((got, answered, text), status, code=code)

    def test_endpoints(self):
        for method, path, body, status, code, headers in table.ENDPOINTS:
            self.row("endpoints", f"{method} {path} {str(body)[:50]}", self.check_endpoint, method, path, body, status, code, headers)

    def test_bad_bodies(self):
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            for body in table.BAD_BODIES:
                self.row("bodies that are no request", f"{path} {body[:20]!r}", lambda p=path, b=body: self.check_error(
                    self.server.request("POST", p, b.encode()), 400))

    def test_request_ids(self):
        def echoed(sent, comes_back):
            _, headers, _ = self.server.request("GET", "/livez", headers={"X-Request-Id": sent})
            self.assertEqual(headers["X-Request-Id"] == sent, comes_back)
            self.assertTrue(headers["X-Request-Id"])
        for sent, comes_back in (("mine", True), ("a" * 128, True), ("a" * 129, False), ("", False), ("two words", False)):
            self.row("X-Request-Id", sent[:20], echoed, sent, comes_back)


class Effects(Rows):
    """What a field does."""

    def chat(self, **fields):
        status, _, body = self.server.chat(**({"messages": table.QUESTION, "max_tokens": 8, "temperature": 0} | fields))
        self.assertEqual(status, 200, body)
        return body

    def text(self, **fields):
        return self.chat(**fields)["choices"][0]["message"]["content"]

    def test_lengths(self):
        def tokens(count, reason, **fields):
            body = self.chat(**fields)
            self.assertEqual(body["usage"]["completion_tokens"], count)
            self.assertEqual(body["choices"][0]["finish_reason"], reason)
        for fields, count in (({"max_tokens": 1}, 1), ({"max_completion_tokens": 3, "max_tokens": 9, "ignore_eos": True}, 3),
                              ({"max_tokens": 30, "ignore_eos": True}, 30), ({"max_tokens": 6, "min_tokens": 6}, 6)):
            self.row("effects", str(fields), lambda c=count, f=fields: tokens(c, "length", **f))
        self.row("effects", "an answer ends by itself", lambda: self.assertEqual(
            self.chat(max_tokens=50)["choices"][0]["finish_reason"], "stop"))

    def test_sampling(self):
        hot = {"temperature": 2.0, "ignore_eos": True, "max_tokens": 12}
        plain = self.text(ignore_eos=True, max_tokens=12)
        first = self.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"][0]
        token = self.server.request("POST", "/tokenize", {"prompt": first["token"]})[2]["tokens"][0]
        rows = [
            ("greedy is the same twice", lambda: self.assertEqual(self.text(ignore_eos=True, max_tokens=12), plain)),
            ("a seed is the same twice", lambda: self.assertEqual(self.text(seed=5, **hot), self.text(seed=5, **hot))),
            ("another seed is another text", lambda: self.assertNotEqual(self.text(seed=5, **hot), self.text(seed=6, **hot))),
            ("top_k 1 is greedy", lambda: self.assertEqual(self.text(seed=5, top_k=1, **hot), plain)),
            ("top_p near 0 is greedy", lambda: self.assertEqual(self.text(seed=5, top_p=1e-9, **hot), plain)),
            ("min_p 1 is greedy", lambda: self.assertEqual(self.text(seed=5, min_p=1, **hot), plain)),
            ("n gives so many", lambda: self.assertEqual([c["index"] for c in self.chat(n=3)["choices"]], [0, 1, 2])),
            ("logit_bias bans a token", lambda: self.assertFalse(self.text(logit_bias={str(token): -100}).startswith(first["token"]))),
            ("stop cuts before it", lambda: self.assertNotIn(first["token"], self.text(stop=first["token"]))),
            ("stop_token_ids end", lambda: self.assertEqual(self.chat(stop_token_ids=[token])["usage"]["completion_tokens"], 1)),
            ("presence_penalty changes what repeats", lambda: self.assertNotEqual(self.text(ignore_eos=True, max_tokens=30, presence_penalty=2),
                                                                                  self.text(ignore_eos=True, max_tokens=30))),
            ("frequency_penalty too", lambda: self.assertNotEqual(self.text(ignore_eos=True, max_tokens=30, frequency_penalty=2),
                                                                  self.text(ignore_eos=True, max_tokens=30))),
            ("repetition_penalty too", lambda: self.assertNotEqual(self.text(ignore_eos=True, max_tokens=30, repetition_penalty=5),
                                                                   self.text(ignore_eos=True, max_tokens=30))),
            ("logprobs name the tokens", lambda: self.assertEqual((len(first["top_logprobs"]), first["top_logprobs"][0]["token"]), (2, first["token"]))),
            ("top_logprobs gives so many, the likeliest first", self.top_logprobs),
            ("top_logprobs needs logprobs", lambda: self.check_error(
                self.server.chat(messages=table.QUESTION, top_logprobs=2), 400, param="top_logprobs")),
            ("no logprobs unless asked", lambda: self.assertIsNone(self.chat()["choices"][0].get("logprobs"))),
            ("usage adds up", lambda: self.assertEqual((u := self.chat()["usage"])["total_tokens"], u["prompt_tokens"] + u["completion_tokens"])),
        ]
        for name, check in rows:
            self.row("effects", name, check)

    def top_logprobs(self):
        for count in (0, 1, 5, 20):
            for token in self.chat(logprobs=True, top_logprobs=count)["choices"][0]["logprobs"]["content"]:
                values = [top["logprob"] for top in token["top_logprobs"]]
                self.assertEqual(len(values), count)
                self.assertEqual(values, sorted(values, reverse=True))
                self.assertEqual(values[:1], [token["logprob"]][:count])  # greedy

    def test_completions(self):
        def complete(**fields):
            status, _, body = self.server.request("POST", "/v1/completions", {"prompt": ids, "max_tokens": 30, "temperature": 0} | fields)
            self.assertEqual(status, 200, body)
            return body["choices"][0], body["usage"]["completion_tokens"]
        ids = self.server.request("POST", "/tokenize", {"messages": table.QUESTION})[2]["tokens"]
        plain = complete(ignore_eos=True)[0]["text"]
        tops = complete(logprobs=3, max_tokens=1)[0]["logprobs"]
        rows = [
            ("an end token ends", lambda: self.assertEqual((complete()[0]["finish_reason"], complete()[1] < 30), ("stop", True))),
            ("ignore_eos goes on", lambda: self.assertEqual((complete(ignore_eos=True)[0]["finish_reason"], complete(ignore_eos=True)[1]), ("length", 30))),
            ("frequency_penalty changes what repeats", lambda: self.assertNotEqual(complete(ignore_eos=True, frequency_penalty=2)[0]["text"], plain)),
            ("presence_penalty too", lambda: self.assertNotEqual(complete(ignore_eos=True, presence_penalty=2)[0]["text"], plain)),
            ("logprobs says how many", lambda: self.assertEqual((len(tops["tokens"]), len(tops["top_logprobs"][0])), (1, 3))),
        ]
        for name, check in rows:
            self.row("effects on completions", name, check)

    def test_caches_and_images(self):
        def cached(**fields):
            return self.chat(messages=long, max_tokens=1, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]
        long = ask("tell me about this shape " * 8)
        cached(), cached(cache_salt="a")
        big = ask("x", data_uri(png(128, 128)))
        prompt = lambda **fields: self.chat(messages=big, max_tokens=1, **fields)["usage"]["prompt_tokens"]
        rows = [
            ("an equal prompt is cached", lambda: self.assertGreater(cached(), 0)),
            ("a salt of its own is not", lambda: self.assertEqual(cached(cache_salt="b"), 0)),
            ("the same salt is", lambda: self.assertGreater(cached(cache_salt="a"), 0)),
            ("max_pixels makes an image smaller", lambda: self.assertLess(prompt(mm_processor_kwargs={"max_pixels": 4096}), prompt())),
            ("another image, another answer", lambda: self.assertNotEqual(
                *(self.text(messages=ask("what color is the shape?", data_uri(png(color=c)))) for c in ((255, 0, 0), (0, 0, 255))))),
            ("unknown fields warn once", self.warns_once),
        ]
        for name, check in rows:
            self.row("effects", name, check)

    def warns_once(self):
        for _ in range(3):
            self.chat(a_field_nobody_knows=1)
        self.assertEqual(sum("a_field_nobody_knows" in line for line in self.server.errors), 1)

    def check_stream(self, **fields):
        events = self.server.events(messages=table.QUESTION, temperature=0, **fields)
        self.assertEqual(events[-1], "[DONE]")
        chunks = [json.loads(event) for event in events[:-1]]
        usage = fields.get("stream_options", {}).get("include_usage")
        if usage:
            self.assertEqual(chunks[-1]["choices"], [])
            self.assertGreater(chunks.pop()["usage"]["completion_tokens"], 0)
        self.assertEqual(len({chunk["id"] for chunk in chunks}), 1)
        whole = self.chat(**fields | {"stream_options": None})
        for index in range(fields.get("n", 1)):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            self.assertEqual(mine[0]["delta"], {"role": "assistant", "content": ""})
            self.assertEqual(mine[-1]["delta"], {})
            self.assertTrue(all(c["finish_reason"] is None for c in mine[:-1]))
            self.assertEqual(mine[-1]["finish_reason"], whole["choices"][index]["finish_reason"])
            self.assertEqual("".join(c["delta"]["content"] for c in mine[1:-1]), whole["choices"][index]["message"]["content"])

    def test_streams(self):
        for fields in ({"max_tokens": 4}, {"max_tokens": 30}, {"max_tokens": 5, "n": 2}, {"max_tokens": 4, "logprobs": True},
                       {"max_tokens": 4, "stream_options": {"include_usage": True}},
                       {"max_tokens": 90, "n": 2, "response_format": table.schema_form(table.COLOR)}):
            self.row("streams", str(fields), lambda f=fields: self.check_stream(**f))
        for options in ({"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": 5},
                        {"stream": True, "stream_options": {"include_usage": "x"}}):
            self.row("streams", f"{options} is refused", lambda o=options: self.check_error(
                self.server.chat(messages=table.QUESTION, **o), 400))
        self.row("streams", "a refusal is a status", lambda: self.check_error(
            self.server.chat(messages=ask("x", data_uri(b"text")), stream=True), 422))


class Refusals(Rows):
    """Statuses that need a server of their own: keys, queues, time-outs, draining."""

    flags = None

    def test_keys(self):
        with Server("--api-key", "one", "--api-key", "two") as server:
            for header, status in ((None, 401), ("Bearer three", 401), ("Bearer one", 200), ("bearer two", 200), ("one", 401), ("Bearer ", 401),
                                   ("Basic one", 401)):
                for path in ("/v1/models", "/metrics", "/version"):
                    def check(h=header, s=status, p=path):
                        reply = server.request("GET", p, headers={"Authorization": h} if h else {})
                        self.assertEqual(reply[0], s)
                        if s == 401:
                            self.check_error(reply, 401, code="invalid_api_key")
                            self.assertIn("WWW-Authenticate", reply[1])
                    self.row("keys", f"{path} with {header}", check)
            for path in ("/livez", "/readyz", "/health"):
                self.row("keys", f"{path} needs none", lambda p=path: self.assertEqual(server.request("GET", p)[0], 200))
            self.row("keys", "before the body", lambda: self.check_error(
                server.request("POST", "/v1/chat/completions", "not JSON"), 401, code="invalid_api_key"))

    def test_priorities(self):
        def order(server, path, asked, priorities):
            """The numbers of requests, sent one after the other while the only place is taken, as their answers come. The first that
            waits is made ready at once, whatever comes after it, so that one has no number."""
            held, ends = server.connect(), []
            held.request("POST", "/v1/chat/completions", json.dumps({"messages": ask("go on"), "stream": True, **LONG}))
            held.getresponse().readline()

            def one(i, fields):
                status, _, body = server.request("POST", path, asked | fields)
                ends.append((i, status, body["usage"]["completion_tokens"]))
            threads = []
            for i, priority in enumerate((None, *priorities)):
                fields = {"max_tokens": 50, "ignore_eos": True} | ({} if priority is None else {"priority": priority})
                threads.append(threading.Thread(target=one, args=(i, fields)))
                threads[-1].start()
                while f'num_requests_waiting{{pool="colocated"}} {i + 1}\n' not in server.request("GET", "/metrics")[2]:
                    pass
            held.close()
            for thread in threads:
                thread.join()
            self.assertEqual({end[1:] for end in ends}, {(200, 50)})
            return [end[0] for end in ends if end[0] > 0]
        with Server("--max-num-seqs", "1") as server:
            for path, asked in (("/v1/chat/completions", {"messages": table.QUESTION}), ("/v1/completions", {"prompt": "hi"})):
                for priorities, expected in (((5, 0, -5), [3, 2, 1]), ((3, 3, 3), [1, 2, 3]), ((1, None, -1), [3, 2, 1])):
                    self.row("priorities", f"{path} {priorities}", lambda p=path, a=asked, n=priorities, e=expected:
                             self.assertEqual(order(server, p, a, n), e))

    def test_full_and_slow(self):
        with Server("--max-num-seqs", "1", "--max-queue", "1", "--queue-timeout", "0.3", "--request-timeout", "20") as server:
            held = [server.connect() for _ in range(2)]
            for connection in held:  # one runs, and one is made ready
                connection.request("POST", "/v1/chat/completions", json.dumps({"messages": ask("go on"), "stream": True, "n": 4, **LONG}))
            held[0].getresponse().readline()
            self.row("queues", "one too many is 429", lambda: self.check_error(server.chat(messages=table.QUESTION), 429, code="queue_full"))
            self.row("queues", "probes are answered all the same", lambda: self.assertEqual(server.request("GET", "/health")[0], 200))
            for connection in held:
                connection.close()
            self.row("queues", "and there is room again", lambda: self.assertEqual(server.chat(messages=table.QUESTION, max_tokens=2)[0], 200))
        with Server("--request-timeout", "0.3") as server:
            self.row("time-outs", "a long answer is 504", lambda: self.check_error(
                server.chat(messages=ask("go on"), n=16, **LONG), 504, code="request_timeout"))

        def stream_ends():
            for seconds in ("0.3", "1.2", "5"):  # a busy machine may need longer for the first token
                with Server("--request-timeout", seconds) as server:
                    connection = server.connect()
                    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": ask("go on"), "stream": True, "n": 16, **LONG}))
                    reply = connection.getresponse()
                    text = reply.read().decode()
                    connection.close()
                if reply.status == 200:
                    break
            self.assertIn("event: error\ndata: ", text)
            self.assertNotIn("[DONE]", text)
            error = json.loads(text.rsplit("data: ", 1)[1])["error"]
            self.assertEqual(error["code"], "request_timeout")
        self.row("time-outs", "a begun stream ends with an error event", stream_ends)

    def test_draining(self):
        server = Server()
        try:
            connection = server.connect()
            connection.request("POST", "/v1/chat/completions", json.dumps({"messages": ask("go on"), "stream": True, "n": 8, **LONG}))
            reply = connection.getresponse()
            reply.readline()
            kept = server.connect()
            kept.request("GET", "/livez")
            kept.getresponse().read()
            stopper = threading.Thread(target=server.stop)
            stopper.start()
            self.row("draining", "new requests are 503", lambda: self.check_draining(kept))
            reply.read()
            connection.close()
            stopper.join()
            self.row("draining", "exit 0", lambda: self.assertEqual(server.process.returncode, 0))
        finally:
            server.stop()

    def check_draining(self, connection):
        for _ in range(10_000):
            connection.request("GET", "/readyz")
            reply = connection.getresponse()
            body = json.loads(reply.read())
            if reply.status != 200:
                break
        self.check_error((reply.status, dict(reply.getheaders()), body), 503, code="draining")


if __name__ == "__main__":
    unittest.main()
