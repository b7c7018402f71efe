"""The dashboard page of the admin port in a real browser: it shows the instances, follows what becomes of them, and says when nobody answers."""
# slow
import json
import os
import signal
import unittest

from browser import Browser, find_browser
from pool_server import PoolServer
from serve_common import ask, data_uri, need_model, png

STATES = "[...document.querySelectorAll('#instances tr')].map(row => row.children[1].textContent)"
ROW_1 = "[...document.querySelectorAll('#instances tr')[1].children].map(cell => cell.textContent)"
COLOR = "getComputedStyle(document.body).backgroundColor"


@unittest.skipUnless(find_browser(), "no Chromium here (Debian's package chromium, or CHROMIUM)")
class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()

    def test_it_follows_the_server(self):
        with PoolServer() as server, Browser() as browser:
            server.chat(messages=ask("what color?", data_uri(png())), max_tokens=5)
            browser.open(server.admin)
            browser.wait_for(f"{STATES}.join() === 'ready,ready'")
            self.assertEqual(browser.value("document.querySelector('#gateway').textContent"), "ready")
            self.assertEqual(browser.value("[...document.querySelectorAll('#pools tr')].map(row => row.firstChild.textContent)"), ["llm-pool"])
            self.assertEqual(browser.value("[...document.querySelectorAll('#modules th')].map(cell => cell.textContent)"),
                             ["vision_encoder", "projector", "llm_backbone"])
            browser.wait_for("document.querySelector('#ttft50').textContent.endsWith('s')")
            light = browser.value(COLOR)
            browser.dark(True)
            self.assertNotEqual(browser.value(COLOR), light)
            browser.dark(False)
            if folder := os.environ.get("PARVL_PICTURES"):
                browser.picture(f"{folder}/light.png")

            before = server.status()["instances"][1]
            os.kill(before["pids"][0], signal.SIGKILL)
            browser.wait_for("document.querySelector('#news').textContent.includes('instance 1 failed')")
            if folder:
                browser.dark(True)
                browser.picture(f"{folder}/dark.png")
            browser.wait_for(f"{STATES}.join() === 'ready,ready' && document.querySelector('#news').textContent.includes('instance 1 is ready')")
            row = browser.value(ROW_1)
            self.assertEqual((row[0], int(row[3]), row[10]), ("1", before["epoch"] + 1, "1"))
            self.assertNotEqual(row[4], str(before["pids"][0]))
            self.assertRegex(row[11], "connection|process")
            self.assertEqual(browser.problems, [])

            server.stop()
            self.assertIn("gives no answer since", browser.wait_for("document.querySelector('#trouble').textContent"))
            self.assertEqual(browser.value("document.querySelector('#gateway').textContent"), "no answer")
            self.assertEqual(browser.value(f"{STATES}.length"), 2)
            if folder:
                browser.picture(f"{folder}/silent.png")

    def test_it_asks_for_a_token(self):
        with PoolServer(admin={"tokens": {"viewer": "look-only"}}) as server, Browser() as browser:
            browser.open(server.admin)
            browser.wait_for("!document.querySelector('#ask').hidden")
            self.assertEqual(browser.value("document.querySelector('#instances').children.length"), 0)
            browser.value(f"document.querySelector('#token').value = {json.dumps('look-only')}; document.querySelector('#ask button').click()")
            browser.wait_for(f"{STATES}.join() === 'ready,ready'")
            self.assertTrue(browser.value("document.querySelector('#ask').hidden"))


if __name__ == "__main__":
    unittest.main()
