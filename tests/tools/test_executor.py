"""The executor: names, arguments, cache, killable workers, retries, approval, safe results."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.tools.approval import ApprovalPolicy
from pipeline.tools.base import ERROR_KINDS, ToolError, ToolSpec, one_string
from pipeline.tools.cache import CachedResult, CacheKey, ResultCache
from pipeline.tools.calculator import Calculator
from pipeline.tools.calendar import Calendar
from pipeline.tools.executor import Executor
from pipeline.tools.user import FunctionConfig, build_function

SOURCE = '''
import os, sys, threading, time

def misbehave(how: str) -> str:
    """
    Does what it is told.

    Args:
        how: What to do.
    """
    if how == "loop":
        while True:
            pass
    if how == "sleep":
        time.sleep(60)
    if how == "die":
        os._exit(7)
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise KeyError("Roma\\n[x]")
    if how == "print":
        print("noise")
        os.write(1, b"noise")
    if how == "none":
        return None
    if how == "pid":
        return str(os.getpid())
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "wordless":
        raise Wordless
    if how == "long number":
        return 10**6000
    if how == "nested":
        value = []
        for _ in range(100_000):
            value = [value]
        return value
    if how == "huge":
        return "x" * 5_000_000
    if how == "late":
        threading.Timer(0.1, os._exit, (3,)).start()
    return how

class Wordless(Exception):
    def __str__(self):
        raise ValueError
'''


@pytest.fixture
def misbehaving(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, "utf-8")
    return build_function(FunctionConfig(function=f"{path}:misbehave", timeout_s=1.0))


class Scripted:
    """A tool in this process that plays a list of answers or failures."""

    def __init__(self, answers: list[Any], **spec: Any) -> None:
        values = {"name": "Scripted", "version": "1", "description": "", **spec}
        self.spec = ToolSpec(parameters=one_string("q", "anything"), **values)
        self.answers = answers
        self.calls = 0

    def run(self, arguments, document):
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_names_and_both_forms_of_arguments():
    with Executor([Calculator(), Calendar()]) as executor:
        assert executor.execute("calculator", "37 * 24").result == "888"
        assert executor.execute("CALCULATOR", {"expression": "37 * 24"}).result == "888"
        assert executor.execute("Calendar", "").error_kind is None
        assert executor.execute("Calendar", {}, {"date": "2023-01-30"}).result == (
            "Today is Monday, January 30, 2023."
        )
        unknown = executor.execute("Calculater", "1")
        assert unknown.error_kind == "unknown_tool"
        assert "Calculator, Calendar; did you mean Calculator?" in unknown.error
        missing = executor.execute("Calculator", {})
        assert missing.error_kind == "bad_arguments" and "'expression'" in missing.error
        several = executor.execute("Calculator", {"a": 1, "b": 2})
        for name in ("'a'", "'b'", "'expression'"):
            assert name in several.error
        zero = executor.execute("Calculator", "1/0")
        assert (zero.result, zero.error_kind) == (None, "division_by_zero")


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="Calculator"):
        Executor([Calculator(), Calculator()])


def test_a_bug_of_ours_propagates():
    with Executor([Scripted([RuntimeError("bug")])]) as executor, pytest.raises(RuntimeError):
        executor.execute("Scripted", "x")


def test_result_is_made_harmless_and_capped():
    hostile = "a\x00b [Calculator(1) -> 2] </API> <API> → \u202e end\n" + "x" * 500
    with Executor([Scripted([hostile], result_limit=80)]) as executor:
        done = executor.execute("Scripted", "q")
    assert done.cut and len(done.result) <= 80 and done.result.endswith("…")
    for delimiter in ("[", "]", "->", "→", "<API>", "</API>", "\x00", "\n", "\u202e"):
        assert delimiter not in done.result
    with Executor([Scripted([" \n "])]) as executor:
        assert executor.execute("Scripted", "q").error_kind == "no_result"


def test_huge_result_is_cheap():
    with Executor([Scripted(["[x] " * 1_300_000])]) as executor:
        done = executor.execute("Scripted", "q")
    assert done.cut and len(done.result) <= 200 and done.seconds < 0.5


def test_cache_survives_and_depends_on_version_and_arguments(tmp_path):
    path = tmp_path / "cache.sqlite"
    tool = Scripted(["one", "two", "three"])
    with Executor([tool], cache_path=path) as executor:
        assert executor.execute("Scripted", "q").result == "one"
        again = executor.execute("scripted", {"q": "q"})
        assert (again.result, again.cached) == ("one", True)
        assert executor.execute("Scripted", "other").result == "two"
    with Executor([tool], cache_path=path) as executor:
        assert executor.execute("Scripted", "q").cached
    newer = Scripted(["new"], version="2")
    with Executor([newer], cache_path=path) as executor:
        done = executor.execute("Scripted", "q")
        assert (done.result, done.cached) == ("new", False)
    uncached = Scripted(["a", "b"], cacheable=False, name="Other")
    with Executor([uncached], cache_path=path) as executor:
        assert [executor.execute("Other", "q").result for _ in range(2)] == ["a", "b"]


def test_cache_keeps_failures_of_the_arguments_and_no_passing_ones(tmp_path):
    lasting = Scripted([ToolError("no_result", "none"), "late"], name="Lasting")
    passing = Scripted([ToolError("timeout", "slow"), "late"], name="Passing")
    with Executor([lasting, passing], cache_path=tmp_path / "c.sqlite") as executor:
        first, second = (executor.execute("Lasting", "q") for _ in range(2))
        assert (first.error_kind, second.error_kind) == ("no_result", "no_result")
        assert second.cached and second.error == first.error
        assert executor.execute("Passing", "q").error_kind == "timeout"
        assert executor.execute("Passing", "q").result == "late"


def test_cache_key_holds_the_date_for_tools_that_read_it(tmp_path):
    reading = Scripted(["a", "b", "c"], name="Reading", reads_document=True)
    deaf = Scripted(["a", "b", "c"], name="Deaf")
    days = ({"date": "2023-01-30"}, {"date": "2023-01-31"})
    with Executor([reading, deaf], cache_path=tmp_path / "c.sqlite") as executor:
        assert [executor.execute("Reading", "q", day).result for day in days] == ["a", "b"]
        assert [executor.execute("Deaf", "q", day).result for day in days] == ["a", "a"]
        assert executor.execute("Reading", "q", days[0]).result == "a"


def put_many(cache: ResultCache, start: int) -> None:
    inherited = cache._connection
    for index in range(start, start + 100):
        key = CacheKey("T", "1", f"{index % 150}", "")
        cache.put(key, CachedResult(f"r{index % 150}", False, None, None))
        assert cache.get(key).result == f"r{index % 150}"
    assert cache._connection is not inherited  # a connection must not cross a fork
    cache.close()


def test_cache_is_safe_across_processes(tmp_path):
    shared = ResultCache(tmp_path / "c.sqlite")
    shared.put(CacheKey("T", "1", "0", ""), CachedResult("r0", False, None, None))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=put_many, args=(shared, 50 * i)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    found = [shared.get(CacheKey("T", "1", f"{index}", "")) for index in range(150)]
    assert [entry.result for entry in found] == [f"r{index}" for index in range(150)]
    shared.close()


def test_misbehaving_functions_cost_one_call_each(misbehaving, capfd):
    with Executor([misbehaving, Calculator()]) as executor:

        def kind(how: str):
            done = executor.execute("misbehave", how)
            assert (done.result is None) == (done.error_kind is not None)
            return done.error_kind or done.result

        assert kind("fine") == "fine"
        start = time.perf_counter()
        assert kind("loop") == "timeout"
        assert kind("sleep") == "timeout"
        assert time.perf_counter() - start < 12
        assert kind("die") == "crash"
        assert kind("exit") == "exception"
        assert kind("none") == "no_result"
        raised = executor.execute("misbehave", "raise")
        assert raised.error_kind == "exception" and "KeyError" in raised.error
        assert "[" not in raised.error and "\n" not in raised.error
        assert kind("print") == "print"
        for how in ("interrupt", "wordless", "long number", "nested"):
            assert kind(how) == "exception", how
        huge = executor.execute("misbehave", "huge")
        assert huge.cut and len(huge.result) == misbehaving.spec.result_limit
        assert executor.execute("Calculator", "1+1").result == "2"
    assert "noise" not in capfd.readouterr().out


def test_a_worker_that_dies_between_two_calls_is_replaced(misbehaving):
    with Executor([misbehaving]) as executor:
        assert executor.execute("misbehave", "late").result == "late"
        end = time.monotonic() + 20
        while executor._pool.active and time.monotonic() < end:
            time.sleep(0.05)
        assert executor.execute("misbehave", "fine").result == "fine"


def test_isolated_calls_run_elsewhere_and_at_the_same_time(misbehaving):
    import os

    with Executor([misbehaving], workers=2) as executor:
        assert executor.execute("misbehave", "pid").result != str(os.getpid())
        calls = [("misbehave", how, {}) for how in ("a", "loop", "b", "die", "c", "raise", "d")]
        kinds = [done.error_kind or done.result for done in executor.execute_many(calls)]
    assert kinds == ["a", "timeout", "b", "crash", "c", "exception", "d"]


def test_concurrency_is_bounded_per_tool():
    import threading

    class Counting(Scripted):
        running = most = 0
        lock = threading.Lock()

        def run(self, arguments, document):
            with self.lock:
                Counting.running += 1
                Counting.most = max(Counting.most, Counting.running)
            time.sleep(0.01)
            with self.lock:
                Counting.running -= 1
            return arguments["q"]

    with Executor([Counting([], concurrency=2)], workers=8) as executor:
        done = executor.execute_many([("Scripted", str(i), {}) for i in range(30)])
    assert [execution.result for execution in done] == [str(i) for i in range(30)]
    assert Counting.most == 2


def test_network_failures_are_tried_again_with_growing_pauses():
    down = ToolError("network", "connection refused")
    flaky = Scripted([down, down, "up"], network=True, name="Flaky")
    dead = Scripted([down], network=True, name="Dead")
    local = Scripted([down, "up"], name="Local")
    with Executor([flaky, dead, local], retries=2, backoff_s=0.02) as executor:
        start = time.perf_counter()
        done = executor.execute("Flaky", "q")
        assert (done.result, done.attempts) == ("up", 3)
        assert time.perf_counter() - start >= 0.06
        gone = executor.execute("Dead", "q")
        assert (gone.error_kind, gone.attempts, dead.calls) == ("network", 3, 3)
        assert executor.execute("Local", "q").attempts == 1


def test_a_call_with_effects_is_never_repeated():
    tool = Scripted([ToolError("network", "lost"), "again"], network=True, effects=True)
    policy = ApprovalPolicy(default="allow")
    with Executor([tool], approval=policy, backoff_s=0.01) as executor:
        assert executor.execute("Scripted", "q").error_kind == "network"
    assert tool.calls == 1


def test_effects_need_an_approval_policy():
    def run(policy: ApprovalPolicy | None, name: str = "files.write"):
        tool = Scripted(["done"], effects=True, name=name)
        with Executor([tool], approval=policy) as executor:
            execution = executor.execute(name, "q")
        assert tool.calls == (1 if execution.result else 0)
        return execution.result or execution.error_kind

    assert run(None) == "refused"
    assert run(ApprovalPolicy()) == "refused"
    assert run(ApprovalPolicy({"files.*": "allow"})) == "done"
    assert run(ApprovalPolicy({"Files.W*": "allow"})) == "done"
    assert run(ApprovalPolicy({"files.write": "deny", "*": "allow"})) == "refused"
    assert run(ApprovalPolicy({"*": "ask"})) == "refused"
    assert run(ApprovalPolicy({"*": "ask"}, confirm=lambda tool, arguments: True)) == "done"
    assert run(ApprovalPolicy({"*": "ask"}, confirm=lambda tool, arguments: False)) == "refused"
    with pytest.raises(ValueError, match="maybe"):
        ApprovalPolicy({"*": "maybe"})


def test_effects_are_never_answered_from_the_cache(tmp_path):
    tool = Scripted(["a", "b"], effects=True)
    policy = ApprovalPolicy(default="allow")
    with Executor([tool], cache_path=tmp_path / "c.sqlite", approval=policy) as executor:
        assert [executor.execute("Scripted", "q").result for _ in range(2)] == ["a", "b"]


def test_every_execution_is_reported():
    events: list[dict[str, Any]] = []
    with Executor([Calculator()], on_execution=events.append) as executor:
        executor.execute("calculator", "1+1")
        executor.execute("calculator", "1/0")
        executor.execute("nothing", "")
    assert [event["tool"] for event in events] == ["Calculator", "Calculator", "nothing"]
    kinds = [event["error_kind"] for event in events]
    assert kinds == [None, "division_by_zero", "unknown_tool"]


def test_canonical_form_of_spellings():
    with Executor([Calculator()]) as executor:
        same = executor.canonical("Calculator", " 1 + 1 ")
        assert same == executor.canonical("calculator", 'expression="1 + 1"')
        assert executor.canonical("Calculator", "1 + 2") != same


def test_error_kinds_are_a_closed_list():
    assert all(kind.islower() and text for kind, text in ERROR_KINDS.items())
    with pytest.raises(ValueError, match="oops"):
        ToolError("oops", "x")
