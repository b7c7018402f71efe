"""The Grafana dashboard and the alert rules of deploy/: every query is PromQL, and asks for what /metrics of a running server shows."""
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

from pool_server import PoolServer
from serve_common import ROOT, ask, data_uri, need_model, png

PROMTOOL = pathlib.Path(os.environ.get("PROMTOOL", ROOT / ".deps" / "promtool" / "promtool"))
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "parvl.json"
OF_PROMETHEUS = {"instance", "job"}  # labels that a scrape adds
WORDS = {"and", "or", "unless", "on", "by", "without", "ignoring", "group_left", "group_right", "bool", "offset"}
TOKEN = re.compile(r'\s+|(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<word>[a-zA-Z_:][\w:]*)|(?P<number>\d[\w.]*)|'
                   r"(?P<matcher>=~|!~|!=|==|>=|<=|=)|(?P<mark>[-+*/%^<>(){},])")


def tokens(query):
    at = 0
    while at < len(query):
        match = TOKEN.match(query, at)
        if match is None:
            raise AssertionError(f"not understood: {query[at:]!r}")
        at = match.end()
        if match.lastgroup:
            yield match.lastgroup, match.group()


def asked_for(query):
    """{metric: [(label, matcher, value)]} of the query's selectors, and the labels that it groups or joins by."""
    metrics, grouped, parts = {}, set(), list(tokens(query))
    i = 0
    while i < len(parts):
        kind, text = parts[i]
        following = parts[i + 1][1] if i + 1 < len(parts) else ""
        if kind != "word":
            i += 1
        elif text in WORDS and following == "(":
            close = parts.index(("mark", ")"), i)
            grouped |= {word for part, word in parts[i:close] if part == "word"} - {text}
            i = close
        elif text in WORDS or following in ("(", "by", "without"):
            i += 1
        else:
            matchers = metrics.setdefault(text, [])
            if following == "{":
                close = parts.index(("mark", "}"), i)
                inner = [part for part in parts[i + 2:close] if part != ("mark", ",")]
                matchers += [(inner[k][1], inner[k + 1][1], json.loads(inner[k + 2][1])) for k in range(0, len(inner), 3)]
                i = close
            i += 1
    return metrics, grouped


def shown(text):
    """{metric: {label: values}} of a /metrics page."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", line)
        if match is None:
            continue
        labels = found.setdefault(match.group(1), {})
        for name, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match.group(2) or ""):
            labels.setdefault(name, set()).add(value)
    return found


def problems(query, known, legend=""):
    metrics, grouped = asked_for(query)
    if not metrics:
        yield f"{query}: asks for nothing"
    labels = set(OF_PROMETHEUS)
    for metric, matchers in metrics.items():
        if metric == "up":  # of every scrape
            continue
        if metric not in known:
            yield f"{query}: /metrics has no {metric}"
            continue
        labels |= set(known[metric])
        for label, matcher, value in matchers:
            if label in OF_PROMETHEUS or "$" in value:
                if label not in set(known[metric]) | OF_PROMETHEUS:
                    yield f"{query}: {metric} has no label {label}"
            elif label not in known[metric]:
                yield f"{query}: {metric} has no label {label}"
            elif not any(re.fullmatch(value if matcher == "=~" else re.escape(value), v) for v in known[metric][label]):
                yield f"{query}: no {label} of {metric} matches {value!r}"
    for label in grouped | set(re.findall(r"{{\s*(\w+)\s*}}", legend)):
        if label not in labels:
            yield f"{query}: {label} is no label of what it asks for"


def dashboard_queries(dashboard):
    """(query, legend) of every panel."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments):
    if not PROMTOOL.exists():
        raise AssertionError(f"{PROMTOOL} is missing; `tools/setup.sh tests` gets it")
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)


