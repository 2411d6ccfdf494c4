"""Which faults are worth another attempt: something outside this program failed and may recover by itself."""

from __future__ import annotations

import errno

# By qualified name, so that asking costs no import of botocore, aiohttp or httpx. Base classes count.
_TRANSIENT_CLASSES = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.ResponseStreamingError",
        "fsspec.exceptions.FSTimeoutError",
        "httpx.TransportError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "tasks.vllm_server.ServerDied",
        "urllib3.exceptions.ProtocolError",
    }
)
_TRANSIENT_CODES = frozenset(
    {
        "InternalError",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_TRANSIENT_ERRNOS = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.ECONNRESET, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH}
)


def is_transient(error: BaseException) -> bool:
    """True for lost connections, timeouts, throttling, 5xx answers and engines that died; else False."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    if {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__} & _TRANSIENT_CLASSES:
        return True
    if isinstance(error, OSError) and error.__cause__ is not None:  # s3fs puts botocore's error behind its own
        return is_transient(error.__cause__)
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore.exceptions.ClientError
        details = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return str(details.get("Code")) in _TRANSIENT_CODES or status in _TRANSIENT_STATUSES
    return getattr(response, "status_code", 0) in _TRANSIENT_STATUSES  # httpx.HTTPStatusError and kin
