"""A measuring process, seen from the one that started it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = (sys.executable, "-m", "benchmarks.train.worker")


class Child:
    """One ``python -m benchmarks.train.worker``: it imports at once, and measures when it is sent
    an order.

    Args:
        log: gets what it prints.
        allocator: ``PYTORCH_ALLOC_CONF`` for it; empty leaves what the user has set.
    """

    def __init__(self, log: Path, allocator: str) -> None:
        self.log, self.allocator = log, allocator
        log.parent.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        if allocator:
            env["PYTORCH_ALLOC_CONF"] = allocator
            env.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # torch reads either; two are one too many
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                text=True,
            )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))

    def send(self, order: dict[str, Any]) -> None:
        """Measure this. A process that has died meanwhile shows when it is asked for an answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Its next message, or None after this time."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    @property
    def died(self) -> bool:
        """Whether it ended and has said all that it had to say."""
        return (
            self._process.poll() is not None
            and not self._reader.is_alive()
            and self._answers.empty()
        )

    def last_words(self) -> str:
        """How it ended, and the end of what it printed."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return (
            f"the process ended with code {self._process.poll()}: {' | '.join(lines[-3:])[-800:]}"
        )

    def end(self) -> None:
        """End it, whatever it does, and wait for it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
