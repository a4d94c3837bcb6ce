"""Options of the gateway process."""

from dataclasses import dataclass

from octavo.common.options import CURVE_KEYS_HELP, INSECURE_HELP, OptionError, option

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class GatewayOptions:
    """What `octavo gateway` can be told."""

    model: str = option("demo", "`demo`, a folder of safetensors, a .gguf file, or a hub id")
    served_model_name: str | None = option(None, "what clients call the model")
    controlplane_host: str = option("127.0.0.1", "where the control plane runs")
    gateway_port: int = option(7461, "the control plane's port for gateways", minimum=1, maximum=65535)
    curve_keys: str | None = option(None, CURVE_KEYS_HELP)
    insecure: bool = option(False, INSECURE_HELP)
    grpc_host: str = option("127.0.0.1", "address to serve gRPC on")
    grpc_port: int = option(50051, "port to serve gRPC on", minimum=1, maximum=65535)
    http_host: str = option("127.0.0.1", "address to serve HTTP on")
    http_port: int = option(8000, "port to serve HTTP on", minimum=1, maximum=65535)
    api_key_file: str | None = option(
        None,
        "file with the API keys of clients, one per line, # begins a comment; OCTAVO_API_KEYS may have "
        "more, separated by commas",
    )
    tls_cert: str | None = option(None, "certificate in PEM, with which gRPC and HTTP speak TLS only")
    tls_key: str | None = option(None, "private key of --tls-cert, in PEM")
    max_live_requests: int = option(
        2048, "requests beyond this many at once are refused", minimum=1, maximum=1 << 20
    )
    max_unread_tokens: int = option(
        4096,
        "tokens of each sample that may wait for a client that does not read; then the stream is ended",
        minimum=1,
        maximum=1 << 24,
    )
    tokenizer_threads: int = option(
        2, "threads that tokenize prompts beside the event loop", minimum=1, maximum=64
    )
    drain_timeout: float = option(
        10.0, "seconds that running requests get to finish when the gateway is stopped", minimum=0
    )
    log_level: str = option("info", "least serious log lines to print", choices=LOG_LEVELS)
    log_prompts: bool = option(False, "show prompts in the log, which otherwise has no text of clients")

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key go together: give both or neither")


@dataclass(frozen=True)
class LocalOptions:
    """What `octavo serve` takes beside the options of its processes."""

    workers: int = option(
        1,
        "gangs of workers to start, each of --tensor-parallel processes; their probe ports follow one "
        "another from --worker-probe-port on",
        minimum=1,
        maximum=64,
    )
    start_timeout: float = option(600.0, "seconds until the service must be ready", minimum=1.0)


@dataclass(frozen=True)
class ClientOptions:
    """Where the client commands find a gateway."""

    grpc_host: str = option("127.0.0.1", "address of the gateway")
    grpc_port: int = option(50051, "gRPC port of the gateway", minimum=1, maximum=65535)
    api_key: str | None = option(
        None,
        "key that the gateway asks for; better given in the environment, which fewer read",
        secret=True,
    )
    tls_ca: str | None = option(
        None, "speak TLS, and trust the certificates in this PEM file (of the gateway, or its issuer)"
    )

    @property
    def target(self) -> str:
        return f"{self.grpc_host}:{self.grpc_port}"
