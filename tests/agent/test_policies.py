"""Policies: an endpoint over real HTTP, a local engine in batches, and how a state is shortened."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.agent import react
from pipeline.agent.context import shorten
from pipeline.agent.endpoint import connect, cut_at_stop
from pipeline.agent.environments.desks import stock_tools
from pipeline.agent.loop import run_episode, run_episodes
from pipeline.agent.policies import ContextOverflow, LocalPolicy, Reply, Request, ScriptedPolicy
from pipeline.agent.tasks import Settings, Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.agent.turns import Call, Message
from pipeline.errors import ConfigError
from pipeline.lm.jobs import Generation
from pipeline.tools.base import ToolSpec, one_string

CHAT = Settings(protocol="chat", instructions="Help.")


class Server:
    """A small OpenAI-compatible server whose answers a test decides."""

    def __init__(self):
        self.answer = lambda path, body: (200, {})
        self.requests = []
        self.content_type = "application/json"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                status, answer = outer.answer(self.path, body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", outer.content_type)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # a client that did not wait
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def completion(content=None, calls=(), finish="stop"):
    tool_calls = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls or None}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    return 200, {**head, "choices": [choice], "usage": usage}


def test_endpoint_structured_calls(server):
    def answer(path, body):
        if len(body["messages"]) == 2:
            return completion(calls=[("id7", "stock", '{"sku": "SKU-11"}')])
        return completion("Order nothing.")

    server.answer = answer
    policy = connect(server.url, "m")
    result = run_episode(Task("SKU-11?"), policy, EnvironmentTools(stock_tools()), CHAT)
    assert (result.exit_reason, result.answer, result.steps) == ("finished", "Order nothing.", 2)
    assert (result.tokens_in, result.tokens_out) == (180, 20)
    second = server.requests[1]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][3]["tool_call_id"] == "id7"
    sent = second["messages"][2]["tool_calls"][0]["function"]
    assert sent == {"name": "stock", "arguments": '{"sku": "SKU-11"}'}
    assert {tool["function"]["name"] for tool in second["tools"]} == {"stock", "incoming"}


def test_endpoint_sends_broken_arguments_back_as_they_were(server):
    turns = [completion(calls=[("i", "stock", '{"sku": ')]), completion("Sorry.")]
    server.answer = lambda path, body: turns[(len(body["messages"]) - 2) // 2]
    policy = connect(server.url, "m")
    result = run_episode(Task("q"), policy, EnvironmentTools(stock_tools()), CHAT)
    sent = server.requests[1]["messages"]
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"sku": '
    assert "not valid JSON" in sent[3]["content"]
    assert result.calls == {}


def test_endpoint_required_choice_only_until_the_first_call(server):
    turns = [completion(calls=[("i", "stock", '{"sku": "SKU-11"}')]), completion("Done.")]
    server.answer = lambda path, body: turns[(len(body["messages"]) - 2) // 2]
    settings = Settings(protocol="chat", instructions="x", tool_choice="stock")
    run_episode(Task("q"), connect(server.url, "m"), EnvironmentTools(stock_tools()), settings)
    assert server.requests[0]["tool_choice"] == {"type": "function", "function": {"name": "stock"}}
    assert server.requests[1]["tool_choice"] == "auto"


def test_endpoint_react_goes_as_a_conversation_with_stop_strings(server):
    turns = [completion("Thought: a\nAction: stock[SKU-11]"), completion("Final Answer: no")]
    server.answer = lambda path, body: turns[(len(body["messages"]) - 2) // 2]
    settings = Settings(instructions="x")
    policy = connect(server.url, "m")
    result = run_episode(Task("q"), policy, EnvironmentTools(stock_tools()), settings)
    assert result.answer == "no"
    assert server.requests[0]["stop"] == ["\nObservation", "\nQuestion:"]
    assert server.requests[1]["messages"][3]["content"].startswith("Observation: {")


def test_endpoint_that_returns_its_stop_strings_is_cut():
    stop = ("\nObservation", "\nQuestion:")
    assert cut_at_stop("Action: a[b]\nObservation", stop) == "Action: a[b]"
    assert cut_at_stop("Observation", stop) == ""
    assert cut_at_stop("a\nQuestion: b\nObservation", stop) == "a"
    assert cut_at_stop("no Observation", stop) == "no Observation"
    assert cut_at_stop("a -> b", ("->",)) == "a "


def test_endpoint_completions_continue_a_text(server):
    def answer(path, body):
        assert path.endswith("/v1/completions")
        text = " 888 bottles." if body["prompt"].endswith("888]") else " [Calculator(37 * 24) ->"
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        head = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
        return 200, {**head, "choices": [choice]}

    from pipeline.tools.calculator import Calculator

    server.answer = answer
    settings = Settings(protocol="inline")
    box = EnvironmentTools([Calculator()])
    policy = connect(server.url, "m", api="completions")
    result = run_episode(Task("12 crates make"), policy, box, settings)
    assert result.answer == "888 bottles."
    assert server.requests[1]["prompt"] == "12 crates make [Calculator(37 * 24) -> 888]"
    with pytest.raises(ConfigError, match="completions"):
        run_episode(Task("q"), connect(server.url, "m"), box, settings)


def test_endpoint_that_is_down_slow_or_broken_ends_its_run(server):
    box = EnvironmentTools([])
    down = connect("http://127.0.0.1:9/v1", "m", retries=0)
    result = run_episode(Task("q"), down, box, CHAT)
    assert result.exit_reason == "model_error" and "cannot be reached" in result.detail

    server.answer = lambda path, body: time.sleep(1) or completion("late")
    slow = connect(server.url, "m", retries=0, timeout_s=0.2)
    result = run_episode(Task("q"), slow, box, CHAT)
    assert result.exit_reason == "model_error" and "0.2" in result.detail

    def half(path, body):
        if body["messages"][1]["content"] == "bad":
            return 500, {"error": {"message": "boom"}}
        return completion("fine")

    server.answer = half
    policy = connect(server.url, "m", retries=0)
    results = run_episodes([Task("good", "0"), Task("bad", "1")], policy, box, CHAT)
    assert [r.exit_reason for r in results] == ["finished", "model_error"]
    assert "500" in results[1].detail

    server.answer = lambda path, body: (200, b"<html>")
    for content_type in ("application/json", "text/html"):
        server.content_type = content_type
        result = run_episode(Task("q"), policy, box, CHAT)
        assert result.exit_reason == "model_error"


@pytest.mark.parametrize(
    "error",
    [
        {"message": "This model's maximum context length is 10 tokens"},
        {"message": "too long", "code": "context_length_exceeded"},
    ],
)
def test_endpoint_context_overflow(server, error):
    server.answer = lambda path, _: (400, {"error": error})
    policy = connect(server.url, "m", retries=0)
    result = run_episode(Task("q"), policy, EnvironmentTools([]), CHAT)
    assert result.exit_reason == "context_overflow"


def test_endpoint_content_filter(server):
    server.answer = lambda path, _: completion("", finish="content_filter")
    policy = connect(server.url, "m", retries=0)
    assert run_episode(Task("q"), policy, EnvironmentTools([]), CHAT).exit_reason == "guardrail"


class Engine:
    """A generator that answers from its prompt, the last job first, and notes its jobs."""

    def __init__(self, answer, place=-1):
        self.answer, self.jobs, self.place = answer, [], place

    def serve(self, source):
        open_jobs = list(source([], False))
        while open_jobs:
            job = open_jobs.pop(self.place)
            self.jobs.append(job)
            text = self.answer(job.prompt)
            made = Generation(text, len(job.prompt), len(text), [], "eos")
            open_jobs += source([(job, made)], bool(open_jobs))


def test_local_policy_keeps_the_order_and_says_how_each_is_decoded():
    engine = Engine(lambda prompt: f" {prompt.splitlines()[0][-1]}")
    requests = [
        Request(
            (Message("user", f"Question: {n}"),),
            temperature=0.7 if n % 2 else 0.0,
            seed=n,
            stop=("\n",) * (n % 3),
            max_new_tokens=10 + n,
        )
        for n in range(6)
    ]
    replies = LocalPolicy(engine).ask(requests)
    assert [reply.text for reply in replies] == [f" {n}" for n in range(6)]
    for job, request in zip(reversed(engine.jobs), requests, strict=True):
        assert (job.temperature, job.seed) == (request.temperature, request.seed)
        assert (job.stop, job.max_new_tokens) == (request.stop, request.max_new_tokens)


def test_local_policy_runs_react_with_forced_prefixes():
    def answer(prompt):
        assert prompt.endswith("Thought:")
        return (
            " done.\nAction: Finish[4]" if "Observation:" in prompt else " x\nAction: stock[SKU-11]"
        )

    settings = Settings(instructions="Do.", prefixes=True)
    policy = LocalPolicy(Engine(answer))
    result = run_episode(Task("q"), policy, EnvironmentTools(stock_tools()), settings)
    assert (result.exit_reason, result.answer) == ("finished", "4")
    assert result.messages[2].content == "Thought: x\nAction: stock[SKU-11]"


def test_a_run_goes_on_while_the_tool_of_another_is_busy():
    release = threading.Event()

    def answer(prompt):
        steps = ["hold", "Finish"] if "first" in prompt else ["note", "open", "Finish"]
        return f" x\nAction: {steps[prompt.count('Observation:')]}[1]"

    tools = [
        Tool("hold", lambda: "held" if release.wait(10) else "given up"),
        Tool("note", lambda: "noted"),
        Tool("open", lambda: release.set() or "opened"),
    ]
    tasks = [
        Task(question, tools=lambda: EnvironmentTools(tools)) for question in ("first", "second")
    ]
    settings = Settings(instructions="Do.", prefixes=True)
    first, second = run_episodes(
        tasks, LocalPolicy(Engine(answer, 0)), EnvironmentTools([]), settings
    )
    assert [m.content for m in first.messages if m.role == "tool"] == ["held"]
    assert (first.exit_reason, second.exit_reason) == ("finished", "finished")


class Tool:
    """A tool that does what it is told."""

    def __init__(self, name, act):
        self.spec = ToolSpec(name, "1", name, one_string("text", "x"), timeout_s=30.0)
        self.act = act

    def run(self, arguments, document):
        return self.act()


def long_state():
    head = [Message("system", "s"), Message("user", "q")]
    steps = []
    for n in range(4):
        steps.append(Message("assistant", f"t{n}", (Call("a", "x", f"c{n}"),)))
        steps.append(Message("tool", f"r{n}" * 10, (), f"c{n}", "a", "observation"))
    return [*head, *steps]


def test_shortening_keeps_the_head_and_never_parts_a_call_from_its_result():
    state = long_state()
    before = list(state)
    kept = shorten(state, lambda messages: len(messages) <= 7)
    assert state == before
    assert [m.content[:2] for m in kept] == ["s", "q", "(2", "t2", "r2", "t3", "r3"]
    assert shorten(state, lambda messages: True) == state
    assert shorten(state, lambda messages: len(messages) <= 4) is None


def test_shortening_keeps_inline_text_together():
    head = [Message("user", "q")]
    first = [Message("assistant", "a ->"), Message("tool", " 1]", kind="inline")]
    second = [Message("assistant", " so b ->"), Message("tool", " 2]", kind="inline")]
    assert (
        shorten([*head, *first, *second, Message("assistant", ".")], lambda m: len(m) < 4) is None
    )


class Words:
    """A tokenizer that counts words."""

    chat_template = "{{ messages }}"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": text.split()}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, tools=None):
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"


def test_local_policy_shortens_the_prompt_and_overflows_when_it_cannot():
    seen = []
    engine = Engine(lambda prompt: seen.append(prompt) or "x")
    request = Request(tuple(long_state()), max_new_tokens=5)
    full = len(react.render(long_state()).split())
    policy = LocalPolicy(engine, Words(), context_tokens=full + 4)
    assert isinstance(policy.ask([request])[0], Reply)
    assert "earlier steps are not shown" in seen[0] and "t3" in seen[0] and "t0" not in seen[0]
    tiny = LocalPolicy(engine, Words(), context_tokens=8)
    assert isinstance(tiny.ask([request])[0], ContextOverflow)


def test_local_policy_describes_tools_to_a_template_that_knows_none():
    engine = Engine(lambda prompt: "x")
    policy = LocalPolicy(engine, Words())
    call = Call("stock", {"sku": "è"}, "c1")
    state = (
        Message("system", "Help."),
        Message("user", "q"),
        Message("assistant", "", (call,)),
        Message("tool", "4", (), "c1", "stock"),
    )
    specs = tuple(tool.spec for tool in stock_tools())
    prompt = policy.prompt(Request(state, specs, "chat"), state)
    assert '"name": "stock"' in prompt
    assert '<tool_call>{"name": "stock", "arguments": {"sku": "è"}}</tool_call>' in prompt
    assert "<user><tool_response>\n4\n</tool_response>\n<assistant>" in prompt


def test_a_script_that_is_over_is_a_model_error():
    result = run_episode(Task("q"), ScriptedPolicy(["nonsense"]), EnvironmentTools([]))
    assert (result.exit_reason, result.steps) == ("model_error", 2)
