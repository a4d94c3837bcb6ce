"""Certificates for tests, made by openssl."""

import subprocess
from pathlib import Path


def certificate(folder: Path) -> dict[str, object]:
    """A certificate for this machine, signed by itself."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=octavo", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    files = ("-keyout", str(key), "-out", str(cert), "-days", "2")
    subprocess.run(["openssl", "req", "-x509", *curve, *names, *files], check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}
