"""`baton init` on a terminal: it asks, asks again, and writes what it was told or nothing."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from baton.cli import main
from baton.cluster import Device, TransferMode
from baton.launch import Flags, plan_file, read_cluster_file

SECONDS = 60.0


class Terminal:
    """`baton init` with a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.screen = ""
        self._pid, self._screen = pty.fork()
        if self._pid == 0:
            # Whoever is started in the background ignores it, and so do its children.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.chdir(folder)
            os.execv(sys.executable, [sys.executable, "-m", "baton.cli", "init", *words])

    def type_after(self, text: str, keys: str) -> None:
        """Wait for *text* to be shown, then type *keys*."""
        seen = len(self.screen)
        deadline = time.monotonic() + SECONDS
        while text not in self.screen[seen:]:
            assert time.monotonic() < deadline, self.screen
            self._read()
        os.write(self._screen, keys.encode())

    def end(self, again: str = "") -> int:
        """Its exit code, once it has closed its terminal.

        Args:
            again: typed once more whenever nothing happens: a Ctrl-C between a question and the reading of its answer
                is only noticed after the answer (CPython's input()).
        """
        deadline = time.monotonic() + SECONDS
        shown = ""
        while self._read():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                raise AssertionError(self.screen)
            if again and shown == self.screen:
                os.write(self._screen, again.encode())
            shown = self.screen
        os.close(self._screen)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self) -> bool:
        """Take in what is shown; whether more may come."""
        ready, _, _ = select.select([self._screen], [], [], 1.0)
        try:
            data = os.read(self._screen, 65536) if ready else b" "
        except OSError:
            # The kernel's word for a terminal that nobody has open any more.
            return False
        self.screen += data.decode().replace("\r\n", "\n") if ready else ""
        return bool(data)


def test_it_asks_and_writes_a_file_that_comes_to_a_plan(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.type_after("model: an embedded one's name, a folder, or a hub id [", "org/name\n")
    terminal.type_after("prefill servers [1]: ", "two\n")
    terminal.type_after("prefill servers [1]: ", "2\n")
    terminal.type_after("decode servers [1]: ", "\n")
    terminal.type_after("addresses of the hosts", "10.0.0.1:8000\n")
    terminal.type_after("addresses of the hosts", "10.0.0.1, 10.0.0.2\n")
    terminal.type_after("device: ", "gpu\n")
    terminal.type_after("device: ", "cuda\n")
    terminal.type_after("transfer mode: ", "push\n")
    terminal.type_after("transfer mode: ", "write\n")
    terminal.type_after("port of the proxy [8000]: ", "9000\n")
    assert terminal.end() == 0
    assert "A cluster file for baton.yaml." in terminal.screen
    said = re.findall(r"^  ('.*)$", terminal.screen, re.MULTILINE)
    assert said == [
        "'two' is not a whole number of 1 or more",
        "'10.0.0.1:8000' is more than a host: give its name or address alone",
        "'gpu' is none of cpu, cuda, neuron and -",
        "'push' is neither read nor write",
    ]
    assert "start it: baton up -f baton.yaml --host NAME, on each host" in terminal.screen
    cluster = plan_file(read_cluster_file(tmp_path / "baton.yaml"), Flags(), (0, 1))
    assert (cluster.device, cluster.transfer_mode, cluster.proxy_port) == (Device.CUDA, TransferMode.WRITE, 9000)
    assert [(each.id, each.host) for each in cluster.instances] == [
        ("P0", "10.0.0.1"),
        ("P1", "10.0.0.2"),
        ("D0", "10.0.0.1"),
    ]


def test_a_name_for_the_file_is_no_wish_and_it_still_asks(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "mine.yaml")
    for question in ("model: ", "prefill servers", "decode servers", "addresses", "device", "transfer mode", "port"):
        terminal.type_after(question, "\n")
    assert terminal.end() == 0
    assert "wrote mine.yaml" in terminal.screen
    assert (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("keys", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_who_leaves_in_between_has_written_nothing(tmp_path: Path, keys: str) -> None:
    terminal = Terminal(tmp_path)
    terminal.type_after("model: ", "\n")
    terminal.type_after("prefill servers [1]: ", keys)
    assert terminal.end(again=keys) == 130
    assert terminal.screen.rstrip().endswith("baton: nothing was written")
    assert "Traceback" not in terminal.screen
    assert list(tmp_path.iterdir()) == []


def test_flags_are_not_asked_for_again(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--decode", "3")
    assert terminal.end() == 0
    assert "[" not in terminal.screen
    assert len(plan_file(read_cluster_file(tmp_path / "baton.yaml"), Flags(), (0, 1)).instances) == 4


def test_where_nothing_can_be_written_is_said_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "c.yaml"
    assert main(["init", str(path)]) == 1
    assert capsys.readouterr().err == f"baton: cannot write {path}: there is no folder {path.parent}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b", "a"], "--hosts: 'a' is named twice"),
        (["http://a"], "--hosts: 'http://a' is more than a host: give its name or address alone"),
        (["[::1]"], "--hosts: '[::1]' is more than a host: give its name or address alone"),
    ],
)
def test_hosts_that_are_none_are_named(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "c.yaml"), "--hosts", *words]) == 2
    assert capsys.readouterr().err == f"baton: {said}\n"
