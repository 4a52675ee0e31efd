"""A worker's options: their names, types, defaults and meanings, and the checks that they can work.

Strategy: `Options` names each option once. The constructor takes them as keywords (`Unpack[Options]`), so that type
checkers and editors know them; `complete` adds the defaults and checks them when the worker is made, and `check_queue`
checks them against the queue's capabilities as soon as the queue is known, before a message is received. Nobody changes
them after that. Durations are seconds.

Backoff: exponential with jitter, and separate from the lease: a retry delay says when to try again, a lease says how
long a worker may be silent. Pure: the caller passes the random number.
"""

import secrets
from collections.abc import Callable, Mapping
from enum import StrEnum
from inspect import signature
from typing import Annotated, Any, Final, TypedDict, TypeVar

import msgspec

from veilmq.client.keeper import LeaseKeeper, check_keeps
from veilmq.client.keeper.decisions import MAX_HOLD, check_lease
from veilmq.client.messages import Received
from veilmq.client.queue import Queue
from veilmq.client.routed import RoutedQueue
from veilmq.client.shared import checks
from veilmq.client.worker.guard import Guard
from veilmq.client.worker.job.checkpoints import Checkpoints
from veilmq.client.worker.metrics import Meter
from veilmq.client.wrapping import changing_bodies, handles_of, innermost
from veilmq.model.errors import ParameterInvalid, VeilError

_STEPS: Final = 1 << 30
_DOUBLINGS_MAX: Final = 64


def chance() -> float:
    """A random number from 0 up to, but not including, 1."""
    return secrets.randbelow(_STEPS) / _STEPS


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: `first`, then `factor` times the previous one, at most `longest`; up to `jitter` of it is subtracted.

    Raises ParameterInvalid for values that cannot work.
    """

    first: float = 1.0
    factor: float = 2.0
    longest: float = 300.0
    jitter: float = 0.5
    """The random share of the delay: 0 is none, 1 is all of it."""

    def __post_init__(self) -> None:
        checks.positive(self.first, "first")
        checks.positive(self.longest, "longest")
        checks.number(self.factor, "factor", 1, 1_000)
        checks.number(self.jitter, "jitter", 0, 1)
        if self.longest < self.first:
            raise ParameterInvalid(parameter="longest", reason=f"{self.longest:g} s is below first = {self.first:g} s")

    def delay(self, tries: int, drawn: float) -> float:
        """Seconds to wait after failure number `tries` (from 1). drawn: a random number from 0 up to 1."""
        power = min(max(tries, 1) - 1, _DOUBLINGS_MAX)
        return min(self.longest, self.first * self.factor**power) * (1 - self.jitter * drawn)


Word = TypeVar("Word", bound=StrEnum)

LEASE: Final = 30.0
WAIT: Final = 20.0
CONCURRENCY_MAX: Final = 10_000
IN_HAND_MAX: Final = 100_000


class Kind(StrEnum):
    """Where handlers run."""

    THREADS = "threads"
    PROCESSES = "processes"
    """Child processes, for CPU-bound handlers: the parent keeps the leases."""
    ASYNC = "async"
    """Coroutines on one event loop in a separate thread."""


class ErrorReport(StrEnum):
    """How much of an error is reported to the server when its message is given back."""

    LINE = "line"
    """Its type and the first line of its text."""
    TYPE = "type"
    NONE = "none"


class Options(TypedDict, total=False):
    """A worker's options, each with its type and its default; durations are seconds."""

    concurrency: Annotated[int, 1]
    """Handlers that run at the same time; default 1."""
    kind: Annotated[Kind | str, Kind.THREADS]
    """`threads` (default), `processes` or `async`."""
    prefetch: Annotated[int, 0]
    """Messages received ahead, with their leases kept; default 0."""
    batch: Annotated[int | None, None]
    """The handler gets a list of up to this many jobs and returns those that failed; None: it gets one job."""
    lease: Annotated[float | Callable[[Received], float], LEASE]
    """First lease, default 30; or a function of the message (document 003: "based on the content of a message")."""
    keeper: Annotated[bool | Mapping[str, Any] | LeaseKeeper, True]
    """True (default): a lease keeper made for the lease; a mapping: parameters for it; a keeper; False: none."""
    stop_before_expiry: Annotated[float | None, None]
    """Cancel the handler this long before the end of its longest hold: its deadline then (document 003, 3a)."""
    retry: Annotated[Backoff, Backoff()]
    """When a failed message becomes visible again, by its receive count."""
    error_report: Annotated[ErrorReport | str | Callable[[str], str], ErrorReport.LINE]
    """What our server's history records of a handler's error: `line` (default: its type and the first line of its
    text), `type`, `none`; or a function of that line that returns what may be recorded."""
    poison_after: Annotated[int | None, None]
    """After this many receives a message goes to `dead_letter_queue`; None: the queue's own rule decides."""
    dead_letter_queue: Annotated[str | Queue | None, None]
    """Name of a queue of the same account, or any queue. If a pattern changes bodies, a queue with the same
    wrapping."""
    checkpoints: Annotated[Checkpoints | None, None]
    """Where `job.checkpoint` saves; None: in the body, if the queue can replace it."""
    guard: Annotated[Guard | None, None]
    """Work that is done is not done again; results must then be JSON values."""
    guard_key: Annotated[Callable[[Received], str] | None, None]
    """The work that a message stands for; None: the message itself."""
    wait: Annotated[float | None, None]
    """Wait of one poll; None: 20, or the most that the queue allows. Without a keeper at most half of the lease."""
    pollers: Annotated[int, 1]
    """Receives at the same time; default 1."""
    drain: Annotated[float, 30.0]
    """How long handlers may go on after a stop; default 30."""
    kill_after: Annotated[float, 10.0]
    """A child process that still runs this long after its cancellation is killed; default 10."""
    give_up_after: Annotated[float | None, None]
    """If receives fail for this long, the run ends with their error; None: never."""
    on_lost: Annotated[Callable[[Received], object] | None, None]
    """`on_lost(received)`: a lease was lost, or a delete came too late."""
    on_error: Annotated[Callable[[VeilError], object] | None, None]
    """`on_error(error)`: a call to the queue failed and will be retried."""
    on_result: Annotated[Callable[[Received, Any], object] | None, None]
    """`on_result(received, value)`: the work is done, now or (with a guard) before."""
    metrics: Annotated[Meter | None, None]
    """For example a `PrometheusMeter`."""
    tracer: Annotated[Any, None]
    """An OpenTelemetry tracer, or True for the global one."""