class Dashboard(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.dashboard = json.loads(DASHBOARD.read_text())
        with PoolServer("--api-key", "key", "--queue-timeout", "1") as server:
            for body in ({"messages": ask("what color?", data_uri(png())), "max_tokens": 3}, {"messages": 5}):
                server.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer key"})
            cls.metrics = shown(server.request("GET", "/metrics", headers={"Authorization": "Bearer key"})[2])
        # What only a failing server shows: the label is there with other values.
        cls.metrics["parvl_http_responses_total"]["status"].add("503")

    def test_every_query_asks_for_what_is_there(self):
        queries = list(dashboard_queries(self.dashboard)) + [(rule["expr"], "") for rule in rules()]
        self.assertGreater(len(queries), 40)
        found = [problem for query, legend in queries for problem in problems(query, self.metrics, legend)]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_a_wrong_query_is_noticed(self):
        for query in ("rate(parvl_no_such_total[5m])", "parvl_healthy{module=\"x\"}", "sum by (stage) (parvl_healthy)",
                      "rate(parvl_busy_seconds_total{module=\"audio_encoder\"}[5m])", "1 + 1"):
            self.assertEqual(len(list(problems(query, self.metrics))), 1, query)
        self.assertEqual(len(list(problems("parvl_healthy", self.metrics, "{{stage}}"))), 1)

    def test_variables(self):
        for variable in self.dashboard["templating"]["list"]:
            if variable["type"] != "query":
                continue
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            self.assertIsNotNone(match, variable)
            self.assertEqual(list(problems(f"sum by ({match.group(2)}) ({match.group(1)})", self.metrics)), [])
        names = {v["name"] for v in self.dashboard["templating"]["list"]} | {"__rate_interval"}
        used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__all"}
        self.assertLessEqual(used, names)

    def test_every_metric_of_ours_is_on_the_dashboard(self):
        asked = {metric for query, _ in dashboard_queries(self.dashboard) for metric in asked_for(query)[0]}
        ends = ("_bucket", "_sum", "_count")
        families = {re.sub("|".join(f"{end}$" for end in ends), "", metric) for metric in self.metrics if metric.startswith("parvl_")}
        twins = {"parvl_request_queue_time_seconds", "parvl_request_prefill_time_seconds", "parvl_request_decode_time_seconds"}
        missing = {f for f in families - twins if not asked & {f, *(f + end for end in ends)}}
        self.assertEqual(missing, set())

    def test_panels(self):
        ids = [panel["id"] for panel in self.dashboard["panels"]]
        self.assertEqual(len(ids), len(set(ids)))
        taken = {}
        for panel in self.dashboard["panels"]:
            self.assertIn(panel["type"], {"row", "stat", "timeseries"})
            self.assertTrue(panel["title"])
            place = panel["gridPos"]
            self.assertLessEqual(place["x"] + place["w"], 24)
            for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])):
                self.assertNotIn(cell, taken, f"{panel['title']} lies over {taken.get(cell)}")
                taken[cell] = panel["title"]
            self.assertEqual(len({t["refId"] for t in panel.get("targets", [])}), len(panel.get("targets", [])))

    def test_queries_are_promql(self):
        """promtool reads the dashboard's queries as recording rules."""
        queries = [re.sub(r"\$__rate_interval", "5m", query) for query, _ in dashboard_queries(self.dashboard)]
        groups = {"groups": [{"name": "dashboard", "rules": [{"record": f"q:{i}", "expr": q} for i, q in enumerate(queries)]}]}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(groups, file)
            file.flush()
            done = promtool("check", "rules", file.name)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_alert_rules(self):
        for arguments in (["check", "rules", RULES], ["test", "rules", RULES.with_name("alerts_test.yaml")]):
            done = promtool(*arguments)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not(self):
        tests = yaml.safe_load(RULES.with_name("alerts_test.yaml").read_text())["tests"]
        cases = [case for test in tests for case in test["alert_rule_test"]]
        for rule in rules():
            fires = {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == rule["alert"]}
            self.assertEqual(fires, {True, False}, rule["alert"])


if __name__ == "__main__":
    unittest.main()
