"""The official `openai` client against a running server."""
import unittest

import openai

from serve_common import Server, ask, data_uri, need_model, png

QUESTION = "what color is the shape?"


class OpenAiClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        need_model()
        cls.server = Server("--api-key", "sesame")
        cls.addClassCleanup(cls.server.stop)
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="sesame", max_retries=0, timeout=60)
        cls.addClassCleanup(cls.client.close)

    def create(self, **fields):
        fields.setdefault("model", "tiny")
        fields.setdefault("messages", ask(QUESTION, data_uri(png())))
        fields.setdefault("max_tokens", 8)
        fields.setdefault("temperature", 0)
        return self.client.chat.completions.create(**fields)

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list()], ["tiny"])
        self.assertEqual(self.client.models.retrieve("tiny").id, "tiny")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("other")

    def test_answer_about_an_image(self):
        reply = self.create()
        self.assertEqual(len(reply.choices), 1)
        self.assertTrue(reply.choices[0].message.content)
        self.assertIn(reply.choices[0].finish_reason, ("stop", "length"))
        self.assertGreater(reply.usage.prompt_tokens, 0)
        self.assertGreater(reply.usage.completion_tokens, 0)
        self.assertEqual(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens)

    def test_stream_gives_the_same_answer(self):
        whole = self.create()
        chunks = list(self.create(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[-2].choices[0].finish_reason, whole.choices[0].finish_reason)
        self.assertIsNone(chunks[-2].choices[0].delta.content)
        self.assertEqual(chunks[-1].choices, [])
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):  # how many were cached may differ
            self.assertEqual(getattr(chunks[-1].usage, name), getattr(whole.usage, name))

    def test_text_alone(self):
        self.assertIsNotNone(self.create(messages=[{"role": "user", "content": "is it red?"}]).choices[0].message.content)

    def test_more_turns(self):
        messages = ask(QUESTION, data_uri(png())) + [{"role": "assistant", "content": "red"}] + ask("are you sure?")
        self.assertIsNotNone(self.create(messages=messages).choices[0].message.content)

    def test_same_seed_same_answer(self):
        fields = {"temperature": 1.5, "seed": 11, "max_tokens": 20, "extra_body": {"ignore_eos": True, "top_k": 50}}
        first, second = self.create(**fields), self.create(**fields)
        self.assertEqual(first.choices[0].message.content, second.choices[0].message.content)
        self.assertEqual(first.usage.completion_tokens, 20)
        self.assertEqual(first.choices[0].finish_reason, "length")

    def test_choices_have_seeds_of_their_own(self):
        fields = {"temperature": 1.5, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        reply = self.create(n=3, seed=11, **fields)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1, 2])
        alone = [self.create(seed=11 + i, **fields) for i in range(3)]
        self.assertEqual([choice.message.content for choice in reply.choices], [one.choices[0].message.content for one in alone])
        self.assertEqual(reply.usage.prompt_tokens, alone[0].usage.prompt_tokens)
        self.assertEqual(reply.usage.completion_tokens, 36)
        texts = {0: "", 1: "", 2: ""}
        for chunk in self.create(n=3, seed=11, stream=True, **fields):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        self.assertEqual(list(texts.values()), [choice.message.content for choice in reply.choices])

    def test_cached_tokens(self):
        fields = {"messages": ask("what is seen twice? " * 8), "extra_body": {"cache_salt": "test_cached_tokens"}}
        first, again = self.create(**fields), self.create(**fields)
        other = self.create(messages=fields["messages"], extra_body={"cache_salt": "another"})
        self.assertEqual(first.usage.prompt_tokens_details.cached_tokens, 0)
        self.assertGreater(again.usage.prompt_tokens_details.cached_tokens, 0)
        self.assertEqual(other.usage.prompt_tokens_details.cached_tokens, 0)
        self.assertEqual(again.choices[0].message.content, first.choices[0].message.content)

    def test_logprobs(self):
        reply = self.create(logprobs=True, top_logprobs=3)
        content = reply.choices[0].logprobs.content
        self.assertEqual(len(content), reply.usage.completion_tokens)
        for entry in content:
            self.assertLessEqual(entry.logprob, 0)
            self.assertEqual(len(entry.top_logprobs), 3)
            self.assertEqual(entry.top_logprobs[0].token, entry.token)  # greedy
            self.assertAlmostEqual(entry.top_logprobs[0].logprob, entry.logprob, places=4)

    def test_stop_string(self):
        text = self.create().choices[0].message.content
        shown = text[:1] if len(text) > 1 else ""
        reply = self.create(stop=text[len(shown):])
        self.assertEqual(reply.choices[0].message.content, shown)
        self.assertEqual(reply.choices[0].finish_reason, "stop")

    def complete(self, **fields):
        return self.client.completions.create(model="tiny", temperature=0, **fields)

    def test_completion(self):
        reply = self.complete(prompt="what color", max_tokens=6)
        self.assertEqual(reply.object, "text_completion")
        self.assertIn(reply.choices[0].finish_reason, ("stop", "length"))
        chunks = list(self.complete(prompt="what color", max_tokens=6, stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(chunk.choices[0].text for chunk in chunks if chunk.choices), reply.choices[0].text)
        self.assertEqual(chunks[-2].choices[0].finish_reason, reply.choices[0].finish_reason)
        self.assertEqual(chunks[-1].usage.completion_tokens, reply.usage.completion_tokens)

    def test_completions_of_many_prompts(self):
        headers = {"Authorization": "Bearer sesame"}
        _, _, tokens = self.server.request("POST", "/tokenize", {"prompt": "is it red?"}, headers)
        self.assertEqual(tokens["count"], len(tokens["tokens"]))
        _, _, text = self.server.request("POST", "/detokenize", {"tokens": tokens["tokens"]}, headers)
        self.assertEqual(text, {"prompt": "is it red?"})
        fields = {"max_tokens": 5, "extra_body": {"ignore_eos": True}}
        alone = [self.complete(prompt=prompt, **fields) for prompt in ("what color", "is it red?")]
        both = self.complete(prompt=["what color", "is it red?"], n=2, **fields)
        self.assertEqual([choice.text for choice in both.choices], [alone[i // 2].choices[0].text for i in range(4)])
        self.assertEqual(both.usage.prompt_tokens, sum(one.usage.prompt_tokens for one in alone))
        ids = self.complete(prompt=[tokens["tokens"], tokens["tokens"]], stream=True, **fields)
        texts = ["", ""]
        for chunk in ids:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        self.assertEqual(texts, [alone[1].choices[0].text] * 2)

    def test_completion_logprobs(self):
        reply = self.complete(prompt="what color", logprobs=2, max_tokens=4, extra_body={"ignore_eos": True})
        logprobs = reply.choices[0].logprobs
        self.assertEqual(len(logprobs.tokens), 4)
        shown = ["" if token.startswith("<|") else token for token in logprobs.tokens]  # special tokens are hidden
        self.assertEqual("".join(shown), reply.choices[0].text)
        self.assertEqual(logprobs.text_offset, [len("".join(shown[:i])) for i in range(4)])
        for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
            self.assertEqual(top[token], value)
            self.assertEqual(max(top.values()), value)  # greedy

    def test_tokens_of_messages_are_those_of_the_chat(self):
        messages = ask(QUESTION, data_uri(png()))
        status, _, tokens = self.server.request("POST", "/tokenize", {"messages": messages}, {"Authorization": "Bearer sesame"})
        self.assertEqual(status, 200)
        self.assertEqual(tokens["count"], self.create().usage.prompt_tokens)

    def test_errors_become_the_clients_exceptions(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.create(temperature=5)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.create(model="other")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.UnprocessableEntityError):
            self.create(messages=ask(QUESTION, data_uri(b"no image")))
        with self.assertRaises(openai.UnprocessableEntityError):  # before the stream begins
            self.create(messages=ask(QUESTION, data_uri(png()[:60])), stream=True)
        with self.assertRaises(openai.BadRequestError):
            self.create(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
        stranger = openai.OpenAI(base_url=self.server.url + "/v1", api_key="wrong", max_retries=0)
        with stranger, self.assertRaises(openai.AuthenticationError):
            stranger.models.list()

    def test_client_that_stops_reading_a_stream(self):
        stream = self.create(stream=True, max_tokens=200, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.assertTrue(self.create().choices[0].message.content)


if __name__ == "__main__":
    unittest.main()
