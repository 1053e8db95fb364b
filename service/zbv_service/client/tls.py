"""How a client checks the service's certificate, and which client certificate it uses."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from zbv_service.client.tokens import CredentialsUnusable

CA_VARIABLE = "ZBV_CLIENT_TLS_CA"
CERT_VARIABLE = "ZBV_CLIENT_TLS_CERT"
KEY_VARIABLE = "ZBV_CLIENT_TLS_KEY"
_FLAGS = {CA_VARIABLE: "--tls-ca", CERT_VARIABLE: "--tls-cert", KEY_VARIABLE: "--tls-key"}


def find() -> ssl.SSLContext | bool:
    """httpx's ``verify``, from the environment; True uses the system's authorities and no client certificate.

    Raises
    ------
    CredentialsUnusable
        When a file cannot be used, or there is a key without a certificate.
    """
    files = {name: found for name in _FLAGS if (found := os.environ.get(name))}
    if not files:
        return True
    if KEY_VARIABLE in files and CERT_VARIABLE not in files:
        raise CredentialsUnusable(
            f"found --tls-key (${KEY_VARIABLE}) without --tls-cert (${CERT_VARIABLE}); give both."
        )
    for name, file in files.items():
        try:
            Path(file).open("rb").close()
        except OSError as error:
            raise CredentialsUnusable(
                f"{_FLAGS[name]} (${name}): cannot read {file}: {error.strerror}."
            ) from None
    try:
        context = ssl.create_default_context(cafile=files.get(CA_VARIABLE))
        if CERT_VARIABLE in files:
            context.load_cert_chain(files[CERT_VARIABLE], files.get(KEY_VARIABLE))
    except ssl.SSLError as error:
        raise CredentialsUnusable(
            f"cannot use {', '.join(files.values())} for TLS: {error.reason or error}. They must be PEM "
            f"files, and the key must belong to the certificate and have no passphrase."
        ) from None
    return context