_DEFAULTS: Final = {name: hint.__metadata__[0] for name, hint in Options.__annotations__.items()}


def complete(given: Options) -> Options:
    """The options with defaults for those that are not given. Raises ParameterInvalid for what cannot work."""
    unknown = set(given) - set(_DEFAULTS)
    if unknown:
        raise ParameterInvalid(parameter=sorted(unknown)[0], reason="no worker has this parameter")
    options: Any = _DEFAULTS | dict(given)
    options["kind"] = _one_of(Kind, "kind", options["kind"])
    if not callable(options["error_report"]):
        options["error_report"] = _one_of(ErrorReport, "error_report", options["error_report"])
    found: Options = options
    _check_numbers(found)
    _check_objects(options)
    if found["poison_after"] is not None:
        checks.whole(found["poison_after"], "poison_after", 1, 1_000_000)
        if found["dead_letter_queue"] is None:
            raise ParameterInvalid(parameter="dead_letter_queue", reason="poison_after needs one to send to")
    if found["guard_key"] is not None and found["guard"] is None:
        raise ParameterInvalid(parameter="guard", reason="guard_key says nothing without one")
    stop, lease = found["stop_before_expiry"], found["lease"]
    if stop is not None and not callable(lease) and found["keeper"] is False and stop >= lease:
        raise ParameterInvalid(
            parameter="stop_before_expiry", reason=f"{stop:g} s is not below the lease of {lease:g} s"
        )
    return found


def _check_numbers(options: Options) -> None:
    checks.whole(options["concurrency"], "concurrency", 1, CONCURRENCY_MAX)
    checks.whole(options["prefetch"], "prefetch", 0, IN_HAND_MAX)
    checks.whole(options["pollers"], "pollers", 1, 100)
    if options["batch"] is not None:
        checks.whole(options["batch"], "batch", 1, IN_HAND_MAX)
    if (most := capacity(options)) > IN_HAND_MAX:
        raise ParameterInvalid(
            parameter="concurrency",
            reason=f"with batch and prefetch these are {most} messages in hand, more than {IN_HAND_MAX}",
        )
    given: Any = options
    for name in ("stop_before_expiry", "give_up_after", "kill_after"):
        if given[name] is not None:
            checks.positive(given[name], name)
    for name in ("drain", "wait"):
        if given[name] is not None:
            checks.not_negative(given[name], name)
    if not callable(options["lease"]):
        checks.positive(options["lease"], "lease")


_METHODS: Final = {"retry": "delay", "guard": "begin", "checkpoints": "load", "metrics": "ended"}
"""An option that is an object, and one of the methods that it must have."""
_FUNCTIONS: Final = ("guard_key", "on_lost", "on_error", "on_result")
_OF_KEEPER: Final = frozenset(signature(LeaseKeeper).parameters) - {"queue", "clock"}
"""The parameters that a worker's own keeper may be given."""


