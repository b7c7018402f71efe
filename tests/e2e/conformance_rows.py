"""What runs the rows of conformance_table.py: a server for a class of them, a count of those that hold, the form of an error."""
from unittest import TestCase

from serve_common import Server, need_model


class Rows(TestCase):
    """Runs rows as subtests and tells how many there were."""

    flags = ("--limit-mm-per-prompt", "image=3", "--max-body-bytes", "2000000")  # None: no server for all of them

    @classmethod
    def setUpClass(cls):
        need_model()
        cls.counts = {}
        if cls.flags is not None:
            cls.server = Server(*cls.flags)
            cls.addClassCleanup(cls.server.stop)

    @classmethod
    def tearDownClass(cls):
        print("\nconformance: rows passed")
        for name, (passed, rows) in cls.counts.items():
            print(f"  {name:44} {passed:4} of {rows}")
        print(f"  {'in all':44} {sum(p for p, _ in cls.counts.values()):4} of {sum(r for _, r in cls.counts.values())}")

    def row(self, group, name, check, *arguments):
        passed, rows = self.counts.get(group, (0, 0))
        self.counts[group] = (passed, rows + 1)
        with self.subTest(group=group, row=name):
            check(*arguments)
            self.counts[group] = (passed + 1, rows + 1)

    def check_error(self, reply, status, param=None, code=None):
        got, headers, body = reply
        self.assertEqual(got, status, body)
        self.assertEqual(set(body), {"error"})
        error = body["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertTrue(0 < len(error["message"]) <= 1000)
        self.assertNotIn("\n", error["message"])
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        self.assertEqual(error["type"], kind.get(status, "server_error" if status >= 500 else "invalid_request_error"))
        if param is not None:
            self.assertEqual(error["param"], param, error)
        if code is not None:
            self.assertEqual(error["code"], code)
        self.assertIn("X-Request-Id", headers)
        self.assertEqual("Retry-After" in headers, status in (429, 503))
