"""How a client checks a service's certificate, and which of its own it shows."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from zbv_service.client_token import CredentialsUnusable

CA_VARIABLE = "ZBV_CLIENT_TLS_CA"
CERT_VARIABLE = "ZBV_CLIENT_TLS_CERT"
KEY_VARIABLE = "ZBV_CLIENT_TLS_KEY"


def find() -> ssl.SSLContext | bool:
    """What the environment says, as httpx takes it; True is the usual authorities and no certificate.

    Raises
    ------
    CredentialsUnusable
        When a file is named that cannot be used, or a key without its certificate.
    """
    ca, cert, key = (os.environ.get(name) for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
    if not (ca or cert or key):
        return True
    if key and not cert:
        raise CredentialsUnusable("found a TLS key without its certificate; give both (--tls-cert).")
    for name in filter(None, (ca, cert, key)):
        _require_readable(Path(name))
    try:
        made = ssl.create_default_context(cafile=ca or None)
        if cert:
            made.load_cert_chain(cert, key or None)
    except ssl.SSLError as error:
        names = ", ".join(filter(None, (ca, cert, key)))
        raise CredentialsUnusable(
            f"cannot use {names} for TLS: {error.reason or error}. They must be PEM files, and a key must "
            f"be that of its certificate, without a passphrase."
        ) from None
    return made


def _require_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise CredentialsUnusable(f"cannot read {path}: {error.strerror}.") from None
