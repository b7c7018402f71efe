"""What becomes of images while the instances that were to encode them are gone."""
# slow
import time
import unittest

from pools_common import LONG, POOLS, SMALL, Answer, Compared, KilledForGood, Pools, Waiting
from serve_common import Server, ask, data_uri, need_model, png

TIGHT_GB = 0.15  # what an LLM instance takes, and not half of an encoder's
ONE_ENCODER = POOLS.replace("replicas: 2", "replicas: 1").replace("replicas: 3", "replicas: 2")


class EncoderGone(Compared, unittest.TestCase):
    """One encode instance, which is gone, and two that generate."""

    @classmethod
    def setUpClass(cls):
        need_model()
        cls.picture = ask("what is in the picture?", data_uri(png()))
        with Server("--dtype", "float32") as one:
            cls.want = Answer(one, cls.picture, **LONG).read_all()

    def test_one_that_generates_takes_the_encoder_on(self):
        with Pools(ONE_ENCODER, *SMALL) as server:
            def added():
                return [one for one in server.status()["instances"] if one["pool"] == "llm-pool" and "vision_encoder" in one["modules"]]
            text = Answer(server, [{"role": "user", "content": "what color is it?"}], **{**LONG, "max_tokens": 900}).read_until(1)
            with KilledForGood(server, "encoder-pool") as dead:
                waiting = Waiting(server, self.picture, **LONG)
                server.wait_for(lambda: server.status()["pools"]["encoder-pool"]["queue"] == 1)
                self.assertEqual(added(), [])
                answer = waiting.result()
                self.assert_same(answer, self.want)
                # One of the pool's own may have begun it: it can be ready for a moment before it is killed.
                self.assertRegex(answer.usage["ran_on"]["vision_encoder"], r"^instance (0 of encoder-pool, then )?\d of llm-pool$")
                self.assertEqual(len(added()), 1)
                self.assertEqual(added()[0]["modules"], ["llm_backbone", "vision_encoder", "projector"])
                log = "".join(server.errors)
                self.assertRegex(log, r"instance \d of llm-pool takes on the vision encoder beside its modules, since no instance of encoder-pool is ready")
                self.assertRegex(log, r"instance \d of llm-pool encodes, too")
                self.assertGreaterEqual(len(dead.killed), 2, "it was not started again")
            text.read_all()
            self.assertEqual((text.error, text.done, len(text.tokens), " then " in text.usage["ran_on"]["llm_backbone"]), (None, True, 900, False))
            server.wait_for(lambda: server.status()["pools"]["encoder-pool"]["ready"] == 1)
            fresh = Answer(server, ask("and this?", data_uri(png(color=(9, 9, 9)))), **LONG).read_all()
            self.assertRegex(fresh.usage["ran_on"]["vision_encoder"], r"^instance \d of encoder-pool$", "the pool's own are asked first")
            self.assertEqual([one["failures"] for one in server.status()["instances"] if one["pool"] == "llm-pool"], [0, 0])

    def test_without_room_for_it_new_images_are_refused_and_text_goes_on(self):
        roomy = "llm-pool:     {device: gpu-40gb"
        tight = ONE_ENCODER.replace(roomy, "llm-pool:     {device: gpu-tight").replace("cluster:\n", "cluster:\n  device_classes: {gpu-tight: {memory_gb: %s}}\n" % TIGHT_GB)
        with Pools(tight, *SMALL, devices="gpu-24gb=cpu,gpu-tight=cpu") as server:
            self.refuse(server)
            self.assertEqual(self.parked.result().text, self.want.text, "it has waited for the encoder to come back")

    def refuse(self, server):
        with KilledForGood(server, "encoder-pool"):
            self.parked = Waiting(server, self.picture, **LONG)
            server.wait_for(lambda: "".join(server.errors).count("cannot take on the vision encoder, and goes on without") == 2)
            began = time.monotonic()
            status, _, body = server.chat(messages=ask("and this?", data_uri(png(color=(9, 9, 9)))), max_tokens=1)
            self.assertEqual((status, body["error"]["code"]), (503, "no_healthy_instance"))
            self.assertIn("encoder-pool: instance 0 is", body["error"]["message"])
            self.assertLess(time.monotonic() - began, 30, "it is not parked")
            self.assertEqual(server.status()["gateway"]["queue"], 0)
            text = Answer(server, [{"role": "user", "content": "what color is it?"}], **LONG).read_all()
            self.assertEqual((text.error, len(text.tokens)), (None, 48))
            self.assertEqual([one["failures"] for one in server.status()["instances"] if one["pool"] == "llm-pool"], [0, 0])


if __name__ == "__main__":
    unittest.main()
