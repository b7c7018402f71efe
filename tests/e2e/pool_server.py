"""A server whose instances are processes of their own, and its admin port."""
import http.client
import json
import pathlib
import tempfile
import time

from serve_common import Server


def allocation(encoders=0, **more):
    """Two instances with the backbone; the vision encoder is in each, or in a pool of its own."""
    pools = {"llm-pool": {"device": "gpu-40gb", "max_instances": 4}}
    encoder = {"pool": "llm-pool"}
    if encoders:
        pools["encoder-pool"] = {"device": "gpu-24gb", "max_instances": 2}
        encoder = {"pool": "encoder-pool", "replicas": encoders}
    modules = {"vision_encoder": encoder, "llm_backbone": {"pool": "llm-pool", "replicas": 2}}
    return {"cluster": {"gpu_pools": dict(sorted(pools.items()))}, "model": {"modules": modules}, **more}


class PoolServer(Server):
    """`parvl serve --config` on two instances; `admin` is the admin port's URL."""

    def __init__(self, *flags, encoders=0, **more):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "allocation.yaml"
            path.write_text(json.dumps(allocation(encoders, **more)))
            devices = "gpu-24gb=cpu,gpu-40gb=cpu" if encoders else "gpu-40gb=cpu"
            super().__init__("--config", path, "--device-map", devices, *flags)

    def _wait_ready(self, seconds=120):
        url = super()._wait_ready(seconds)
        words = self.ready_line.split()
        assert words[:2] == ["parvl", "ready"] and words[3] == "admin" and len(words) == 5, self.ready_line
        self.admin = words[4]
        return url

    def ask_admin(self, method, path, headers=None, body=None):
        connection = http.client.HTTPConnection(self.admin.removeprefix("http://"), timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            text = reply.read().decode()
            return reply.status, dict(reply.getheaders()), json.loads(text) if text.startswith("{") else text
        finally:
            connection.close()

    def status(self, headers=None):
        code, _, status = self.ask_admin("GET", "/status", headers)
        assert code == 200, status
        return status

    def wait_for(self, condition, seconds=60):
        """The first status that fulfils `condition`, and all before it."""
        seen = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            seen.append(self.status())
            if condition(seen[-1]):
                return seen
            time.sleep(0.05)
        raise AssertionError(f"never came: {seen[-1]}")
