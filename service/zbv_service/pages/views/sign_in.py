"""The page on which a browser's session begins."""

from __future__ import annotations

from zbv_service.pages.shell import Shell, render


def sign_in_page(destination: str, shell: Shell, complaint: str = "", *, asks_again: bool = False) -> str:
    """A field for a token, and how to get a link that needs none.

    Parameters
    ----------
    destination
        Path to go to afterwards.
    complaint
        What was wrong with the last try.
    asks_again
        Have the browser load it once more by itself.
    """
    return render(
        "sign_in.html.j2", shell, destination=destination, complaint=complaint, asks_again=asks_again
    )
