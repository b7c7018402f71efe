"""Images by http and https URL: a running server fetches them from a web server of this test."""
import http.server
import json
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

from serve_common import Server, ask, data_uri, need_model, png

QUESTION = "what color is the shape?"


class Site(http.server.BaseHTTPRequestHandler):
    """Pictures, one of which waits until the test lets it go, and redirects: /to/HOST:PORT/PATH."""
    pictures = {"/red.png": png(), "/blue.png": png(color=(20, 20, 220)), "/waits.png": png()}
    waiting, gate = threading.Semaphore(0), threading.Event()
    user_agents = set()

    def do_GET(self):
        Site.user_agents.add(self.headers["User-Agent"])
        if self.path == "/waits.png":
            Site.waiting.release()
            Site.gate.wait()
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", "http://" + self.path.removeprefix("/to/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = Site.pictures.get(self.path, b"no such picture")
        self.send_response(200 if self.path in Site.pictures else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def web_server(certificate=None):
    """A serving http.server; with (certificate, key), one that speaks TLS."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class ImagesByUrl(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.site = web_server()
        cls.addClassCleanup(cls.site.server_close)
        cls.addClassCleanup(cls.site.shutdown)
        cls.addClassCleanup(Site.gate.set)
        cls.port = cls.site.server_address[1]
        cls.server = Server("--allowed-private-media-hosts", "127.0.0.1,other.test", "--allowed-private-media-hosts", "localhost")
        cls.addClassCleanup(cls.server.stop)

    def url(self, path, host="127.0.0.1"):
        return f"http://{host}:{self.port}{path}"

    def image(self, *urls, server=None):
        """(status, error message or answer)."""
        status, _, body = (server or self.server).chat(messages=ask(QUESTION, *urls), max_tokens=4, temperature=0)
        return status, body["choices"][0]["message"]["content"] if status == 200 else body["error"]["message"]

    def refused(self, wanted, says, *urls, server=None):
        status, message = self.image(*urls, server=server)
        self.assertEqual(status, wanted, message)
        self.assertIn(says, message)

    def test_answers_are_about_the_picture(self):
        red, blue = (self.image(data_uri(Site.pictures[path])) for path in ("/red.png", "/blue.png"))
        self.assertEqual(red, (200, "red"))
        self.assertNotEqual(red, blue)
        self.assertEqual(self.image(self.url("/red.png")), red)
        self.assertEqual(self.image(self.url("/blue.png", "localhost")), blue)
        self.assertEqual(self.image(self.url(f"/to/localhost:{self.port}/red.png")), red)
        self.assertEqual(Site.user_agents, {"parvl/" + self.server.request("GET", "/version")[2]["version"]})

    def test_what_is_refused(self):
        self.refused(422, "image 2 of 2", self.url("/red.png"), self.url("/none.png"))
        self.refused(422, "status 404", self.url("/none.png"))
        self.refused(400, "redirected", self.url(f"/to/127.0.0.2:{self.port}/red.png"))
        self.refused(400, "--allowed-private-media-hosts", "http://169.254.169.254/latest")
        self.refused(400, "user name", f"http://example:secret@127.0.0.1:{self.port}/red.png")

    def test_tokenize_fetches_too(self):
        status, _, body = self.server.request("POST", "/tokenize", {"messages": ask(QUESTION, self.url("/red.png"))})
        self.assertEqual(status, 200, body)
        status, _, without = self.server.request("POST", "/tokenize", {"messages": ask(QUESTION)})
        self.assertGreater(body["count"], without["count"])

    def test_a_slow_site_keeps_only_its_own_requests_waiting(self):
        """More requests than threads that decode wait for a site; a picture that needs no site is answered meanwhile."""
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(self.image(self.url("/waits.png")))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in threads:
            self.assertTrue(Site.waiting.acquire(timeout=60))
        self.assertEqual(self.server.chat(messages=ask(QUESTION), max_tokens=1)[0], 200)
        self.assertEqual(answers, [])
        Site.gate.set()
        for thread in threads:
            thread.join()
        self.assertEqual(answers, [(200, "red")] * len(threads))

    def test_domains(self):
        with Server("--allowed-media-domains", "localhost", "--allowed-private-media-hosts", "localhost,127.0.0.1") as server:
            self.assertEqual(self.image(self.url("/red.png", "localhost"), server=server), (200, "red"))
            self.refused(400, "--allowed-media-domains", self.url("/red.png"), server=server)
            self.refused(400, "--allowed-media-domains", self.url(f"/to/127.0.0.1:{self.port}/red.png", "localhost"), server=server)

    def test_certificates_are_verified(self):
        with tempfile.TemporaryDirectory() as folder:
            key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
            subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
                            "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
                           check=True, capture_output=True)
            site = web_server((certificate, key))
        self.addCleanup(site.server_close)
        self.addCleanup(site.shutdown)
        self.refused(422, "certificate is not trusted", f"https://localhost:{site.server_address[1]}/red.png")

    def test_a_client_that_leaves_ends_its_fetch(self):
        stuck = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
        self.addCleanup(stuck.close)
        url = f"http://127.0.0.1:{stuck.getsockname()[1]}/red.png"
        client = self.server.connect()
        client.request("POST", "/v1/chat/completions", json.dumps({"messages": ask(QUESTION, url)}))
        fetch, _ = stuck.accept()
        self.addCleanup(fetch.close)
        fetch.settimeout(60)
        while not fetch.recv(4096).endswith(b"\r\n\r\n"):
            pass
        begin = time.monotonic()
        client.close()
        self.assertEqual(fetch.recv(4096), b"")  # the server has given it up
        self.assertLess(time.monotonic() - begin, 5)  # and not after the ten seconds of a fetch

    def test_sigterm_does_not_wait_for_a_site(self):
        stuck = http.server.HTTPServer(("127.0.0.1", 0), Site)  # takes connections and never answers
        self.addCleanup(stuck.server_close)
        server = Server("--allowed-private-media-hosts", "127.0.0.1", "--shutdown-timeout", "0")
        replies = []
        url = f"http://127.0.0.1:{stuck.server_address[1]}/red.png"
        thread = threading.Thread(target=lambda: replies.append(server.chat(messages=ask(QUESTION, url))[0]))
        thread.start()
        stuck.socket.accept()  # the fetch has begun
        begin = time.monotonic()
        self.assertEqual(server.stop(), 0)
        self.assertLess(time.monotonic() - begin, 5)  # and not the ten seconds of a fetch
        thread.join()


if __name__ == "__main__":
    unittest.main()
