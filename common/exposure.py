"""What other machines can reach must be protected, or be meant to be open."""

import ipaddress

from octavo.common.options import OptionError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket that is bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # some name: it may be anything


def check_exposure(
    flag: str, host: str, protection: str, *, is_protected: bool, insecure: bool
) -> None:
    """Raises OptionError where `host` can be reached from elsewhere and nothing protects it.

    Args:
        flag: the option that gave `host`.
        protection: what to give this process, for the message.
        insecure: the operator says that it shall be so.
    """
    if is_protected or insecure or is_loopback(host):
        return
    raise OptionError(
        f"{flag} {host} lets other machines in, and nothing keeps strangers out: give {protection}, or "
        "say --insecure where the network is trusted"
    )
