"""`parvl serve --trace`: the file of a running server, of one that was killed, and of one that is told when to record."""
import collections
import json
import pathlib
import re
import tempfile
import unittest

from serve_common import Server, ask, data_uri, need_model, png

QUESTION = "what color is the shape?"
SECRET = "a-word-that-no-trace-may-hold"
US = 1e-6


class Trace:
    """A trace file's events: `rows` of a request's spans as (name, begin, end, args, depth), `lanes` of the engine's threads."""

    def __init__(self, path):
        self.text = pathlib.Path(path).read_text()
        events = json.loads(self.text)["traceEvents"]
        self.names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        self.lanes = collections.defaultdict(list)
        self.counters = collections.defaultdict(list)
        rows = collections.defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                self.lanes[self.names[event["tid"]]].append((event["ts"], event["ts"] + event["dur"], event["name"], event["args"]))
            elif event["ph"] == "C":
                self.counters[event["name"]].append((event["ts"], event["args"]["value"]))
            elif event["ph"] in "be":
                rows[event["cat"], event["id"]].append(event)
        self.rows = {row: list(nested(sorted(events, key=lambda e: e["ts"]))) for row, events in rows.items()}

    def request(self, request_id):
        """The spans of a request's row, the whole of it first, and those of its encodings."""
        for (category, row), spans in self.rows.items():
            if category == "request" and spans[0].name == request_id:
                return spans, self.rows.get(("encode", row), [])
        raise AssertionError(f"no row is named {request_id}")


Span = collections.namedtuple("Span", "name begin end args depth last")


def nested(events):
    """Spans by their begin; an end that does not belong to the innermost open span is an error."""
    open_spans, spans = [], []
    for event in events:
        if event["ph"] == "b":
            open_spans.append(len(spans))
            spans.append(Span(event["name"], event["ts"], None, event["args"], len(open_spans) - 1, None))
        else:
            at = open_spans.pop()
            assert spans[at].name == event["name"], f"{event['name']} ends inside {spans[at].name}"
            spans[at] = spans[at]._replace(end=event["ts"], last=event["args"])
    return spans


def seconds(spans, name):
    return sum(s.end - s.begin for s in spans if s.name == name) * US


def metric(text, name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE).group(1))


def when_idle(server):
    """/metrics once the engine's figures are those after its last turn, which come a moment after the last answer."""
    while True:
        text = server.request("GET", "/metrics")[2]
        if metric(text, 'parvl_num_requests_running{pool="colocated"}') == 0:
            return text