def _check_objects(given: dict[str, Any]) -> None:
    """Without this check, the worker would find out when it has a message in hand."""
    for name, method in _METHODS.items():
        if given[name] is not None or _DEFAULTS[name] is not None:
            checks.object_with(given[name], name, method)
    for name in _FUNCTIONS:
        checks.function_or_none(given[name], name)
    if given["dead_letter_queue"] is not None and not isinstance(given["dead_letter_queue"], str):
        checks.queue(given["dead_letter_queue"], "dead_letter_queue")
    if not isinstance(given["keeper"], bool | Mapping | LeaseKeeper):
        reason = f"must be True, False, parameters of a keeper or a LeaseKeeper, not {type(given['keeper']).__name__}"
        raise ParameterInvalid(parameter="keeper", reason=reason)
    if isinstance(given["keeper"], Mapping) and (unknown := set(given["keeper"]) - _OF_KEEPER):
        names = ", ".join(sorted(map(str, unknown)))
        raise ParameterInvalid(parameter="keeper", reason=f"has {names}, but may have {', '.join(sorted(_OF_KEEPER))}")


def _one_of(kind: type[Word], parameter: str, given: Any) -> Word:
    """Raises ParameterInvalid."""
    try:
        return kind(given)
    except ValueError:
        reason = f"{given!r} is not one of {', '.join(kind)}"
        raise ParameterInvalid(parameter=parameter, reason=reason) from None


def capacity(options: Options) -> int:
    """The most messages in hand."""
    return options["concurrency"] * (options["batch"] or 1) + options["prefetch"]


def first_lease(options: Options) -> float:
    """The lease that a receive asks for, before a message's content is known."""
    lease = options["lease"]
    return LEASE if callable(lease) else lease


def keeper_parameters(options: Options) -> dict[str, Any]:
    """Parameters of the worker's own keeper: leases are extended when half is gone, unless the user says otherwise."""
    lease, keeper = first_lease(options), options["keeper"]
    derived = {"visibility_timeout": lease, "interval": lease / 3, "minimal_life": lease / 6}
    derived["max_hold"] = max(MAX_HOLD, lease)  # else a handler loses a message that stays hidden
    return derived | dict(keeper) if isinstance(keeper, Mapping) else derived


def check_queue(options: Options, queue: Queue) -> None:
    """Raises ParameterInvalid if this queue cannot do it, or the keeper cannot hold its messages."""
    capabilities, keeper, wait = checks.queue(queue).capabilities, options["keeper"], options["wait"]
    if isinstance(keeper, LeaseKeeper):
        check_keeps(keeper, queue)
    if isinstance(options["dead_letter_queue"], str) and (pattern := _changing_bodies(queue)) is not None:
        reason = f"bodies go through {pattern}, and a name is a bare queue: pass the queue object, in the same pattern"
        raise ParameterInvalid(parameter="dead_letter_queue", reason=reason)
    check_lease("lease", first_lease(options), capabilities)
    if wait is not None and wait > capabilities.wait_max:
        raise ParameterInvalid(
            parameter="wait", reason=f"{wait:g} s is above the {capabilities.wait_max:g} s of {capabilities.protocol}"
        )


def lane_of(queue: Queue, message: Received) -> str | None:
    """The messages of one lane are worked one after the other: those of a FIFO queue's group; None: any time."""
    if message.group is None or queue.capabilities.native_fifo:
        return message.group
    inside = innermost(queue)
    if not isinstance(inside, RoutedQueue):
        return None
    found = None if handles_of(queue) else inside.home(message.handle)
    if found is None:  # it may be of any of them
        return message.group if _is_fifo(inside) else None
    home, handle = found
    lane = lane_of(home, msgspec.structs.replace(message, handle=handle))
    return None if lane is None else f"{home.name} {lane}"


def _is_fifo(queue: Queue) -> bool:
    """Whether the queue is FIFO, or one of several is."""
    inside = innermost(queue)
    return queue.capabilities.native_fifo or (isinstance(inside, RoutedQueue) and any(map(_is_fifo, inside.queues)))


def _changing_bodies(queue: Queue) -> str | None:
    """The pattern around the queue, or around one of its queues, that transforms what is sent; None: there is none."""
    inside = innermost(queue)
    found = changing_bodies(queue)
    if found is None and isinstance(inside, RoutedQueue):
        return next(filter(None, map(_changing_bodies, inside.queues)), None)
    return found
