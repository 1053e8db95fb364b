"""The sign-in page."""

from __future__ import annotations

from zbv_service.pages.shell import Shell, render


def sign_in_page(destination: str, shell: Shell, complaint: str = "", *, asks_again: bool = False) -> str:
    """A field for a token, and instructions for a sign-in link.

    Parameters
    ----------
    destination
        The path to open afterwards.
    complaint
        Why the last attempt failed.
    asks_again
        Make the browser reload the page once.
    """
    return render(
        "sign_in.html.j2", shell, destination=destination, complaint=complaint, asks_again=asks_again
    )
