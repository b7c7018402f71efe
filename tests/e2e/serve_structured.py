"""Answers of a required form from a running server: JSON schemas, calls of tools, through the official `openai` client. The model
has learned other things, so that what holds here holds for any model: its answers are chosen at random among what is allowed."""
# slow
import json
import tempfile
import unittest

import jsonschema_rs
import openai

from serve_common import Server, ask, data_uri, need_model, png
from tool_models import HERMES, LLAMA, TOOL_CALL, TOOLS, model_with

SCHEMAS = [
    {"type": "object", "properties": {"zeta": {"type": "string", "maxLength": 6}, "alpha": {"type": "integer", "minimum": 0, "maximum": 150},
                                      "tags": {"type": "array", "items": {"enum": ["a/b", "é\"", None, 1.5]}, "maxItems": 3}},
     "required": ["zeta", "alpha"]},
    {"type": "array", "items": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}, "minItems": 1, "maxItems": 3},
    {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                     "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/n"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "pattern": "^[a-c]+\\d{2,3}$"},
    {"type": ["integer", "null", "string"], "minimum": -3, "exclusiveMinimum": -3, "maxLength": 4},
    {"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"type": "null"}}, "additionalProperties": {"type": "boolean"},
     "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer", "multipleOf": 7}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"const": {"k": "v"}}, "propertyNames": {"pattern": "^[a-z]{2}$"}, "maxProperties": 2},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "x"}, "n": {"type": "integer"}}, "required": ["kind", "n"]},
               {"type": "object", "properties": {"kind": {"const": "y"}, "s": {"type": "string", "minLength": 1, "maxLength": 5}},
                "required": ["kind", "s"]}]},
    {"type": "array", "prefixItems": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 3}], "items": False, "minItems": 2},
]
PARAMETERS = {"get_weather": TOOLS[0]["function"]["parameters"], "now": {"type": "object", "additionalProperties": False}}
USER = [{"role": "user", "content": "what is the weather?"}]


class Structured(unittest.TestCase):
    template = HERMES

    @classmethod
    def setUpClass(cls):
        need_model()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.server = Server(model=model_with(cls.template, folder))
        cls.addClassCleanup(cls.server.stop)
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0, timeout=120)
        cls.addClassCleanup(cls.client.close)

    def create(self, **fields):
        fields.setdefault("model", "tiny")
        fields.setdefault("messages", USER)
        fields.setdefault("temperature", 1)
        return self.client.chat.completions.create(**fields)

    def streamed(self, **fields):
        """(text, calls, finish_reason) of one choice, put together from the pieces of a stream."""
        text, calls, finish = "", [], None
        for chunk in self.create(stream=True, **fields):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for piece in choice.delta.tool_calls or []:
                    if piece.id is not None:
                        self.assertEqual((piece.index, piece.type), (len(calls), "function"))
                        calls.append([piece.id, piece.function.name, ""])
                    calls[piece.index][2] += piece.function.arguments
                finish = choice.finish_reason or finish
        return text, calls, finish

    def check_calls(self, calls, at_least=1):
        self.assertGreaterEqual(len(calls), at_least)
        self.assertEqual(len({call.id for call in calls}), len(calls))
        for call in calls:
            self.assertEqual(call.type, "function")
            jsonschema_rs.validate(PARAMETERS[call.function.name], json.loads(call.function.arguments))


