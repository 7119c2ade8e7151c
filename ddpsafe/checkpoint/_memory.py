"""States in the memory of each node, from which the ranks of the next attempt continue.

A save: every rank sends all others its own part over the ranks' process group, then the first rank of each node
writes the state into a slot of its node. So each node has all that a restore needs, with other ranks too.

A restore: `_restore` lets the ranks agree on a state; the nodes that lack it receive it over the same group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ddpsafe._errors import Explanation
from ddpsafe._host import read_limits
from ddpsafe._job.agreement import Message, as_line
from ddpsafe.checkpoint import _directory, _save, _sharded
from ddpsafe.checkpoint._checksums import BLOCK_BYTES, DamagedFileError
from ddpsafe.checkpoint._format import NAME, PER_RANK, new_file, read_manifest
from ddpsafe.checkpoint._schedule import Costs, CostShare, highest, schedule_of
from ddpsafe.checkpoint._slots import NodeSlots, user_metadata
from ddpsafe.checkpoint._trees import HostCopies, size_bytes
from ddpsafe.checkpoint.errors import DirectoryError, NoSpaceError, SaveError, warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from ddpsafe._job.agreement import Absence
    from ddpsafe.checkpoint._format import FileFacts, ShardedTensor
    from ddpsafe.checkpoint._ranks import Ranks
    from ddpsafe.checkpoint._slots import Candidate, Held, Slot
    from ddpsafe.checkpoint._state import Snapshot
    from ddpsafe.checkpoint.errors import RestoreError

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 64 * 2**20
_SHOW_EVERY_S: Final = 5.0
_SHARE_LEFT: Final = 0.1
"""The share of the memory that must be left: the training itself needs more at times."""


class StateMemory:
    """The states in memory, as one rank takes part in them; see `open_memory`.

    Every rank has to make one.

    Attributes:
        newest: The step of the newest state in memory that this rank has saved or restored.
        is_given_up: Whether it has turned out that memory cannot be used.
    """

    def __init__(
        self,
        ranks: Ranks,
        slots: NodeSlots,
        every: int | timedelta | Literal["auto"],
        *,
        may_give_up: bool,
    ) -> None:
        self.newest: int | None = None
        self.is_given_up = False
        self.schedule = schedule_of(every, time.monotonic())
        self._every = every
        self._ranks = ranks
        self._first = ranks.of_node[0]
        self._is_first = ranks.rank == self._first
        self.slots = slots
        self._may_give_up = may_give_up
        self._copies = HostCopies()
        self._problem: dict[str, Any] | None = None
        self._next: Slot | None = None  # the one to write to, if it is known
        self._length = 0  # of a state, in bytes

    def save(self, take: Callable[[bool], _save.SaveRequest], step: int, waited_s: float) -> bool:
        """Put the state into memory; return False, after a warning, if that is not to be used any more.

        `take` is called with whether this rank writes what all share. The last save to the directory was
        `waited_s` ago.

        Raises:
            CheckpointError: It failed, on this rank or another one.
        """
        ranks = self._ranks
        measured = self.schedule.begin(step, time.monotonic())
        facts: dict[str, Any] = {"step": step, "costs": measured, "waited_s": waited_s}
        request, error = None, None
        try:
            request = take(self._is_first)
            facts |= {"names": request.snapshot.names, "metrics": request.metrics}
            facts["metadata"] = request.metadata
            facts["problem"] = self._find_problem(request.snapshot)
            if self._is_first:
                if self.newest is None:  # states of an attempt from which this one did not continue
                    self.slots.drop_newer(step - 1)
                facts["slot"] = (self._next or self.slots.target()).number
                self.slots[facts["slot"]].clear()
        except Exception as exc:  # noqa: BLE001 - raised once the others know of it
            error = exc
        messages = self._exchange(
            Message(
                facts=facts,
                data=b"" if request is None else request.snapshot.own,
                failure=None if error is None else ranks.failure_of(error),
            )
        )
        if request is None or error is not None:
            assert error is not None  # noqa: S101 - otherwise there is a request
            raise error
        for message in messages.values():
            if message.failure is not None:
                raise ranks.peer_error(message.failure)
        _save.require_same(messages)
        problem = next((m.facts["problem"] for m in messages.values() if m.facts["problem"]), None)
        if problem is not None:
            self._give_up(step, **problem)
            return False
        measured_by_all = [message.facts["costs"] for message in messages.values()]
        costs = highest(Costs(*each) for each in measured_by_all if each)
        try:
            self._write(request, messages, costs)
        except Exception as exc:  # noqa: BLE001 - torch may raise anything if it lacks memory
            # The other ranks have gone on. They learn of it at the next save, which then fails on all of them.
            self._problem = {"text": f"the memory could not be written: {as_line(exc)}"}
        # Also after such an error: all ranks have to expect the next save at the same step.
        self.newest = step
        if isinstance(self.schedule, CostShare):
            self.schedule.end(time.monotonic(), costs)
        if self._problem is not None:
            warn(f"step {step} was not kept in memory: {self._problem['text']}.")
        return True

    def close(self, *, frees: bool = False) -> None:
        """Let another `Checkpointer` use the memory, or the training if no restart needs it any more."""
        from ddpsafe._worker.rank import this_rank

        this_rank.uses_memory = False
        if frees and self._is_first:
            self.slots.free()

    def _exchange(self, message: Message) -> dict[int, Message]:
        """Send every rank a message, and return those of all."""
        from ddpsafe._worker import collectives

        return dict(enumerate(map(Message.loads, collectives.all_gather(message.dumps()))))

    def _find_problem(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """Return why this state cannot be kept in memory, as arguments of `_give_up`, if so."""
        if self._problem is not None:
            return self._problem
        ranks = self._ranks
        if ranks.world_size > len(ranks.of_node) and snapshot.sharded:
            return {
                "text": "of a distributed tensor's parts on a node that is lost, there is no copy"
            }
        if not self._is_first:
            return None
        replicated = [name for name, kept in snapshot.names.items() if kept != PER_RANK]
        absent = [name for name in replicated if name not in snapshot.replicated]
        if absent:
            return {"text": f"of {absent[0]!r}, only the node of rank 0 has the whole state"}
        self._length = size_bytes(snapshot.replicated)
        shards = _sharded.bytes_of(snapshot.shards) * len(ranks.of_node)
        own = len(snapshot.own) * ranks.world_size  # each node has those of all
        pinned = self._length if _uses_gpu() else 0
        return self._find_lack(self._length + shards + own, pinned)

    def _find_lack(self, length: int, pinned: int = 0) -> dict[str, Any] | None:
        """Return that the node has too little memory for two states of a length and a pinned copy, if so."""
        needed = 2 * length - self.slots.reserved_bytes()
        needed = max(0, needed) + max(0, pinned - self._copies.reserved_bytes())
        if needed <= 0:
            return None
        import psutil

        machine, limits = psutil.virtual_memory(), read_limits()
        left, most = limits.memory_left_bytes, limits.memory_bytes  # 0 left is a limit, too
        free = machine.available if left is None else min(machine.available, left)
        total = machine.total if most is None else min(machine.total, most)
        if free - needed >= total * _SHARE_LEFT:
            return None
        text = (
            f"two states{' and a pinned copy' if pinned else ''} need {needed / 1e6:.1f} MB more, and of the {free / 1e6:.1f} MB that "
            f"{self._ranks.host} or its control group has left, {_SHARE_LEFT:.0%} of all its memory stay free for "
            "the training"
        )
        return {"text": text, "needed": needed, "free": free}

    def _give_up(self, step: int, text: str, needed: int = 0, free: int = 0) -> None:
        """Raise that memory cannot be used, or warn and use the disk only."""
        explanation = Explanation(
            f"The state of step {step} cannot be kept in memory.",
            cause=f"{text}.",
            fix="give the job more memory, or create the Checkpointer without memory_every, or with "
            'on_failure="warn" to go on with the directory only.',
        )
        if not self._may_give_up:
            if needed:
                raise NoSpaceError(explanation, step=step, needed_bytes=needed, free_bytes=free)
            raise SaveError(explanation, step=step)
        self.is_given_up = True
        if self._ranks.is_main:
            warn(f"states are saved to the directory only, not to memory: {text}.")

    def _write(
        self, request: _save.SaveRequest, messages: dict[int, Message], costs: Costs | None
    ) -> None:
        """Write this rank's part, and on the first rank of a node all the rest."""
        ranks, snapshot = self._ranks, request.snapshot
        slot = self.slots[messages[self._first].facts["slot"]]
        files: dict[str, FileFacts] = {}
        shards: dict[str, ShardedTensor] = {}
        if snapshot.sharded:
            own: dict[str, Any] = {}
            trouble = ""
            try:
                own = _sharded.write_shards(snapshot.shards, slot, ranks.rank)
            except Exception as exc:  # noqa: BLE001 - all ranks learn of it, so that none waits for this one
                trouble = f"rank {ranks.rank}: {as_line(exc)}"
            written = self._exchange(Message(facts={"trouble": trouble, "own": own}))
            troubles = [message.facts["trouble"] for message in written.values()]
            if any(troubles):
                raise OSError("; ".join(filter(None, troubles)))
            files, shards = _sharded.index_of(
                snapshot.sharded, [message.facts["own"] for message in written.values()]
            )
        if not self._is_first:
            return
        self.slots.reserve(self._length)
        replicated = snapshot.replicated
        if _uses_gpu():
            # Through pinned memory, and all at once: torch.save copies tensor by tensor, and waits for each.
            replicated = self._copies.copy(replicated)
        # Rank 0's count, also if its node is lost.
        facts = messages[0].facts
        request = replace(
            request,
            snapshot=replace(snapshot, replicated=replicated),
            metrics=facts["metrics"],
            metadata=self.slots.record(ranks.attempt, facts["metadata"], costs, facts["waited_s"]),
        )
        parts = [message.data for message in messages.values()]
        _save.write_files(slot, request, parts, files, shards)
        self._next = self.slots[1 - slot.number]

    def held(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Return the newest whole state of this node, in plain values, and what is damaged; its first rank does."""
        self._next = None
        if not self._is_first:
            return None, []
        held, problems = self.slots.newest()
        where = f"the memory of {self._ranks.host}"
        if problems:
            warn(f"a state in {where} is damaged and is skipped: {'; '.join(problems)}")
        return None if held is None else asdict(held), [f"{each} (in {where})" for each in problems]

    def provide(
        self, candidate: Candidate, absence_error: Callable[[Absence], RestoreError]
    ) -> Slot | str:
        """Return this node's slot with a state; first send it to the nodes that lack it.

        All ranks call this. If one of those nodes has too little memory, it returns that instead.

        Raises:
            CheckpointError: That, if `may_give_up` is false; or a rank failed.
        """
        ranks, held = self._ranks, candidate.held
        numbers, total = dict(candidate.slots), sum(held.files.values())
        if not candidate.lacking:
            return self.slots[numbers[self._first]]
        import torch
        import torch.distributed as dist

        sends, writes = ranks.rank == candidate.source, ranks.rank in candidate.lacking
        exchange = ranks.begin("restore()")
        try:
            if writes:
                numbers[ranks.rank] = self.slots.target().number
                self.slots[numbers[ranks.rank]].clear()
            lack = self._find_lack(total) if writes else None
        except Exception as exc:
            exchange.fail(exc)
            raise
        exchange.send(Message(facts={"slot": numbers.get(ranks.rank), "lack": lack}))
        facts: dict[str, Any] = exchange.agree(
            lambda sent: {str(rank): each.facts for rank, each in sent.items()},
            absence_error,
            ranks.deadline(),
        )
        lack = next(filter(None, (each["lack"] for each in facts.values())), None)
        if lack is not None:
            if not self._may_give_up:
                self._give_up(held.step, **lack)
            return f"step {held.step} is in memory, and a node lacks it: {lack['text']}"
        slot = self.slots[facts[str(self._first)]["slot"]]
        on_gpu = dist.get_backend() == "nccl"
        done, shown_s = 0, time.monotonic()
        for name in sorted(held.files, key=lambda name: name == NAME):  # the manifest last
            with contextlib.ExitStack() as stack:
                file = -1
                if sends or writes:
                    file = os.open(slot.path(name), os.O_RDWR | os.O_CLOEXEC)
                    stack.callback(os.close, file)
                for start in range(0, held.files[name], _PIECE_BYTES):
                    piece = torch.empty(
                        min(_PIECE_BYTES, held.files[name] - start), dtype=torch.uint8
                    )
                    if sends:
                        os.preadv(file, [piece.numpy().data], start)
                    sent = piece.cuda() if on_gpu else piece
                    dist.broadcast(sent, src=candidate.source)
                    if writes:
                        # Without memory for it, the slot stays without a state, which is found next.
                        with contextlib.suppress(OSError):
                            os.pwrite(file, sent.cpu().numpy().data, start)
                    done += len(piece)
                    if ranks.is_main and time.monotonic() - shown_s > _SHOW_EVERY_S:
                        shown_s = time.monotonic()
                        logger.warning(
                            "%.1f of %.1f MB of step %d have come from rank %d",
                            *(done / 1e6, total / 1e6, held.step, candidate.source),
                        )
                if writes:
                    os.ftruncate(file, held.files[name])
        # Until it is written there, the other ranks of a node that lacked it must not read it.
        exchange = ranks.begin("restore()")
        exchange.send(Message(facts={}))
        exchange.agree(lambda _: {}, absence_error, ranks.deadline())
        return slot

    def note_restored(self, step: int, held: Held | None, *, from_memory: bool) -> None:
        """Continue from a state, which makes newer ones in memory those of another training.

        What the newest state in memory knows of costs holds for this attempt, too.
        """
        self.newest = step if from_memory else None
        now_s = time.monotonic()
        self.schedule = schedule_of(self._every, now_s)
        if held is not None and held.costs and isinstance(self.schedule, CostShare):
            self.schedule.resume(step, Costs(*held.costs), now_s)
        if self._is_first:
            self.slots.drop_newer(step)

    def publish(self, publisher: _save.Publisher, step: int) -> None:
        """Make the newest state in memory a checkpoint in the directory, on rank 0.

        Raises:
            SaveError: The file system refused it or does not respond, the state is not what was written, or the
                lock on the directory is lost.
        """
        deadline = self._ranks.deadline()
        writing = _save.Writing(self._ranks, step, deadline, publisher.directory)
        writing.start(lambda: self._publish(publisher, step, writing))
        writing.wait()
        publisher.warn_of_not_removed()

    def _publish(self, publisher: _save.Publisher, step: int, writing: _save.Writing) -> None:
        held, problems = self.slots.newest()
        on_disk = next(iter(_directory.complete_steps(publisher.directory)), -1)
        if held is not None and on_disk < held.step <= step:
            try:
                self._write_to_directory(publisher, held, writing)
            except DamagedFileError as exc:
                problems.append(str(exc))
            else:
                on_disk = held.step
        if on_disk != step:
            raise SaveError(
                Explanation(
                    f"Step {step} was not saved: it should be in memory, and is not.",
                    cause="; ".join(problems) or "it could not be written there.",
                    fix=f"start again; the directory has step {on_disk}."
                    if on_disk >= 0
                    else "start again.",
                ),
                step=step,
            )

    def _write_to_directory(
        self, publisher: _save.Publisher, held: Held, writing: _save.Writing
    ) -> None:
        slot, step = self.slots[held.slot], held.step
        manifest = read_manifest(slot)
        with _directory.unfinished(publisher.directory, step) as folder:
            for name, facts in manifest.files.items():
                with manifest.open(slot, name) as source, new_file(folder, name) as target:
                    for start in range(0, facts.size_bytes, BLOCK_BYTES):
                        target.write(source.read(start, min(BLOCK_BYTES, facts.size_bytes - start)))
            with new_file(folder, NAME) as target:
                target.write(
                    manifest.model_copy(update={"metadata": user_metadata(manifest)}).dumps()
                )
            publisher.require_lock(step)
            writing.publish(folder, step)
        publisher.note_published(step, manifest.metrics)


def _uses_gpu() -> bool:
    """Return whether states go through pinned memory."""
    initialized: bool = sys.modules["torch"].cuda.is_initialized()
    return initialized


def open_memory(
    ranks: Ranks, directory: Path, every: int | timedelta | Literal["auto"], *, may_give_up: bool
) -> StateMemory | None:
    """Use the memory of the nodes; ``None``, with a warning, if one of them has none for this."""
    from ddpsafe._worker.collectives import group_size
    from ddpsafe._worker.rank import this_rank

    spec, problem = this_rank.spec, ""
    files: list[Path] = []
    if spec is None:
        problem = "the launcher is not ddpsafe's, so no process keeps the memory when a rank ends"
    elif this_rank.uses_memory:
        problem = "another Checkpointer of this process uses it"
    elif group_size() != ranks.world_size:
        problem = "torch's default group is not that of all ranks"
    else:
        files = [Path(f"/proc/{spec.launcher_pid}/fd/{fd}") for fd in spec.memory]
        if not files or not os.access(files[0], os.R_OK | os.W_OK):
            problem = f"the launcher on {ranks.host} has no memory that this rank can open"
    exchange = ranks.begin("Checkpointer()")
    exchange.send(Message(facts={"problem": problem}))

    absence_error = ranks.absence_error(
        DirectoryError,
        "open the memory",
        cause="did not create a Checkpointer with memory_every, or hangs.",
        fix="create the Checkpointer with the same arguments on every rank.",
    )
    answer = exchange.agree(
        lambda sent: {"problems": [rank.facts["problem"] for rank in sent.values()]},
        absence_error,
        ranks.deadline(),
    )
    problem = next(filter(None, answer["problems"]), "")
    if problem:
        if ranks.is_main:
            warn(f"states are saved to the directory only, not to memory: {problem}.")
        return None
    this_rank.uses_memory = True
    return StateMemory(ranks, NodeSlots(files, directory), every, may_give_up=may_give_up)
