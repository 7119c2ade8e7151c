"""The addresses of another host."""

from __future__ import annotations

from ddpsafe._clock import BoundedCall
from ddpsafe._config.endpoint import find_address, resolve_host


def addresses_of(host: str, port: int, *, limit_s: float) -> list[str]:
    """Resolve a host, waiting no longer than `limit_s`.

    Raises:
        OSError: When it does not resolve.
        TimeoutError: When the resolver has not answered by then.
    """
    if find_address(host) is not None:
        return [host]
    call = BoundedCall(lambda: resolve_host(host, port), name="ddpsafe-resolve")
    if not call.wait(limit_s):
        msg = f"no answer within {limit_s:.1f} s"
        raise TimeoutError(msg)
    return call.result()
