"""One run: its state, what it may still use, and why it ended.

`loop.run_episodes` drives many of them: `request` (before the model is asked), `receive` (the
turn; gives the calls to execute), `observe` (their results). The state only grows; every call in
it has exactly one result, also when the run ends in between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.agent import chat, inline
from pipeline.agent.instructions import load_instructions, system_text
from pipeline.agent.limits import ExitReason, Made, no_progress, over_budget
from pipeline.agent.observations import harmless
from pipeline.agent.policies import ContextOverflow, PolicyError, Reply, Request
from pipeline.agent.react import FINISH_FORM
from pipeline.agent.reading import TurnReader
from pipeline.agent.tasks import EpisodeResult, Settings, Task
from pipeline.agent.toolbox import Toolbox
from pipeline.agent.trace import Event, Sink
from pipeline.agent.turns import Call, Kind, Message, Turn, number_calls
from pipeline.errors import ConfigError
from pipeline.tools.executor import Execution

LAST_TURN = "No steps are left. Give the final answer now."


class Episode:
    """The state machine of one run."""

    def __init__(
        self,
        task: Task,
        tools: Toolbox,
        settings: Settings,
        sink: Sink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task, self.settings, self.sink, self.clock = task, settings, sink, clock
        self.tools = task.tools() if task.tools is not None else tools
        self.specs = () if settings.tool_choice == "none" else tuple(self.tools.specs)
        self.names = [spec.name for spec in self.specs]
        _check_choice(settings.tool_choice, self.names)
        self.reader = TurnReader(settings, self.names)
        self.module = self.reader.module
        self.messages: list[Message] = []
        self.events: list[Event] = []
        self.started = clock()
        self.exit_reason: ExitReason | None = None
        self.detail: str | None = None
        self.answer: str | None = None
        self.forced_answer: str | None = None
        self.step = self.tokens_in = self.tokens_out = self.context_sent = 0
        self.calls: Counter[str] = Counter()
        self.errors: dict[str, Counter[str]] = {}
        self.flags: Counter[str] = Counter()
        self._history: list[Made] = []
        self._nudged: set[str] = set()
        self._failures = self._rejections = 0
        self._forcing = False
        self._thought_only = False  # a thought was written and its action is asked for next
        self._pending: list[tuple[Call, Execution | None]] = []
        self._begin()

    def _begin(self) -> None:
        text = system_text(self.settings.instructions, self.specs, self.settings.protocol)
        if text and self.settings.inline_calls:
            text = f"{text}\n\n{load_instructions('within-v1')}"
        if text:
            self.messages.append(Message("system", text))
        self.messages.append(Message("user", _user_text(self.task, self.settings.protocol)))
        self._emit("start", question=self.task.question, protocol=self.settings.protocol)
        self._guard("question", self.task.question)

    # Before the model is asked

    def request(self) -> Request | None:
        """Check what is left and return what to ask, or None when the run is over."""
        if self.exit_reason is not None:
            return None
        limits = self.settings.limits
        within = self._thought_only or self.reader.within_turn
        if not within and self.step >= limits.max_steps and not self._last_turn():
            return None
        if not within and not self._forcing:
            self.step += 1
        spent = over_budget(
            limits, tokens=self.tokens_in + self.tokens_out, seconds=self.clock() - self.started
        )
        if spent is not None:
            self.end(spent)
            return None
        self.context_sent += len(self.messages)
        return Request(
            messages=tuple(self.messages),
            tools=self.specs,
            protocol=self.settings.protocol,
            tool_choice=self._choice(),
            stop=self._stop(),
            prefix=self._prefix(),
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            seed=self.task.seed * 1009 + self.step,
            step=self.step,
            task_id=self.task.task_id,
            output=self.settings.output,
            inline_calls=self.settings.inline_calls,
            may_fire=self._may_fire(),
        )

    def _last_turn(self) -> bool:
        """At the step limit: ask for the answer once more if that is wanted, else end the run."""
        if self.settings.force_final_answer and not self._forcing:
            self._forcing = True
            self._nudge(LAST_TURN)
            return True
        self.end("max_steps")
        return False

    def _choice(self) -> str:
        if self._forcing:
            return "none"
        choice = self.settings.tool_choice
        return choice if choice in ("auto", "none") or not self.calls else "auto"

    def _stop(self) -> tuple[str, ...]:
        """The protocol's stop strings, and the next turn's beginning where this one has its own."""
        stop = self.module.STOP + (inline.STOP if self.settings.inline_calls else ())
        if self._prefix() and self.settings.protocol == "react":
            stop += ("\nThought",) if self._prefix() == "Thought:" else ("\nThought", "\nAction")
        return stop

    def _may_fire(self) -> bool:
        """Whether an inline call may begin: not where the turn is made to be an action."""
        return self.reader.may_fire and self._choice() != "none" and self._prefix() != "Action:"

    def _prefix(self) -> str:
        if not self.settings.prefixes or self.reader.partial:
            return ""
        if self.settings.protocol == "react":
            thinks = self.settings.thoughts and not self._thought_only
            return "Thought:" if thinks else "Action:"
        return {"plain": "Thought:", "direct": "Answer:"}.get(self.settings.protocol, "")

    # The turn

    def receive(self, reply: Reply | PolicyError) -> list[Call]:
        """Append the turn and return the calls to execute; `observe` takes their results."""
        if isinstance(reply, PolicyError):
            overflow = isinstance(reply, ContextOverflow)
            self.end("context_overflow" if overflow else "model_error", str(reply))
            return []
        action_was_asked, self._thought_only = self._thought_only, False
        self.tokens_in += reply.tokens_in
        self.tokens_out += reply.tokens_out
        prefix = f"{self.task.task_id}-{len(self.messages)}"
        turn = number_calls(self.reader.read(reply), prefix)
        self.flags.update(turn.flags)
        self.messages.append(Message("assistant", turn.text, turn.calls))
        self._emit(
            "turn",
            text=turn.text,
            flags=list(turn.flags),
            errors=list(turn.errors),
            tokens_in=reply.tokens_in,
            tokens_out=reply.tokens_out,
        )
        if reply.finish == "filter":
            self._stop_with(turn, "guardrail", "the endpoint blocked the turn")
        elif self._guard("turn", turn.text):
            self._refuse_all(turn.calls, "the turn was blocked")
        elif self._forcing:
            self.forced_answer = turn.answer
            self._stop_with(turn, "max_steps", "an answer was demanded at the step limit")
        elif turn.calls:
            self._plan(turn)
        elif turn.answer is not None:
            self._submit(turn.answer, reply.finish)
        elif not self.reader.interrupted:
            self._nothing(turn, action_was_asked)
        return [call for call, done in self._pending if done is None]

    def _plan(self, turn: Turn) -> None:
        """Decide for each call of the turn: execute it, or answer it here."""
        if not turn.actions:
            self._answer_broken(turn.calls)
            self._fail()
            return
        self._failures = 0
        key = " & ".join(call.key() for call in turn.calls)
        tools = [call.name for call in turn.calls]
        if no_progress(self.settings.limits, self._history, key, tools):
            self._stop_with(turn, "repeated_action", key[:200])
            return
        self._pending = [(call, self._objection(call)) for call in turn.calls]

    def _objection(self, call: Call) -> Execution | None:
        """Return why a call is not executed, as its result."""
        if call.problem is not None:
            return Execution(None, "bad_arguments", f"{call.problem}. {self.module.HINT}", 0, False)
        wanted = self._choice()
        if wanted == "none":
            return Execution(None, "refused", "no tool may be called in this run", 0, False)
        if wanted not in ("auto", "required") and call.name.lower() != wanted.lower():
            return Execution(None, "refused", f"call {wanted} first", 0, False)
        return None

    # The results

    def observe(self, executions: Sequence[Execution]) -> None:
        """Append one result per pending call, in the order of the calls."""
        if not self._pending:
            return
        results = iter(executions)
        planned, self._pending = self._pending, []
        made = [(call, objection or next(results)) for call, objection in planned]
        for (call, objection), (_, done) in zip(planned, made, strict=True):
            if objection is None and done.error_kind not in ("unknown_tool", "refused"):
                self.calls[self._name(call.name)] += 1
        shown = [self._result(call, done) for call, done in made]
        key = " & ".join(call.key() for call, _ in made)
        self._history.append(Made(key, tuple(c.name for c, _ in made), "\n".join(shown)))
        self._after(made, shown)

    def _result(self, call: Call, done: Execution) -> str:
        """Append the result of one call as data."""
        within = self.reader.partial != ""
        if done.error_kind is None:
            raw = (done.result or "") + (" … [cut]" if done.cut else "")
        else:
            raw = f"Error ({done.error_kind}): {done.error}"
            name = self._name(call.name)
            self.errors.setdefault(name, Counter())[done.error_kind] += 1
        content = harmless(raw, self.settings.observation_limit, one_line=within)
        self._append_result(call, content)
        self._emit(
            "call",
            tool=call.name,
            arguments=call.arguments,
            call_id=call.call_id,
            cached=done.cached,
            seconds=done.seconds,
        )
        self._emit(
            "observation",
            tool=call.name,
            call_id=call.call_id,
            content=content,
            error_kind=done.error_kind,
        )
        return content

    def _append_result(self, call: Call, content: str) -> None:
        if self.reader.partial:
            written = self.reader.insert(content)
            self.messages.append(Message("tool", written, (), call.call_id, call.name, "inline"))
            return
        kind: Kind = "text" if self.settings.protocol == "chat" else "observation"
        name = self._name(call.name)
        self.messages.append(Message("tool", content, (), call.call_id, name, kind))

    def _after(self, made: Sequence[tuple[Call, Execution]], shown: Sequence[str]) -> None:
        """End the run where a result says so."""
        handoffs = {name.lower() for name in self.settings.handoff_tools}
        for call, done in made:
            self._rejections += done.error_kind == "refused"
            if done.error_kind in self.settings.fatal_kinds:
                self.end("tool_fatal", done.error)
            if call.name.lower() in handoffs and done.error_kind is None:
                self.end("handoff", self._name(call.name))
        if self._rejections >= self.settings.limits.max_rejections:
            self.end("approval_rejected", f"{self._rejections} calls were refused")
        for content in shown:
            self._guard("observation", content)

    # Answers

    def _submit(self, answer: str, finish: str) -> None:
        """Take an answer if nothing is left to do, else say what."""
        if self.settings.protocol == "inline":
            answer = inline.visible(self.messages) or answer
        problem = self.settings.output.problem(answer) if self.settings.output else None
        if self.settings.protocol == "chat" and finish == "length":
            self.end("unexpected_stop", "the answer was cut at the token limit")
        elif self._choice() not in ("auto", "none"):
            wanted = self._choice()
            name = "a tool" if wanted == "required" else wanted
            self._nudge_once("call", f"Call {name} before answering. {self.module.HINT}")
        elif problem is not None:
            self._fail(f"Not accepted: {problem}")
        else:
            self._confirm(answer)

    def _confirm(self, answer: str) -> None:
        missing = None
        if self.settings.goal_check is not None:
            try:
                missing = self.settings.goal_check(self.task.question, answer, tuple(self.messages))
            except PolicyError as problem:
                self.end("model_error", f"goal check: {problem}")
                return
        if missing is not None:
            self._nudge(f"Not finished: {missing}")
            return
        self.answer = answer
        self.end("finished")

    def _nothing(self, turn: Turn, action_was_asked: bool) -> None:
        """Handle a turn with neither a call nor an answer."""
        if "ask_finish_form" in turn.flags and "finish" not in self._nudged:
            self._nudge_once("finish", FINISH_FORM)
        elif not action_was_asked and self._awaits_action(turn):
            self._thought_only = True
        elif turn.text.strip():
            problem = turn.errors[0] if turn.errors else "no action and no final answer in it"
            cut = " The turn was cut at its length limit." if "length_cut" in turn.flags else ""
            self._fail(f"Not understood: {problem}.{cut} {self.module.HINT}")
        elif earlier := self._said():
            self._submit(earlier, "eos")
        else:
            self._nudge_once("empty", f"The turn was empty. {self.module.HINT}")

    def _awaits_action(self, turn: Turn) -> bool:
        """Tell whether a turn is a mere thought, whose action can be had by beginning it."""
        forced = self.settings.prefixes and self.settings.protocol == "react"
        thought = turn.text.removeprefix("Thought:").strip()
        return forced and self.settings.thoughts and thought != "" and "Action" not in thought

    def _said(self) -> str:
        """Return what was already said when the closing turn is empty."""
        if self.settings.protocol == "inline":
            return inline.visible(self.messages)
        if self.settings.protocol != "chat":
            return ""
        spoken = [chat.prose(m.content) for m in self.messages if m.role == "assistant"]
        return next((text for text in reversed(spoken) if text), "")

    # Ends

    def end(self, reason: ExitReason, detail: str | None = None) -> None:
        """End the run for the first reason that comes; later ones do not replace it."""
        if self.exit_reason is not None:
            return
        self.exit_reason, self.detail = reason, detail
        self._emit(
            "exit",
            exit_reason=reason,
            answer=self.answer,
            forced_answer=self.forced_answer,
            detail=detail,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            seconds=self.clock() - self.started,
        )

    def result(self) -> EpisodeResult:
        """Return what came of the run; it must be over."""
        assert self.exit_reason is not None
        return EpisodeResult(
            task_id=self.task.task_id,
            question=self.task.question,
            heading=self.task.heading,
            protocol=self.settings.protocol,
            exit_reason=self.exit_reason,
            answer=self.answer,
            forced_answer=self.forced_answer,
            steps=self.step,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            context_sent=self.context_sent,
            calls=dict(self.calls),
            errors={tool: dict(kinds) for tool, kinds in self.errors.items()},
            flags=dict(self.flags),
            detail=self.detail,
            seconds=self.clock() - self.started,
            messages=tuple(self.messages),
            events=tuple(self.events),
        )

    def _stop_with(self, turn: Turn, reason: ExitReason, detail: str) -> None:
        self._refuse_all(turn.calls, "the run ended here")
        self.end(reason, detail)

    def _refuse_all(self, calls: Sequence[Call], why: str) -> None:
        for call in calls:
            self._append_result(call, f"Not executed: {why}.")

    def _answer_broken(self, calls: Sequence[Call]) -> None:
        for call in calls:
            content = harmless(f"Not executed: {call.problem}. {self.module.HINT}", 1000)
            self._append_result(call, content)
            self._emit(
                "observation",
                tool=call.name,
                call_id=call.call_id,
                content=content,
                error_kind="parse_failure",
            )

    def _fail(self, message: str | None = None) -> None:
        """Count one more turn in a row that could not be used."""
        self._failures += 1
        if self._failures >= self.settings.limits.max_parse_failures:
            self.end("parse_failures", message)
        elif message is not None:
            self._nudge(message)

    def _nudge_once(self, kind: str, message: str) -> None:
        if kind in self._nudged:
            self.end("unexpected_stop", message)
            return
        self._nudged.add(kind)
        self._nudge(message)

    def _nudge(self, message: str) -> None:
        content = harmless(message, 1000)
        self.messages.append(Message("user", content, kind="nudge"))
        self._emit("nudge", content=content)

    def _guard(self, stage: Any, text: str) -> bool:
        """Ask the guardrail; True when it blocked the text and ended the run."""
        if self.settings.guardrail is None or self.exit_reason is not None:
            return False
        why = self.settings.guardrail(stage, text)
        if why is not None:
            self.end("guardrail", f"{stage}: {why}")
        return why is not None

    def _name(self, name: str) -> str:
        """Return the tool's own spelling, or `unknown` for one that does not exist."""
        known = {spec.name.lower(): spec.name for spec in self.specs}
        return known.get(name.strip().lower(), "unknown")

    def _emit(self, event: str, **values: Any) -> None:
        record = {"event": event, "task_id": self.task.task_id, "step": self.step, **values}
        self.events.append(record)
        if self.sink is not None:
            self.sink(record)


def _user_text(task: Task, protocol: str) -> str:
    if protocol in ("chat", "inline"):
        question = task.question
    else:
        question = f"{task.heading}: {task.question}"
    if not task.memory:
        return question
    lessons = "\n".join(f"- {lesson}" for lesson in task.memory)
    return f"What you learned from earlier attempts:\n{lessons}\n\n{question}"


def _check_choice(choice: str, names: Sequence[str]) -> None:
    if choice in ("auto", "none"):
        return
    if choice == "required" and names:
        return
    if choice.lower() not in {name.lower() for name in names}:
        allowed = ", ".join(["auto", "none", "required", *names])
        raise ConfigError(f"tool_choice is {choice!r}; allowed: {allowed}")
