"""The admin port of `parvl serve --config` and `parvl ctl`: a status of the contract's shape that follows what happens to instances."""
# slow
import http.server
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import unittest
import urllib.request

from pool_server import PoolServer, allocation
from serve_common import MODEL, PARVL, ask, data_uri, need_model, png

STATES = {"starting", "loading", "warming", "ready", "draining", "failed", "gone"}
TOKENS = {"viewer": "look-only", "operator": "may-do", "approver": "may-agree"}


def ctl(*arguments, **environment):
    done = subprocess.run([PARVL, "ctl", *arguments], capture_output=True, text=True, timeout=60,
                          env={**{k: v for k, v in os.environ.items() if not k.startswith("PARVL_ADMIN")}, **environment})
    return done.returncode, done.stdout, done.stderr.strip().split("\n")[-1]


class Admin(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.server = PoolServer()

    @classmethod
    def tearDownClass(cls):
        if cls.server.stop() != 0:
            raise AssertionError("the server did not end well: " + "".join(cls.server.errors))

    def setUp(self):
        self.server.wait_for(lambda status: all(one["state"] == "ready" for one in status["instances"]))

    def test_status_has_the_shape_of_the_contract(self):
        self.assertEqual(self.server.chat(messages=ask("what color?", data_uri(png())), max_tokens=5)[0], 200)
        status = self.server.wait_for(lambda s: s["pools"]["llm-pool"]["busy"] > 0)[-1]
        self.assertEqual(set(status), {"pools", "instances", "gateway", "latency"})
        self.assertEqual(list(status["pools"]), ["llm-pool"])
        pool = status["pools"]["llm-pool"]
        self.assertEqual((pool["role"], pool["devices"], pool["device"], pool["queue"], pool["ready"]), ("llm", 4, "gpu-40gb", 0, 2))
        self.assertTrue(0 < pool["busy"] <= 1, pool)
        self.assertEqual([one["id"] for one in status["instances"]], [0, 1])
        for one in status["instances"]:
            self.assertLessEqual({"id", "epoch", "pids", "pool", "devices", "modules", "state", "running", "waiting"}, set(one))
            self.assertEqual((one["pool"], one["state"], one["devices"], one["device"]), ("llm-pool", "ready", 1, "cpu"))
            self.assertEqual(one["modules"], ["vision_encoder", "projector", "llm_backbone"])
            self.assertEqual(len(one["pids"]), 1)
            os.kill(one["pids"][0], 0)  # it lives
            for name in ("epoch", "running", "waiting", "failures", "stale"):
                self.assertIs(type(one[name]), int, name)
        gateway, latency = status["gateway"], status["latency"]
        self.assertEqual((gateway["model"], gateway["ready"], gateway["reason"]), ("tiny", True, ""))
        self.assertEqual(latency["window_seconds"], 10)
        self.assertGreaterEqual(latency["requests"], 1)
        for name in ("ttft_ms", "tpot_ms"):
            self.assertTrue(0 < latency[name]["p50"] <= latency[name]["p99"] < 60_000, latency)

    def test_running_requests_show(self):
        threads = [threading.Thread(target=self.server.chat, kwargs={"messages": ask("count"), "max_tokens": 900, "ignore_eos": True}) for _ in range(8)]
        for thread in threads:
            thread.start()
        self.server.wait_for(lambda s: sum(one["running"] for one in s["instances"]) >= 2)
        for thread in threads:
            thread.join()
        self.server.wait_for(lambda s: sum(one["running"] + one["waiting"] for one in s["instances"]) == 0)

    def test_a_killed_instance_fails_and_comes_back(self):
        before = self.server.status()["instances"][1]
        os.kill(before["pids"][0], signal.SIGKILL)
        seen = self.server.wait_for(lambda s: s["instances"][1]["epoch"] > before["epoch"] and s["instances"][1]["state"] == "ready")
        states = [status["instances"][1]["state"] for status in seen]
        self.assertTrue({"failed", "starting"} & set(states), states)
        self.assertLessEqual(set(states), STATES)
        after = seen[-1]["instances"][1]
        self.assertEqual(after["failures"], before["failures"] + 1)
        self.assertRegex(after["reason"], "its connection|its process")  # whichever is noticed first
        self.assertNotEqual(after["pids"], before["pids"])
        self.assertEqual(seen[-1]["instances"][0]["state"], "ready")
        metrics = self.server.request("GET", "/metrics")[2]
        self.assertIn('parvl_instances{pool="llm-pool",state="ready"} 2\n', metrics)
        self.assertIn(f'parvl_instance_failures_total{{pool="llm-pool"}} {after["failures"] + seen[-1]["instances"][0]["failures"]}\n', metrics)
        self.assertRegex(metrics, r"\nparvl_stale_messages_total \d+\n")

    def test_routes(self):
        self.assertEqual(self.server.ask_admin("GET", "/livez")[0], 200)
        code, headers, page = self.server.ask_admin("GET", "/")
        self.assertEqual((code, headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        self.assertNotIn("unsafe", headers["Content-Security-Policy"])
        self.assertNotRegex(page, r"https?://")
        for method, path, expected in (("POST", "/status", 405), ("GET", "/drain?instance=0", 405), ("GET", "/nothing", 404), ("POST", "/", 405),
                                       ("POST", "/scale", 400), ("POST", "/lend", 400), ("POST", "/apply", 400), ("GET", "/audit", 400),
                                       ("POST", "/drain", 400), ("POST", "/drain?instance=x", 400), ("POST", "/drain?instance=77", 404)):
            code, _, reply = self.server.ask_admin(method, path)
            self.assertEqual(code, expected, (method, path, reply))
            self.assertTrue(reply["error"]["message"])
        self.assertIn("not available yet", self.server.ask_admin("POST", "/resize")[2]["error"]["message"])

    def test_other_sites_are_kept_out(self):
        """No page of another site may ask, not even under a name that resolves to this address."""
        for headers, expected in (({"Host": "evil.example"}, 403), ({"Host": "localhost:1"}, 200), ({"Host": "[::1]:1"}, 200),
                                  ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": self.server.admin}, 200)):
            self.assertEqual(self.server.ask_admin("GET", "/status", headers)[0], expected, headers)
        self.assertEqual(self.server.ask_admin("POST", "/drain?instance=0", {"Origin": "http://evil.example"})[0], 403)

    def test_ctl(self):
        code, out, err = ctl("status", "--target", self.server.admin, "--json")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual([one["state"] for one in json.loads(out)["instances"]], ["ready", "ready"])
        code, out, err = ctl("--target", self.server.admin, "status")
        self.assertEqual((code, err), (0, ""))
        for word in ("INSTANCE", "llm-pool", "ready", "4 x gpu-40gb", "vision_encoder, projector, llm_backbone", "TTFT p50"):
            self.assertIn(word, out)
        self.assertEqual(ctl("status", PARVL_ADMIN=self.server.admin)[0], 0)

    def test_ctl_says_what_is_wrong(self):
        for arguments, code, says in (((), 2, "ctl"), (("status",), 2, "--target is missing"), (("stauts",), 2, "did you mean status?"),
                                      (("status", "--target", "nonsense"), 2, "must be like"),
                                      (("status", "--target", "http://127.0.0.1:1"), 1, "nothing answers at 'http://127.0.0.1:1'"),
                                      (("status", "--target", self.server.url), 1, "is no admin port of parvl"),
                                      (("drain", "--target", self.server.admin), 2, "--instance"),
                                      (("drain", "--instance", "77", "--target", self.server.admin), 1, "there is no instance 77"),
                                      (("scale", "llm-pool", "3"), 2, "'parvl ctl scale' is not available yet"), (("audit",), 2, "not available yet")):
            done = ctl(*arguments)
            self.assertEqual((done[0], done[1]), (code, ""), (arguments, done))
            self.assertIn(says, done[2])
            self.assertTrue(done[2].startswith("parvl: "), done)


class Pools(unittest.TestCase):
    def test_an_encoder_pool(self):
        need_model()
        with PoolServer(encoders=1) as server:
            colors = iter(range(1 << 20))

            # Work between two looks at the instances, whenever the first one is.
            def all_busy(status):
                color = next(colors)
                picture = data_uri(png(color=(color >> 16, color >> 8 & 255, color & 255)))
                self.assertEqual(server.chat(messages=ask("what color?", picture), max_tokens=3)[0], 200)
                return all(pool["busy"] > 0 for pool in status["pools"].values())
            status = server.wait_for(all_busy)[-1]
            self.assertEqual({name: (pool["role"], pool["devices"], pool["modules"]) for name, pool in status["pools"].items()},
                             {"encoder-pool": ("encode", 2, ["vision_encoder", "projector"]), "llm-pool": ("llm", 4, ["llm_backbone"])})
            self.assertEqual([(one["pool"], one["modules"]) for one in status["instances"]],
                             [("encoder-pool", ["vision_encoder", "projector"])] + 2 * [("llm-pool", ["llm_backbone"])])

    def test_instances_show_while_they_load(self):
        need_model()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        seen, stop = [], threading.Event()

        def look():
            while not stop.wait(0.01):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=30) as reply:
                        seen.append(json.load(reply))
                except OSError:
                    pass  # it does not listen yet, or no more
        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            with PoolServer(admin={"port": port}) as server:
                self.assertEqual(server.admin, f"http://127.0.0.1:{port}")
        finally:
            stop.set()
            watcher.join()
        early = [status for status in seen if not status["gateway"]["ready"] and status["instances"]]
        self.assertTrue(early, seen)
        self.assertIn("loading", early[0]["gateway"]["reason"])
        self.assertLessEqual({one["state"] for one in early[0]["instances"]}, {"starting", "loading", "warming", "ready"})


class Elsewhere(unittest.TestCase):
    def test_what_is_no_server_of_ours(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                code, body = self.server.answer
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass
        with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
            threading.Thread(target=other.serve_forever, daemon=True).start()
            for answer in ((200, b"<html>"), (200, b"[]"), (200, b"{}"), (401, b"go away"), (401, b'{"error": 3}'), (500, b""), (404, b'{"error": {"message": "no", "code": "route_not_found"}}')):
                other.answer = answer
                done = ctl("status", "--target", f"http://127.0.0.1:{other.server_port}")
                self.assertEqual((done[0], done[1]), (1, ""), done)
                self.assertIn("is no admin port of parvl", done[2])
            other.shutdown()


class Drain(unittest.TestCase):
    def test_a_drained_instance_finishes_what_it_has_and_ends(self):
        need_model()
        with PoolServer() as server:
            codes = []
            threads = [threading.Thread(target=lambda: codes.append(server.chat(messages=ask("count"), max_tokens=900, ignore_eos=True)[0])) for _ in range(16)]
            for thread in threads:
                thread.start()
            busy = server.wait_for(lambda s: s["instances"][0]["running"] > 0)[-1]["instances"][0]
            draining = threading.Thread(target=lambda: codes.append(ctl("drain", "--instance", "0", "--target", server.admin)[0]))
            draining.start()  # seen from here, since it may be over before ctl has ended
            seen = server.wait_for(lambda s: s["instances"][0]["state"] == "gone")
            draining.join()
            self.assertIn("draining", {status["instances"][0]["state"] for status in seen})
            for thread in threads:
                thread.join()
            self.assertEqual(sorted(codes), [0] + [200] * 16)
            with self.assertRaises(ProcessLookupError):
                os.kill(busy["pids"][0], 0)
            self.assertEqual(seen[-1]["instances"][0]["pids"], [], "a number that another process may have by now")
            self.assertEqual(ctl("drain", "--instance", "0", "--target", server.admin)[0::2], (1, f"parvl: '{server.admin}': instance 0 is gone already"))
            self.assertEqual(server.chat(messages=ask("more"), max_tokens=2)[0], 200)
            self.assertEqual(server.stop(), 0)


class Tokens(unittest.TestCase):
    def test_roles(self):
        need_model()
        with PoolServer("--api-key", "key", admin={"tokens": TOKENS}) as server:
            for path, expected in (("/", 200), ("/livez", 200), ("/status", 401), ("/nothing", 401)):
                self.assertEqual(server.ask_admin("GET", path)[0], expected, path)
            for token, expected in [(token, 200) for token in TOKENS.values()] + [("key", 401), ("look-onlY", 401), ("", 401)]:
                self.assertEqual(server.ask_admin("GET", "/status", {"Authorization": f"Bearer {token}"})[0], expected, token)
            for role, expected in (("viewer", 403), ("operator", 404), ("approver", 404)):
                self.assertEqual(server.ask_admin("POST", "/drain?instance=9", {"Authorization": f"Bearer {TOKENS[role]}"})[0], expected, role)
            for arguments, environment, code, says in (((), {}, 1, "an admin token is needed"), (("--token", "x"), {}, 1, "the admin token is not valid"),
                                                       ((), {"PARVL_ADMIN_TOKEN": "look-only"}, 0, ""), (("--token", "may-do"), {}, 0, "")):
                done = ctl("status", "--target", server.admin, *arguments, **environment)
                self.assertEqual(done[0], code, done)
                self.assertIn(says, done[2])
            done = ctl("drain", "--instance", "0", "--target", server.admin, "--token", "look-only")
            self.assertEqual((done[0], "may only read" in done[2]), (1, True), done)
            self.assertIn("is no admin port", ctl("status", "--target", server.url)[2])

    def test_no_port_for_everybody(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "allocation.yaml"
            path.write_text(json.dumps(allocation(), indent=1)[:-2] + ',\n "admin": {\n  "host": "0.0.0.0"\n }\n}\n')
            line = path.read_text().split("\n").index('  "host": "0.0.0.0"') + 1
            done = subprocess.run([PARVL, "serve", "--model", MODEL,
                                   "--port", "0", "--config", path, "--device-map", "gpu-40gb=cpu"], capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"{path}:{line}: 'admin.host': 0.0.0.0 can be reached from other machines; give admin.tokens", done.stderr.strip().split("\n")[-1])


if __name__ == "__main__":
    unittest.main()
