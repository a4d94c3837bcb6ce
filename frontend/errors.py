"""The one exception that a client's request can end with."""

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

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code if code in HTTP_STATUS else "INTERNAL"
        self.message = message
        self.field = field

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]


def invalid(field: str, problem: str) -> RequestError:
    """`field` has a value that it cannot have; `problem` goes on from the field's name."""
    return RequestError("INVALID_ARGUMENT", f"{field} {problem}", field)


def not_offered(field: str, what: str | None = None) -> RequestError:
    """`field` asks for a feature that this version does not have."""
    return RequestError("UNIMPLEMENTED", f"{what or field} is not offered by this version", field)
