"""What every process is doing, live: a table that redraws on a terminal, a line a change elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from baton.launch import Supervisor


class Progress:
    """Shows the children of *supervisor* while they start. A context manager."""

    def __init__(self, supervisor: Supervisor, console: Console | None = None) -> None:
        self._supervisor = supervisor
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._said: dict[str, str] = {}

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, at)

    def update(self) -> None:
        """Show what has changed."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        for child in self._supervisor.children:
            if self._said.get(child.name) != child.phase:
                self._said[child.name] = child.phase
                self._console.print(f"{child.seconds:5.1f} s  {child.name}: {child.phase}")

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for child in self._supervisor.children:
            ready = child.ready_after is not None
            style = "green" if ready else "yellow"
            table.add_row(
                child.name, f"[{style}]{child.phase}[/]", f"{child.seconds:.0f} s", f"pid {child.process.pid}"
            )
        return table