class Hermes(Structured):
    def test_every_answer_is_valid(self):
        ended = 0
        for number, schema in enumerate(SCHEMAS):
            validator = jsonschema_rs.validator_for(schema, validate_formats=schema.get("format") != "date-time")
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
            for choice in self.create(response_format=form, n=24, seed=number, max_tokens=150).choices:
                self.assertIn(choice.finish_reason, ("stop", "length"))
                if choice.finish_reason == "stop":
                    ended += 1
                    value = json.loads(choice.message.content)
                    self.assertTrue(validator.is_valid(value), (schema, choice.message.content))
        self.assertGreater(ended, len(SCHEMAS) * 12)

    def test_keys_come_in_the_order_of_the_schema(self):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[0]}}
        value = json.loads(self.create(response_format=form, seed=1).choices[0].message.content)
        self.assertEqual(list(value)[:2], ["zeta", "alpha"])

    def test_json_object_about_an_image(self):
        reply = self.create(messages=ask("what is it?", data_uri(png())), response_format={"type": "json_object"}, seed=4, n=16, max_tokens=200)
        whole = [choice for choice in reply.choices if choice.finish_reason == "stop"]
        self.assertTrue(whole)
        for choice in whole:
            self.assertIsInstance(json.loads(choice.message.content), dict)

    def test_ends_where_the_form_is_complete(self):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["red", "green"]}}}
        for extra in ({}, {"ignore_eos": True}, {"min_tokens": 30}):
            choice = self.create(response_format=form, max_tokens=60, extra_body=extra).choices[0]
            self.assertIn(json.loads(choice.message.content), ("red", "green"))
            self.assertEqual(choice.finish_reason, "stop")

    def test_cut_by_max_tokens(self):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "string", "minLength": 50}}}
        self.assertEqual(self.create(response_format=form, max_tokens=5).choices[0].finish_reason, "length")

    def test_bias_does_not_overrule_the_form(self):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "boolean"}}}
        choice = self.create(response_format=form, logit_bias={str(token): 100 for token in range(300, 320)}).choices[0]
        self.assertIn(choice.message.content, ("true", "false"))

    def test_logprobs_are_those_of_the_model(self):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"const": True}}}
        fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 4}
        first = self.create(response_format=form, **fields).choices[0].logprobs.content[0]
        free = self.create(**fields).choices[0].logprobs.content[0]
        self.assertEqual([entry.token for entry in first.top_logprobs], [entry.token for entry in free.top_logprobs])
        self.assertLess(first.logprob, -0.1)

    def test_completions_and_other_spellings(self):
        reply = self.client.completions.create(model="tiny", prompt="answer: ", max_tokens=40, extra_body={"structured_outputs": {
            "choice": ["yes", "no"]}})
        self.assertIn(reply.choices[0].text, ("yes", "no"))
        reply = self.client.completions.create(model="tiny", prompt="answer: ", max_tokens=40, extra_body={"guided_json": {"type": "boolean"}})
        self.assertIn(reply.choices[0].text, ("true", "false"))
        reply = self.create(extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})
        self.assertRegex(reply.choices[0].message.content, r"\A[0-9]{3}\Z")

    def test_a_call_cut_by_a_stop_string_is_not_whole(self):
        fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 600, "seed": 3}
        for stop in ('"arguments"', "</tool_call>"):  # behind the name, and in front of the end
            choice = self.create(stop=[stop], **fields).choices[0]
            self.assertEqual((choice.finish_reason, len(choice.message.tool_calls)), ("stop", 1))
            _, calls, finish = self.streamed(stop=[stop], **fields)
            self.assertEqual((finish, len(calls)), ("stop", 1))

    def test_required_calls(self):
        for seed in range(12):
            choice = self.create(tools=TOOLS, tool_choice="required", seed=seed, max_tokens=600).choices[0]
            if choice.finish_reason == "length":
                continue
            self.assertEqual(choice.finish_reason, "tool_calls")
            self.assertIsNone(choice.message.content)
            self.check_calls(choice.message.tool_calls)

    def test_streamed_calls_are_the_same(self):
        for seed in range(6):
            fields = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 600}
            message = self.create(**fields).choices[0].message
            text, calls, finish = self.streamed(**fields)
            self.assertEqual(text, "")
            self.assertEqual([call[1:] for call in calls], [[call.function.name, call.function.arguments] for call in message.tool_calls])
            self.assertIn(finish, ("tool_calls", "length"))

    def test_named_function_and_one_call(self):
        choice = self.create(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}, seed=5).choices[0]
        self.assertEqual([call.function.name for call in choice.message.tool_calls], ["get_weather"])
        self.check_calls(choice.message.tool_calls)
        for seed in range(4):
            choice = self.create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, max_tokens=300).choices[0]
            self.assertEqual(len(choice.message.tool_calls), 1)

    def test_auto_may_answer_in_text(self):
        reply = self.create(tools=TOOLS, seed=3, max_tokens=20)
        self.assertEqual(reply.choices[0].finish_reason, "stop")
        self.assertTrue(reply.choices[0].message.content)
        self.assertIsNone(reply.choices[0].message.tool_calls)

    def test_auto_constrains_once_a_call_began(self):
        bias = {str(TOOL_CALL): 100}  # so that the text begins a call; what follows is the grammar's doing
        for seed in range(8):
            fields = {"tools": TOOLS, "parallel_tool_calls": False, "seed": seed, "logit_bias": bias, "max_tokens": 300}
            choice = self.create(**fields).choices[0]
            self.assertEqual((choice.finish_reason, choice.message.content), ("tool_calls", None))
            self.assertEqual(len(choice.message.tool_calls), 1)
            self.check_calls(choice.message.tool_calls)
            text, calls, finish = self.streamed(**fields)
            self.assertEqual((text, calls[0][1:], finish), ("", [choice.message.tool_calls[0].function.name,
                                                                choice.message.tool_calls[0].function.arguments], "tool_calls"))
        choice = self.create(tools=TOOLS, tool_choice="none", logit_bias=bias, max_tokens=4).choices[0]
        self.assertEqual((choice.message.content, choice.message.tool_calls), ("<tool_call>" * 4, None))

    def test_calls_or_an_answer_of_the_form(self):
        schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        fields = {"tools": TOOLS, "parallel_tool_calls": False, "response_format": form, "max_tokens": 300}
        brace = self.server.request("POST", "/tokenize", {"prompt": "{", "add_special_tokens": False})[2]["tokens"]
        self.assertEqual(len(brace), 1)
        for seed in range(4):
            called = self.create(seed=seed, logit_bias={str(TOOL_CALL): 100}, **fields).choices[0]
            self.assertEqual((called.finish_reason, called.message.content), ("tool_calls", None))
            self.check_calls(called.message.tool_calls)
            answered = self.create(seed=seed, logit_bias={str(brace[0]): 100}, **fields).choices[0]
            self.assertEqual((answered.finish_reason, answered.message.tool_calls), ("stop", None))
            self.assertTrue(jsonschema_rs.is_valid(schema, json.loads(answered.message.content)), answered.message.content)

    def test_calls_in_history_reach_the_template(self):
        call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town": "Ulm", "days": 2}'}}
        messages = USER + [{"role": "assistant", "content": None, "tool_calls": [call]},
                           {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
        _, _, tokens = self.server.request("POST", "/tokenize", {"messages": messages})
        _, _, text = self.server.request("POST", "/detokenize", {"tokens": tokens["tokens"]})
        self.assertIn('<tool_call>\n{"name": "get_weather", "arguments": {"town": "Ulm", "days": 2}}\n</tool_call>', text["prompt"])
        self.assertIn("<tool_response>\nsunny\n</tool_response>", text["prompt"])
        self.assertIsNotNone(self.create(messages=messages, tools=TOOLS, max_tokens=10).choices[0].message)

    def test_what_is_wrong_is_said(self):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}}
        for fields, param, words in (
                ({"response_format": form}, "response_format", "'#/properties/a': the keyword 'not' is not supported; remove it"),
                ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
                ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "is missing"),
                ({"tools": TOOLS + TOOLS}, "tools", "twice"),
                ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
                ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "'other'"),
                ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
                ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": 1}}}]}, "tools",
                 "minProperties")):
            with self.assertRaises(openai.BadRequestError) as raised:
                self.create(**fields)
            self.assertEqual(raised.exception.param, param)
            self.assertIn(words, raised.exception.message)

    def test_the_server_says_which_form(self):
        self.assertTrue(any("tools: calls in the form hermes" in line for line in self.server.errors))


