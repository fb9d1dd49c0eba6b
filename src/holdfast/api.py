"""The verbs: save, load, restore, open, export. Each is one call for one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .address import Address, find, parse, store_of
from .errors import Corrupt, NoCheckpoint, Refused, Unavailable
from .format.records import StepRef
from .handle import Handle
from .loading.checkpoint import Checkpoint, open_step
from .loading.ledger import Ledger
from .policy.durations import seconds_of
from .run.history import History, Step
from .runs import plain_metrics
from .store.base import Store
from .store.locate import open_store
from .version import libraries

if TYPE_CHECKING:
    from .coding import Coder
    from .loading.together import Alone, Together
    from .run.contents import Contents
    from .run.joint import Joint
    from .run.session import Session
    from .run.team import Team

_TRIES = 5
_joints: dict[tuple[str, tuple[int, ...]], Joint] = {}


def open_checkpoint(address: Any, *, step: int | None = None) -> Checkpoint:
    """Open a checkpoint without reading its data.

    Args:
        address: `[format:]PATH[@STEP|@latest|@best|@PIN]`, a path, or a store. step: the same as `@STEP`.
    Returns:
        The open checkpoint; a context manager. While it is open its files are not written over.
    Raises:
        NoCheckpoint, Corrupt, Unavailable, Unsupported.
    """
    where = parse(address, step)
    if where.format is not None:
        from .interop.safetensors_dir import open_safetensors

        return open_safetensors(str(where.path))
    return open_found(store_of(where), where)


def open_found(store: Store, where: Address) -> Checkpoint:
    """Open the step that an address means. A step that is pruned in this very moment is looked for again."""
    history = History(store)
    for _ in range(_TRIES):
        found = find(history, where.at)
        try:
            return open_and_lock(store, found)
        except FileNotFoundError as error:
            if _still_there(history, found):
                name = error.filename or error
                raise Corrupt(
                    f"step {found.step} of {store.url} lacks a file that its record names: {name}", file=str(name)
                ) from error
    raise NoCheckpoint(f"{where}: each step found was pruned while it was being opened; hold it with Run.hold")


def open_and_lock(store: Store, found: Step) -> Checkpoint:
    """Open a step and all its files.

    Raises:
        FileNotFoundError: a file is gone.
    """
    checkpoint = open_step(store, found.path, found.commit)
    try:
        checkpoint.open_files()
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _still_there(history: History, found: Step) -> bool:
    return any(s.ref == found.ref and s.path == found.path for s in history.look().steps)


def save(
    run: Any,
    state: Any,
    step: int,
    *,
    metrics: Mapping[str, Any] | None = None,
    pin: str | None = None,
    select: str | Sequence[str] | None = None,
    recycle: bool = True,
    ranks: Sequence[int] | None = None,
    deadline: float | str = "10m",
) -> Handle:
    """Save a state as one step of a run. Durable and committed when it returns.

    Where torch.distributed is initialised, every rank of `ranks` calls this, with what it holds of the state; all return, or all
    raise the same error.

    After an error the step does not exist, unless the error says that it is visible and its commit was not confirmed (the disk
    failed while the last record was made durable).

    Args:
        run: a directory, made if missing, `memory://NAME`, or a store.
        state: a State, or a dict of modules, optimizers, tensors, arrays, numbers, strings and containers of them.
        step: steps completed; must exceed those before.
        metrics: numbers to keep with the step. pin: a name that keeps the step from pruning; such a step is self-contained.
        select: patterns of names to save; a step saved in part is loaded when asked for by number, never as `latest`.
        recycle: whether to write over files that pruning has retired.
        ranks: global ranks that save together; all of the job by default.
        deadline: seconds, or "10m": by then the outcome is known.
    Raises:
        Refused, Superseded, Unsupported, Unavailable, NoSpace.  Deadline: naming the ranks that did not come.
    """
    from .ranks import team_of
    from .run.marks import check_pin_is_free
    from .run.session import session_of
    from .state import State

    seconds = seconds_of(deadline, "deadline")
    store, state, team = open_store(run), State.of(state), team_of(ranks)
    if team is not None:
        joint = joint_of(team, store)
        return save_jointly(
            joint, lambda: session_of(store, libraries(), step), state, step, seconds,
            metrics=metrics, pin=pin, select=select, recycle=recycle,
        )  # fmt: skip
    made = state_contents(state, select)
    if pin is not None:
        check_pin_is_free(store, pin)  # before an attempt is claimed
    return save_contents(session_of(store, libraries(), step), made, step, metrics=metrics, pin=pin, recycle=recycle)


def state_contents(state: Any, select: str | Sequence[str] | None, ranks: tuple[int, ...] = ()) -> tuple[Contents, str]:
    """The contents of a step, and its kind: `full`, or `partial` where `select` leaves something out.

    Raises:
        Refused: the live state is half loaded.  Unsupported: something has no stored form.
    """
    from .state import contents_of
    from .tensors import await_devices

    if state.touched:
        raise Refused(f"the live state is not to be saved: {state.touched}. Load a checkpoint into it first")
    live = state.live(ranks=ranks)
    contents = contents_of(live, select)
    await_devices(item.sharded.local for item in live.tensors.values())
    left_out = len(contents.tensors) < len(live.tensors) or {v.role for v in live.values.values()} - contents.roles.keys()
    return contents, "partial" if left_out else "full"


def save_contents(
    session: Session,
    made: tuple[Contents, str],
    step: int,
    *,
    metrics: Mapping[str, Any] | None = None,
    pin: str | None = None,
    recycle: bool = True,
    refer: bool = True,
    best: list[str] | None = None,
    coder: Coder | None = None,
) -> Handle:
    """Save what `state_contents` made under an open session; see `save`."""
    from .run.marks import check_pin_is_free
    from .run.marks import pin as make_pin

    if pin is not None:
        check_pin_is_free(session.store, pin)
    contents, kind = made
    done = session.save(
        contents, step,
        metrics=plain_metrics(metrics), recycle=recycle, refer=refer and pin is None, best=best, kind=kind, coding=coder,
    )  # fmt: skip
    if pin is not None:
        make_pin(session.store, done.ref, pin)
    return Handle(done.step, done.attempt)


def joint_of(team: Team, store: Store) -> Joint:
    """What this rank keeps between the saves of a team into a run."""
    from .run.joint import Joint

    known = _joints.get((store.url, team.ranks))
    if known is None or known.team is not team:
        known = _joints[store.url, team.ranks] = Joint(team, store)
    known.store = store  # one that remembers nothing: the run may have been removed since, and begun anew
    return known


def save_jointly(
    joint: Joint,
    open_session: Callable[[], Session],
    state: Any,
    step: int,
    seconds: float,
    *,
    metrics: Mapping[str, Any] | None = None,
    pin: str | None = None,
    select: str | Sequence[str] | None = None,
    recycle: bool = True,
    refer: bool = True,
    best: list[str] | None = None,
    coder: Coder | None = None,
) -> Handle:
    """Save together with the other ranks of a team; see `save`."""
    from .run.marks import check_pin_is_free
    from .run.marks import pin as make_pin

    def opened() -> Session:
        if pin is not None:
            check_pin_is_free(joint.store, pin)  # before an attempt is claimed
        return open_session()

    plain: dict[str, Any] = {}

    def make() -> tuple[Contents, str]:
        plain.update(plain_metrics(metrics))  # here, so that an error of it is one of all ranks
        return state_contents(state, select, joint.team.ranks)

    done = joint.save(
        make, opened, step, seconds,
        metrics=plain, best=best, recycle=recycle, refer=refer and pin is None, coding=coder,
    )  # fmt: skip
    if pin is not None:
        joint.team.lead(f"pin step {step}", seconds, lambda: make_pin(joint.store, done.ref, pin))
    return Handle(done.step, done.attempt)


def restore(
    address: Any,
    state: Any,
    *,
    step: int | None = None,
    select: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    waive: str | Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    cast: Mapping[str, Any] | None = None,
    live: str | Sequence[str] = (),
    stage: bool = False,
    ranks: Sequence[int] | None = None,
    deadline: float | str = "30m",
) -> Ledger:
    """Fill a live state from a checkpoint, in place, whatever layout it was saved under. Accounts for every name of its roles.

    Where torch.distributed is initialised, every rank of `ranks` calls this; all return, or all raise the same error.

    Args:
        address, step: which checkpoint. state: a State or a dict, as for `save`.
        select, exclude: patterns of live names to load, or not to. waive: names whose difference is let pass.
        rename: stored to live names, stars kept. cast: pattern to the torch dtype that stored tensors are converted to.
        live: hyper-parameters that keep their live value, such as `lr`.
        stage: check every byte before any live tensor is touched, at the price of reading twice.
        ranks: global ranks that load together; all of the job by default. deadline: seconds, or "30m": by then it is done.
    Returns:
        The account of the load, of this rank.
    Raises:
        Mismatch: names, shapes, dtypes or aliases differ; nothing was touched.
        Corrupt: stored bytes are damaged; unless `stage`, live tensors may hold wrong bytes then, and the state says so.
        NoCheckpoint, Unavailable, Unsupported.  Deadline: naming the ranks that did not come.
    """
    from .capture.barrier import hold_all
    from .loading.restoring import restore_from
    from .loading.together import Together
    from .loading.wishes import Wishes
    from .ranks import team_of
    from .state import State

    state, seconds, team = State.of(state), seconds_of(deadline, "deadline"), team_of(ranks)
    wishes = Wishes.of(select, exclude, waive, rename, cast, live)
    hold_all()
    if team is None:
        with open_checkpoint(address, step=step) as checkpoint:
            return restore_from(checkpoint, state, wishes, all_roles=False, stage=stage)
    where = parse(address, step)
    together = Together(team, f"restore of {where.at}", seconds)
    if where.format is not None:
        opening: Any = together.open(lambda: open_checkpoint(address, step=step))
    else:
        opening = open_together(together, store_of(where), lambda history: find(history, where.at))
    with opening as checkpoint:
        return restore_from(checkpoint, state, wishes, all_roles=False, stage=stage, ranks=together)


@contextlib.contextmanager
def open_together(together: Alone | Together, store: Store, choose: Callable[[History], Step]) -> Iterator[Checkpoint]:
    """Open one step on all ranks of a team; the leader chooses it, and keeps it from being pruned.

    Raises:
        NoCheckpoint, Corrupt, Unavailable: on all ranks alike.
    """
    from .run.marks import held

    history = History(store)
    with contextlib.ExitStack() as stack:

        def choose_and_hold() -> list[int]:
            found = stack.enter_context(held(history, choose(history).ref))
            return [found.step, found.attempt]

        ref = StepRef(*together.find(choose_and_hold))

        def opened() -> Checkpoint:
            found = history.by_ref(ref)
            if found is None:
                raise Unavailable(
                    f"step {ref.step} (attempt {ref.attempt}), which the first rank has chosen, is not at {store.url} of this "
                    "one: all ranks must reach the same storage"
                )
            try:
                return open_and_lock(store, found)
            except FileNotFoundError as error:
                name = str(error.filename or error)
                raise Corrupt(f"step {ref.step} of {store.url} lacks a file that its record names: {name}", file=name) from error

        yield stack.enter_context(together.open(opened))


def load(
    address: Any,
    *,
    step: int | None = None,
    select: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
) -> dict[str, Any]:
    """A checkpoint as a tree of plain CPU tensors and values: roles, then what each role's state is made of.

    Args:
        address, step: which checkpoint. select, exclude: patterns of names.
    Returns:
        Nested dicts; a module's role is its state dict. Tied tensors share memory.
    Raises:
        NoCheckpoint, Corrupt, Unavailable, Unsupported.
    """
    from .loading.tree import load_tree

    with open_checkpoint(address, step=step) as checkpoint:
        return load_tree(checkpoint, select, exclude)


def export(
    address: Any,
    target: Any,
    *,
    to: str = "safetensors",
    step: int | None = None,
    select: str | Sequence[str] | None = None,
    cast: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 << 30,
) -> list[str]:
    """Write a checkpoint in another format, tensor by tensor.

    Args:
        target: a directory (`safetensors`, `hf`) or a file (`torch`), which must not exist or be empty.
        to: `safetensors`: sharded as Hugging Face does, with `model.safetensors.index.json`; `hf`: the same for the weights of
            the module roles, without the role's name; `torch`: one file for `torch.load`.
        select: patterns of names. cast: pattern to dtype. max_shard_bytes: of a safetensors file.
    Returns:
        The paths of the files written.
    Raises:
        NoCheckpoint, Corrupt, Unavailable, Refused: the target holds something.
    """
    from .interop.export import export_checkpoint

    with open_checkpoint(address, step=step) as checkpoint:
        return export_checkpoint(checkpoint, target, to, select, cast or {}, max_shard_bytes)
