"""The one exception that a client's request can end with."""

RETRY_SECONDS = 1  # after which a client may try again, where that makes sense

# What the other end of an error code is on HTTP. A feature that is not offered is the client's to
# avoid, so it is 400 there.
HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "UNIMPLEMENTED": 400,
    "FAILED_PRECONDITION": 400,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class RequestError(Exception):
    """A request that ends with an error.

    Attributes:
        code: name of a gRPC status code, one of `HTTP_STATUS`.
        message: for the client; names the field and the limit.
        field: the field at fault, if one is.
    """

    def __init__(
        self, code: str, message: str, field: str | None = None, http_status: int | None = None
    ) -> None:
        """`http_status`: where HTTP knows better than `HTTP_STATUS` what has happened."""
        super().__init__(message)
        self.code = code if code in HTTP_STATUS else "INTERNAL"
        self.message = message
        self.field = field
        self.http_status = http_status or HTTP_STATUS[self.code]

    @property
    def may_be_retried(self) -> bool:
        """Whether the same request may be taken a little later, unchanged."""
        return self.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")


def invalid(field: str, problem: str) -> RequestError:
    """`field` has a value that it cannot have; `problem` goes on from the field's name."""
    return RequestError("INVALID_ARGUMENT", f"{field} {problem}", field)


def not_offered(field: str, what: str | None = None) -> RequestError:
    """`field` asks for a feature that this version does not have."""
    return RequestError("UNIMPLEMENTED", f"{what or field} is not offered by this version", field)