class Llama(Structured):
    template = LLAMA

    def test_a_form_beside_calls_that_are_json_themselves(self):
        with self.assertRaises(openai.BadRequestError) as raised:
            self.create(tools=TOOLS, response_format={"type": "json_object"})
        self.assertEqual(raised.exception.param, "response_format")
        self.assertIn("tool_choice", raised.exception.message)

    def test_one_call_in_its_form(self):
        for seed in range(6):
            fields = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 300}
            choice = self.create(**fields).choices[0]
            self.assertEqual(choice.finish_reason, "tool_calls")
            self.assertEqual(len(choice.message.tool_calls), 1)
            self.check_calls(choice.message.tool_calls)
            text, calls, finish = self.streamed(**fields)
            self.assertEqual((text, calls[0][2], finish), ("", choice.message.tool_calls[0].function.arguments, "tool_calls"))

    def test_the_server_says_which_form(self):
        self.assertTrue(any("llama3_json, one an answer" in line for line in self.server.errors))


class NoTools(unittest.TestCase):
    def test_a_template_without_tools(self):
        need_model()
        with Server() as server:
            for fields in ({"tools": TOOLS}, {"messages": USER + [{"role": "tool", "tool_call_id": "x", "content": "y"}]}):
                status, _, body = server.chat(**{"messages": USER, **fields})
                self.assertEqual(status, 400)
                self.assertIn("the chat template of this model knows no tools", body["error"]["message"])


del Structured  # only its subclasses are tests

if __name__ == "__main__":
    unittest.main()
