"""The call that the ranks make: judged and pickled before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._launcher.workers import PickledCall
from ddpsafe._wire import payload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpsafe._errors import DDPSafeError
    from ddpsafe._wire.spec import CallStyle

    OnRetry = Callable[[DDPSafeError], Sequence[Any] | None]


class Calls:
    """The call that ranks make, which a retry may change; pickled before any process starts."""

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_retry: OnRetry | None,
        *,
        style: CallStyle,
    ) -> None:
        self._fn, self._kwargs, self._on_retry = fn, kwargs, on_retry
        self._style: CallStyle = style
        self.current = self._pickled(args)

    def change(self, failure: DDPSafeError) -> bool:
        """Ask for other arguments; tell whether there are any."""
        args = None if self._on_retry is None else self._on_retry(failure)
        if args is not None:
            self.current = self._pickled(args)
        return args is not None

    def _pickled(self, args: Sequence[Any]) -> PickledCall:
        _require_call(self._fn, args)
        pickled = _pickle(self._fn, args, self._kwargs, self._style)
        _require_fitting(self._fn, args, self._kwargs, self._style)
        return pickled


def _require_call(fn: object, args: object) -> None:
    if not callable(fn):
        what = f"{fn!r} is not callable."
        cause = "the function was called instead of being passed."
        raise ConfigError(Explanation(what, cause=cause, fix="write launch(train, args=(…,))."))
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        what = f"args={args!r} is no tuple of the function's arguments."
        cause = "a single argument was passed by itself."
        raise ConfigError(Explanation(what, cause=cause, fix="write args=(value,) with a comma."))


def _require_fitting(
    fn: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], style: CallStyle
) -> None:
    """Refuse arguments that the function cannot take, the context or rank in front included."""
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        what = f"{getattr(fn, '__qualname__', repr(fn))} is an async function or a generator."
        cause = "calling it only makes an object; nothing of its body would run."
        fix = "pass a plain function; inside, asyncio.run(…) or a loop runs the other one."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin that does not say
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as exc:
        name = getattr(fn, "__qualname__", repr(fn))
        first, other = ("the context", "spawn") if style == "launch" else ("the rank", "launch")
        what = f"{name}{signature} cannot be called with {first} and {len(args)} arguments: {exc}."
        cause = f"{style} passes {first} first, then args."
        fix = f"add a first parameter for {first}, check args=…, or use ddpsafe.{other}."
        raise ConfigError(Explanation(what, cause=cause, fix=fix)) from None


def _pickle(
    fn: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], style: CallStyle
) -> PickledCall:
    try:
        # Scripts for torch's spawn may write to a tensor and read it in the caller.
        call = (fn, tuple(args), dict(kwargs))
        data, handles = payload.dumps_call(call, shares_tensors=style == "spawn")
    except Exception as exc:
        raise _cannot_travel(fn, args, kwargs, exc) from exc
    return PickledCall(data=data, handles=handles)


def _cannot_travel(
    fn: object, args: Sequence[Any], kwargs: Mapping[str, Any], exc: Exception
) -> ConfigError:
    name = getattr(fn, "__qualname__", repr(fn))
    for part, path in ((args, "args"), (kwargs, "kwargs"), (fn, name)):
        found = payload.find_unpicklable(part, path)
        if found is not None:
            path, exc = found[0], found[1]  # type: ignore[assignment]  # noqa: PLW2901
            break
    else:
        path = name
    what = f"{path} cannot be sent to another process: {exc}"
    cause = "open files, locks, sockets, generators and GPU tensors belong to one process."
    fix = "pass what it is made from (a path, a seed) and make it inside the function."
    return ConfigError(Explanation(what, cause=cause, fix=fix))
