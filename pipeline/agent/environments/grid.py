"""The grid world: what memory and a map are worth to an agent, in exact numbers.

8 x 8 cells, from the upper left to the lower right corner; 200 solvable grids drawn from one
`random.Random(7)`. Three agents: reactive (sees its neighbours), with memory (backtracks), and a
planner (has the map).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

Cell = tuple[int, int]
START: Cell = (0, 0)
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))  # right, down, left, up: ties go to the first


@dataclass(frozen=True)
class Grid:
    """A square grid; `blocked` holds the obstacles, the two corners are free."""

    size: int
    blocked: frozenset[Cell]

    @property
    def goal(self) -> Cell:
        """The lower right corner."""
        return (self.size - 1, self.size - 1)

    def neighbours(self, cell: Cell) -> Iterator[Cell]:
        """Free cells next to `cell`, in the order of MOVES."""
        for down, right in MOVES:
            row, column = cell[0] + down, cell[1] + right
            inside = 0 <= row < self.size and 0 <= column < self.size
            if inside and (row, column) not in self.blocked:
                yield (row, column)

    def distance(self, cell: Cell) -> int:
        """Manhattan distance to the goal."""
        return abs(self.goal[0] - cell[0]) + abs(self.goal[1] - cell[1])


def draw_grids(count: int = 200, size: int = 8, density: float = 0.28, seed: int = 7) -> list[Grid]:
    """Draw solvable grids, cell by cell and row by row, from one generator."""
    generator = random.Random(seed)
    grids: list[Grid] = []
    while len(grids) < count:
        cells = [(row, column) for row in range(size) for column in range(size)]
        blocked = {cell for cell in cells if generator.random() < density}
        grid = Grid(size, frozenset(blocked - {START, (size - 1, size - 1)}))
        if shortest(grid) is not None:
            grids.append(grid)
    return grids


def shortest(grid: Grid) -> int | None:
    """Length of the shortest way, breadth first; None without one."""
    steps = {START: 0}
    queue = deque([START])
    while queue:
        cell = queue.popleft()
        if cell == grid.goal:
            return steps[cell]
        for following in grid.neighbours(cell):
            if following not in steps:
                steps[following] = steps[cell] + 1
                queue.append(following)
    return None


def shortest_dijkstra(grid: Grid) -> int | None:
    """The same by Dijkstra's algorithm, to check the planner."""
    done: set[Cell] = set()
    heap = [(0, START)]
    while heap:
        steps, cell = heapq.heappop(heap)
        if cell == grid.goal:
            return steps
        if cell not in done:
            done.add(cell)
            for following in grid.neighbours(cell):
                heapq.heappush(heap, (steps + 1, following))
    return None


def reactive(grid: Grid, limit: int = 200) -> int | None:
    """Always go to the free neighbour nearest to the goal; None when `limit` steps do not do."""
    cell, steps = START, 0
    while cell != grid.goal and steps < limit:
        cell = min(grid.neighbours(cell), key=grid.distance, default=cell)
        steps += 1
    return steps if cell == grid.goal else None


def with_memory(grid: Grid, limit: int = 200) -> int | None:
    """Go to the nearest cell not seen yet; without one, go back the way it came."""
    cell, steps = START, 0
    seen, way = {START}, []
    while cell != grid.goal and steps < limit:
        fresh = [following for following in grid.neighbours(cell) if following not in seen]
        if fresh:
            way.append(cell)
            cell = min(fresh, key=grid.distance)
            seen.add(cell)
        elif way:
            cell = way.pop()
        else:
            return None
        steps += 1
    return steps if cell == grid.goal else None
