"""The grid world with tools: `look[]` and `move[direction]` on the grids of the reference case.

The task is done when the agent stands on the goal and then finishes, within the steps. What it sees
is its own cell and which of the four next to it are free.
"""

from __future__ import annotations

from functools import partial

from pipeline.agent.environments.encyclopedia import Question
from pipeline.agent.environments.functions import FunctionTool
from pipeline.agent.environments.grid import MOVES, START, Cell, Grid, draw_grids
from pipeline.agent.tasks import EpisodeResult, Task
from pipeline.agent.toolbox import EnvironmentTools
from pipeline.tools.base import Tool

MAX_STEPS = 40  # the longest shortest way of the 200 grids has 18 moves
DIRECTIONS = dict(zip(("right", "down", "left", "up"), MOVES, strict=True))


class Walk:
    """One way through one grid: where the agent stands."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.cell: Cell = START

    def tools(self) -> list[Tool]:
        """Tools that share the cell: look, move."""

        def look() -> str:
            """Says where you are and which directions are free."""
            return self.view()

        def move(direction: str) -> str:
            """Goes one cell right, down, left or up, then says what look says.

            Args:
                direction: The way to go. (choices: ["right", "down", "left", "up"])
            """
            return self.go(direction)

        return [FunctionTool(look), FunctionTool(move)]

    def go(self, direction: str) -> str:
        """Go one cell where it is free; returns the view from there."""
        down, right = DIRECTIONS[direction]
        following = (self.cell[0] + down, self.cell[1] + right)
        if following not in self.grid.neighbours(self.cell):
            return f"{self.view()} The way {direction} is blocked, you stay."
        self.cell = following
        return self.view()

    def view(self) -> str:
        """Say where the agent is and where it can go."""
        around = set(self.grid.neighbours(self.cell))
        free = [
            name
            for name, (down, right) in DIRECTIONS.items()
            if (self.cell[0] + down, self.cell[1] + right) in around
        ]
        return f"{_place(self.cell)} Free: {', '.join(free) or 'nothing'}."


def grid_tasks(count: int) -> tuple[list[Question], list[Task]]:
    """The first `count` grids as tasks; the gold answer is what stands on the goal."""
    questions, tasks = [], []
    for n, grid in enumerate(draw_grids(count), start=1):
        asked = Question(f"grid-{n}", _question(grid), _place(grid.goal))
        questions.append(asked)
        tasks.append(Task(asked.text, asked.question_id, tools=partial(_new_walk, grid)))
    return questions, tasks


def at_goal(run: EpisodeResult, gold: str) -> bool:
    """Tell whether the agent stood on the goal when it finished: what the tools said last."""
    seen = [m.content for m in run.messages if m.role == "tool" and m.content.startswith(_HERE)]
    return run.finished and bool(seen) and seen[-1].startswith(gold)


_HERE = "You are at row"


def _new_walk(grid: Grid) -> EnvironmentTools:
    return EnvironmentTools(Walk(grid).tools())


def _place(cell: Cell) -> str:
    return f"{_HERE} {cell[0] + 1}, column {cell[1] + 1}."


def _question(grid: Grid) -> str:
    return (
        f"You are at row 1, column 1 of a grid of {grid.size} rows and {grid.size} columns; some "
        f"cells are blocked. Go to row {grid.goal[0] + 1}, column {grid.goal[1] + 1}. "
        "When you are there, answer: done."
    )
