"""The verbs: save, load, restore, open, export. Each is one call for one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .address import Address, find, parse, store_of
from .errors import Corrupt, HoldfastError, NoCheckpoint, Refused
from .loading.checkpoint import Checkpoint, open_step
from .loading.ledger import Ledger
from .run.history import History, Step
from .runs import plain_metrics
from .store.base import Store
from .store.locate import open_store
from .version import libraries

if TYPE_CHECKING:
    from .run.contents import Contents
    from .run.session import Session

_TRIES = 5


@dataclass
class Handle:
    """A save, and how far it has come.

    Attributes:
        step, attempt: of the checkpoint. level: captured, replicated, durable or remote. error: why it failed, or None.
    """

    step: int
    attempt: int
    level: str = "durable"
    error: HoldfastError | None = None

    def wait(self, level: str = "durable", timeout: float | None = None) -> Handle:
        """Return when `level` is reached; here that is at once, since saves of this version are synchronous.

        Raises:
            HoldfastError: the save failed; or the level is one that this version does not have.
        """
        if self.error is not None:
            raise self.error
        if level not in ("captured", "durable"):
            raise HoldfastError(f"level {level} is not available: this version saves to one tier")
        return self


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
) -> Handle:
    """Save a state as one step of a run. Durable and committed when it returns.

    After an error the step does not exist, unless the error says that it is visible and its commit was not confirmed (the disk
    failed while the last record was made durable).

    Args:
        run: a directory, made if missing, `memory://NAME`, or a store.
        state: a State, or a dict of modules, optimizers, tensors, arrays, numbers, strings and containers of them.
        step: steps completed; must exceed those before.
        metrics: numbers to keep with the step. pin: a name that keeps the step from pruning; such a step is self-contained.
        select: patterns of names to save; a step saved in part is loaded when asked for by number, never as `latest`.
        recycle: whether to write over files that pruning has retired.
    Raises:
        Refused, Superseded, Unsupported, Unavailable, NoSpace.
    """
    from .run.marks import check_pin_is_free
    from .run.session import session_of
    from .state import State

    store, state = open_store(run), State.of(state)
    made = state_contents(state, select)
    if pin is not None:
        check_pin_is_free(store, pin)  # before an attempt is claimed
    return save_contents(session_of(store, libraries(), step), made, step, metrics=metrics, pin=pin, recycle=recycle)


def state_contents(state: Any, select: str | Sequence[str] | None) -> tuple[Contents, str]:
    """The contents of a step, and its kind: `full`, or `partial` where `select` leaves something out.

    Raises:
        Refused: the live state is half loaded.  Unsupported: something has no stored form.
    """
    from .state import contents_of

    if state.touched:
        raise Refused(f"the live state is not to be saved: {state.touched}. Load a checkpoint into it first")
    live = state.live()
    contents = contents_of(live, select)
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
) -> Handle:
    """Save what `state_contents` made under an open session; see `save`."""
    from .run.marks import check_pin_is_free
    from .run.marks import pin as make_pin

    if pin is not None:
        check_pin_is_free(session.store, pin)
    contents, kind = made
    done = session.save(
        contents, step, metrics=plain_metrics(metrics), recycle=recycle, refer=refer and pin is None, best=best, kind=kind
    )
    if pin is not None:
        make_pin(session.store, done.ref, pin)
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
) -> Ledger:
    """Fill a live state from a checkpoint, in place. Accounts for every name of the roles given.

    Args:
        address, step: which checkpoint. state: a State or a dict, as for `save`.
        select, exclude: patterns of live names to load, or not to. waive: names whose difference is let pass.
        rename: stored to live names, stars kept. cast: pattern to the torch dtype that stored tensors are converted to.
        live: hyper-parameters that keep their live value, such as `lr`.
        stage: check every byte before any live tensor is touched, at the price of reading twice.
    Returns:
        The account of the load.
    Raises:
        Mismatch: names, shapes, dtypes or aliases differ; nothing was touched.
        Corrupt: stored bytes are damaged; unless `stage`, live tensors may hold wrong bytes then, and the state says so.
        NoCheckpoint, Unavailable, Unsupported.
    """
    from .loading.match import Wishes
    from .state import State

    with open_checkpoint(address, step=step) as checkpoint:
        wishes = Wishes.of(select, exclude, waive, rename, cast, live)
        return restore_from(checkpoint, State.of(state), wishes, all_roles=False, stage=stage)


def restore_from(checkpoint: Checkpoint, state: Any, wishes: Any, *, all_roles: bool, stage: bool = False) -> Ledger:
    """Fill `state` from an open checkpoint; see `restore`."""
    from .loading.fill import check_bytes, put, read_into
    from .loading.match import match
    from .loading.rates import keep_live_rates, tensor_hyper_parameters
    from .loading.reading import first_damage

    live = state.live(to_fill=True)
    matched = match(checkpoint, live, wishes, all_roles)
    if stage and (damages := check_bytes(checkpoint, matched.fills)):
        raise first_damage(damages, checkpoint.store.url, checkpoint.step)
    rates, hyper = keep_live_rates(state, matched), tensor_hyper_parameters(matched)
    state.touched = f"loading step {checkpoint.step} of {checkpoint.store.url} did not finish"
    try:
        matched.ledger.read_bytes = read_into(checkpoint, matched.fills)
    except HoldfastError as error:
        state.touched = f"loading step {checkpoint.step} of {checkpoint.store.url} failed: {error}"
        raise
    put(matched, live)
    rates()
    hyper()
    state.touched = None
    return matched.ledger


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