class Traces(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)

    def chat(self, server, request_id, *images, **fields):
        body = {"messages": ask(f"{QUESTION} {SECRET}", *images), "max_tokens": 8, "ignore_eos": True, **fields}
        headers = {"X-Request-Id": request_id, "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        status, _, reply = server.request("POST", "/v1/chat/completions", body, headers)
        self.assertEqual(status, 200, reply)
        return reply

    def test_spans_nest_and_add_up_to_the_metrics(self):
        path = self.folder / "whole.json"
        with Server("--trace", path, "--max-num-batched-tokens", "64") as server:
            usage = {}
            for i, images in enumerate([[], [png()], [png(96, 64), png(64, 96)]]):
                usage[f"r{i}"] = self.chat(server, f"r{i}", *map(data_uri, images))["usage"]
            metrics = when_idle(server)
        trace = Trace(path)
        self.assertNotIn(SECRET, trace.text)
        self.assertNotIn("color", trace.text)
        for name, used in usage.items():
            self.check_request(trace, name, used)
        requests = [trace.request(name) for name in usage]
        for stage in ("prefill", "decode"):
            told = metric(metrics, f'parvl_request_stage_seconds_sum{{pool="colocated",stage="{stage}"}}')
            self.assertAlmostEqual(sum(seconds(spans, stage) for spans, _ in requests), told, delta=1e-4)
        encode = metric(metrics, 'parvl_request_stage_seconds_sum{pool="colocated",stage="encode"}')
        self.assertAlmostEqual(sum(seconds(encodes, "encode") for _, encodes in requests), encode, delta=1e-5)
        waited = metric(metrics, 'parvl_request_stage_seconds_sum{pool="colocated",stage="queue"}')
        self.assertAlmostEqual(sum(seconds(spans, "queue") for spans, _ in requests), waited, delta=1e-4)
        for module in ("llm_backbone", "vision_encoder"):
            busy = metric(metrics, f'parvl_busy_seconds_total{{module="{module}",pool="colocated"}}')
            self.assertAlmostEqual(sum(end - begin for begin, end, *_ in trace.lanes[module]) * US, busy, delta=1e-5)

    def check_request(self, trace, name, usage):
        spans, encodes = trace.request(name)
        whole = spans[0]
        self.assertEqual(whole.last, {"status": 200})
        self.assertEqual(whole.args["trace_id"], "0af7651916cd43dd8448eb211c80319c")
        for span in spans:
            self.assertIsNotNone(span.end, span)
        self.assertEqual([s.name for s in spans if s.depth == 1], ["preprocess", "queue", "preprocess", "generation"])
        generation = next(s for s in spans if s.name == "generation")
        self.assertEqual(generation.args["prompt_tokens"], usage["prompt_tokens"])
        self.assertEqual(generation.last["tokens"], usage["completion_tokens"])
        inner = [s for s in spans if s.depth == 2]
        self.assertEqual([s.name for s in inner], ["queue", "prefill", "decode"])
        chunks = [s for s in spans if s.name == "chunk"]
        cached = next(s for s in inner if s.name == "prefill").args["cached_tokens"]
        self.assertEqual(sum(c.args["tokens"] for c in chunks), usage["prompt_tokens"] - cached)
        self.assertEqual([c.args["begin"] for c in chunks], sorted(c.args["begin"] for c in chunks))
        # Waiting ends with the first work of either kind; a millionth of a second is the file's rounding.
        first = min([chunks[0].begin] + [e.begin for e in encodes])
        self.assertAlmostEqual(inner[0].end, first, delta=0.01)
        steps = {args["step"]: (begin, end) for begin, end, _, args in trace.lanes["llm_backbone"]}
        for chunk in chunks:
            begin, end = steps[chunk.args["step"]]
            self.assertAlmostEqual(chunk.begin, begin, delta=0.01)
            self.assertAlmostEqual(chunk.end, end, delta=0.01)

    def test_the_threads_do_one_thing_after_another(self):
        path = self.folder / "lanes.json"
        with Server("--trace", path) as server:
            self.chat(server, "two", data_uri(png()), n=2)
        trace = Trace(path)
        self.assertEqual(set(trace.lanes), {"scheduler", "llm_backbone", "vision_encoder"})
        for lane in trace.lanes.values():
            for (_, end, *_), (begin, *_) in zip(sorted(lane, key=lambda s: s[0]), sorted(lane, key=lambda s: s[0])[1:]):
                self.assertLessEqual(end, begin + 0.01)
        decodes = [args["decode_sequences"] for *_, args in trace.lanes["llm_backbone"]]
        self.assertEqual(max(decodes), 2)
        generations = [s for spans in trace.rows.values() for s in spans if s.name == "generation"]
        self.assertEqual(len(generations), 2)
        for name, most in (("running", 2), ("waiting", None), ("kv_cache_usage", None)):
            values = [value for _, value in trace.counters[name]]
            self.assertTrue(values, name)
            self.assertEqual(values[-1], 0)
            if most is not None:
                self.assertEqual(max(values), most)

    def test_the_trace_of_a_killed_server_loads(self):
        path = self.folder / "killed.json"
        server = Server("--trace", path)
        self.chat(server, "before", data_uri(png()))
        connection = server.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(
            {"messages": ask(QUESTION), "max_tokens": 900, "ignore_eos": True, "stream": True}), {"X-Request-Id": "cut"})
        connection.getresponse().read(1)
        server.process.kill()
        server.stop()
        connection.close()
        trace = Trace(path)
        self.assertIsNotNone(trace.request("before")[0][0].end)
        cut = trace.request("cut")[0]
        self.assertIsNone(cut[0].end)
        self.assertIn("decode", [s.name for s in cut if s.end is None])

    def test_recording_on_demand_and_its_limit(self):
        path = self.folder / "demand.json"
        with Server("--trace", path, "--trace-wait", "--trace-max-bytes", "20000") as server:
            self.chat(server, "unseen")
            self.assertFalse(path.exists())
            self.assertEqual(server.request("POST", "/stop_profile")[0], 409)
            self.assertEqual(server.request("POST", "/start_profile")[2], {"file": str(path)})
            self.assertEqual(server.request("POST", "/start_profile")[0], 409)
            self.chat(server, "seen")
            self.assertEqual(server.request("POST", "/stop_profile")[2], {"file": str(path)})
            self.chat(server, "unseen")
            self.assertEqual(server.request("POST", "/start_profile")[2], {"file": str(self.folder / "demand-2.json")})
            for i in range(40):
                self.chat(server, f"many{i}")
        whole = [spans[0] for (category, _), spans in Trace(path).rows.items() if category == "request"]
        self.assertEqual([(s.name, s.end is not None) for s in whole], [("seen", True)])
        full = self.folder / "demand-2.json"
        self.assertLessEqual(full.stat().st_size, 20000)
        self.assertGreater(full.stat().st_size, 19000)
        self.assertIn("--trace-max-bytes", json.loads(full.read_text())["traceEvents"][-1]["name"])
        self.assertTrue(any("--trace-max-bytes" in line for line in server.errors))

    def test_without_the_flag_there_are_no_routes(self):
        with Server() as server:
            self.assertEqual(server.request("POST", "/start_profile")[0], 404)
            self.assertEqual(server.request("POST", "/stop_profile")[0], 404)


if __name__ == "__main__":
    unittest.main()
