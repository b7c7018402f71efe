"""Rows of the contract on what an answer must look like: forms, calls of tools, echo, suffix (conformance_table.py)."""
# slow
import json
import tempfile
import unittest

import jsonschema_rs

import conformance_table as table
from conformance_rows import Rows
from serve_common import Server
from tool_models import HERMES, TOOLS, model_with


class Forms(Rows):
    """Answers of a required form, and what /v1/completions does with the text around them."""

    def check_form(self, path, prompt, fields, wanted):
        status, _, body = self.server.request("POST", path, prompt | {"max_tokens": 300, "temperature": 1, "seed": 1, "n": 4} | fields)
        self.assertEqual(status, 200, body)
        ended = [choice for choice in body["choices"] if choice["finish_reason"] == "stop"]
        self.assertTrue(ended)
        for choice in ended:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if isinstance(wanted, str):
                self.assertRegex(text, rf"\A(?:{wanted})\Z")
            else:
                jsonschema_rs.validate(wanted, json.loads(text))

    def test_forms(self):
        for path, prompt in (("/v1/chat/completions", {"messages": table.QUESTION}), ("/v1/completions", {"prompt": "hi"})):
            for name, fields, wanted in table.FORMS:
                self.row(f"{path} forms", name, self.check_form, path, prompt, fields, wanted)

    def texts(self, **fields):
        status, _, body = self.server.request("POST", "/v1/completions", {"max_tokens": 5, "temperature": 0} | fields)
        self.assertEqual(status, 200, body)
        return [choice["text"] for choice in body["choices"]]

    def test_echo(self):
        for prompt, shown in (("what is", ["what is"]), (["what", "is it"], ["what", "is it"]), ("köln ✓", ["köln ✓"])):
            self.row("echo", f"{prompt} comes first", lambda p=prompt, s=shown: self.assertEqual(
                self.texts(prompt=p, echo=True), [a + b for a, b in zip(s, self.texts(prompt=p))]))
        ids = self.server.request("POST", "/tokenize", {"prompt": "what is"})[2]["tokens"]
        self.row("echo", "the text of token ids", lambda: self.assertEqual(
            self.texts(prompt=ids, echo=True), ["what is" + text for text in self.texts(prompt=ids)]))
        self.row("echo", "every choice", lambda: self.assertTrue(
            all(text.startswith("what is") for text in self.texts(prompt="what is", echo=True, n=2))))
        self.row("echo", "not beside logprobs", lambda: self.check_error(self.server.request(
            "POST", "/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}), 400, param="echo", code="not_available_yet"))


class Calls(Rows):
    """Calls of tools and filling in, of a model that has learned neither and has the template and the tokens for both."""

    flags = None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = Server(model=model_with(HERMES, cls.enterClassContext(tempfile.TemporaryDirectory())))
        cls.addClassCleanup(cls.server.stop)

    def check_calls(self, fields, functions, count):
        status, _, body = self.server.chat(messages=table.QUESTION, tools=TOOLS, max_tokens=600, seed=2, **fields)
        self.assertEqual(status, 200, body)
        choice = body["choices"][0]
        message, calls = choice["message"], choice["message"].get("tool_calls")
        if not functions:
            self.assertIsNone(calls)
            self.assertTrue(message["content"])
            self.assertIn(choice["finish_reason"], ("stop", "length"))
            return
        self.assertEqual((choice["finish_reason"], message["content"]), ("tool_calls", None))
        self.assertEqual(len(calls), count or len(calls))
        self.assertEqual(len({call["id"] for call in calls}), len(calls))
        parameters = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}
        for call in calls:
            self.assertEqual((call["type"], set(call["function"])), ("function", {"name", "arguments"}))
            self.assertIn(call["function"]["name"], functions)
            jsonschema_rs.validate(parameters[call["function"]["name"]], json.loads(call["function"]["arguments"]))

    def test_calls(self):
        for name, fields, functions, count in table.CALLS:
            self.row("calls of tools", name, self.check_calls, fields, functions, count)

    def test_refusals(self):
        for fields, param in table.CALLS_REFUSED:
            self.row("calls of tools", f"{str(fields)[:70]} is refused", lambda f=fields, p=param: self.check_error(
                self.server.chat(messages=table.QUESTION, max_tokens=5, **f), 400, param=p))

    def test_messages(self):
        def taken(messages):
            status, _, body = self.server.chat(messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5)
            self.assertEqual(status, 200, body)
        for name, messages, param in table.CALLS_IN_MESSAGES:
            self.row("messages about calls", name, *((taken, messages) if param is None else (
                lambda m=messages, p=param: self.check_error(self.server.chat(messages=m), 400, param=p),)))

    def test_suffix(self):
        def completion(**fields):
            return self.server.request("POST", "/v1/completions", {"max_tokens": 5, "temperature": 0} | fields)

        def prompt_tokens(**fields):
            status, _, body = completion(**fields)
            self.assertEqual(status, 200, body)
            return body["usage"]["prompt_tokens"]
        self.row("suffix", "both parts and three tokens are the prompt", lambda: self.assertEqual(
            prompt_tokens(prompt="what", suffix="color"), prompt_tokens(prompt="what") + prompt_tokens(prompt="color") + 3))
        self.row("suffix", "an empty one is none", lambda: self.assertEqual(
            prompt_tokens(prompt="what", suffix=""), prompt_tokens(prompt="what")))
        self.row("suffix", "echo shows the prompt alone", lambda: self.assertTrue(
            completion(prompt="what", suffix="color", echo=True)[2]["choices"][0]["text"].startswith("what")))
        for fields in ({"suffix": 5}, {"suffix": []}, {"suffix": "x", "prompt": [1, 2]}):
            self.row("suffix", f"{fields} is refused", lambda f=fields: self.check_error(
                completion(**{"prompt": "what"} | f), 400, param="suffix"))


if __name__ == "__main__":
    unittest.main()
