#!/usr/bin/env python3
"""Prints requests and the tokens that vLLM would run for them, one JSON object a line.

    engine_tokens.py COUNT SEED FOLDER ...

The handlers are vLLM's own (0.32): ChatCompletionRequest (entrypoints/openai/chat_completion/protocol.py),
parse_chat_messages (renderers/chat_utils.py), safe_apply_chat_template and the detection of the content format
(renderers/hf.py), with the tokenizer as transformers loads it. No model and no server runs.
"""

import json
import os
import random
import sys
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

TEXTS = [
    "Why is the sky blue?", "Grüße, 世界! 🙂 👩‍👩‍👧", "def f(x):\n    return x ** 2  # tab\there\n", "   ", "\n\n  leading and trailing  \n",
    "1234567890 + 3.14159e-10 = ?", "<|user|> is no role here <|end|>", "I'm, you're, they'VE", "a" * 700, "Zürich\u00a0naïve e\u0301 \u200b\ufeff",
    "{{ messages }} {% raw %}", "\\\"quoted\\\" 'single' \"double\"", "مرحبا بالعالم", "tab\t\ttab\r\nCRLF", "𝕬𝖇𝖈 ﬁ ½",
]
WORDS = "the of and to in is you that it he was for on are as with his they I at be this have from or one had by word".split()


def text(draw):
    kind = draw.random()
    if kind < 0.4:
        return draw.choice(TEXTS)
    if kind < 0.9:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 120)))
    return "".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0xA0, 0x3000)])) for _ in range(draw.randrange(1, 60)))


def content(draw):
    if draw.random() < 0.7:
        return text(draw)
    return [{"type": "text", "text": text(draw)} for _ in range(draw.randrange(1, 4))]


def call(draw, number):
    arguments = {"z": draw.randrange(-5, 10**12), "a": [draw.choice([True, None, 1.5, 0.0001, "x<&>é"])], "m": {"é": text(draw)}}
    written = draw.choice([json.dumps(arguments), json.dumps(arguments, indent=2, ensure_ascii=False), "", "[1]"])
    return {"function": {"name": f"f{number}", "arguments": written}, "type": "function", "id": f"call_{number}"}


def chat(draw):
    messages = []
    if draw.random() < 0.6:
        messages.append({"role": "system", "content": content(draw)})
    for turn in range(draw.randrange(1, 6)):
        messages.append({"role": "user", "content": content(draw)})
        if draw.random() < 0.2:
            messages[-1]["name"] = "nina"
        kind = draw.random()
        if kind < 0.3:
            calls = [call(draw, number) for number in range(draw.randrange(1, 3))]
            messages.append({"content": draw.choice([None, text(draw)]), "role": "assistant", "tool_calls": calls})
            messages.extend({"role": "tool", "tool_call_id": each["id"], "content": content(draw)} for each in calls)
        elif kind < 0.8:
            answer = {"role": "assistant", "content": content(draw)}
            if draw.random() < 0.3:
                answer[draw.choice(["reasoning", "reasoning_content"])] = text(draw)
            messages.append(answer)
    body = {"model": "m", "messages": messages, "temperature": draw.random(), "max_tokens": 5}
    if draw.random() < 0.3:
        schema = {"type": "object", "properties": {"z": {"type": "integer", "enum": [3, 1, 2.5]}, "a": {"description": text(draw)}}}
        tools = [{"function": {"parameters": schema, "name": "f0", "description": text(draw)}, "type": "function"},
                 {"type": "function", "function": {"name": "f1", "strict": True}}]
        body["tools"] = tools[: draw.randrange(1, 3)]
        if draw.random() < 0.5:
            body["tool_choice"] = "auto"
    if draw.random() < 0.15:
        body["documents"] = [{"title": "t", "text": text(draw)}]
    if draw.random() < 0.2:
        body["chat_template_kwargs"] = draw.choice([{"enable_thinking": False}, {"style": {"a": [1, None]}}, {"unused": "x"}, {"style": "auto"}])
    if draw.random() < 0.2:
        body["reasoning_effort"] = draw.choice(["none", "low", "high"])
    kind = draw.random()
    if kind < 0.1:
        body["add_generation_prompt"] = False
    elif kind < 0.3 and messages[-1]["role"] == "assistant" and messages[-1]["content"]:
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if draw.random() < 0.1:
        body["add_special_tokens"] = draw.random() < 0.5
    return body


def completion(draw):
    body = {"model": "m", "prompt": text(draw) if draw.random() < 0.8 else [text(draw), text(draw)], "max_tokens": 5}
    if draw.random() < 0.3:
        body["add_special_tokens"] = draw.random() < 0.5
    return body


def chat_ids(body, tokenizer, config):
    request = ChatCompletionRequest(**json.loads(json.dumps(body)))
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False} if tools else {"tokenize": False})
    form = resolve_chat_template_content_format(
        None, params.chat_template_kwargs.get("tools"), "auto", tokenizer, model_config=config)
    conversation, _, _ = parse_chat_messages(request.messages, config, form)
    text = safe_apply_chat_template(config, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
    return tokenizer.encode(text, add_special_tokens=request.add_special_tokens)


def requests(folder, count, draw):
    """Prints requests for one folder; answers how many of them vLLM refuses."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hf = SimpleNamespace(model_type="llama")
    config = SimpleNamespace(
        enable_prompt_embeds=False, multimodal_config=None, tokenizer_revision=None, revision=None, code_revision=None,
        trust_remote_code=False, tokenizer=folder, model=folder, hf_config=hf, hf_text_config=hf,
        is_multimodal_model=False, allowed_local_media_path="", allowed_media_domains=None, renderer_num_workers=1,
    )
    refused = 0
    for number in range(count):
        is_chat = number % 5 != 0
        body = chat(draw) if is_chat else completion(draw)
        # No two prompts are equal.
        if is_chat:
            body["messages"][0]["content"] = f"{number} {text(draw)}"
        else:
            body["prompt"] = f"{number} {body['prompt']}" if isinstance(body["prompt"], str) else [str(number), "x"]
        try:
            if is_chat:
                ids = chat_ids(body, tokenizer, config)
            else:
                prompt = body["prompt"] if isinstance(body["prompt"], str) else body["prompt"][0]
                ids = tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens", True))
        except ValueError as error:
            # As the engine does: the template or transformers refuses the request.
            print(f"refused: {error}"[:200], file=sys.stderr)
            refused += 1
            continue
        written = json.dumps(body, ensure_ascii=draw.random() < 0.5)
        print(json.dumps({"folder": folder, "path": "chat" if is_chat else "completion", "body": written, "ids": ids}))
    return refused


def main():
    count, draw, folders = int(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3:]
    refused = sum(requests(folder, count, draw) for folder in folders)
    print(f"{refused} requests of {count * len(folders)} were refused", file=sys.stderr)


main()
