"""What launches of Triton kernels share."""


def launch_options(pdl: bool) -> dict:
    """Keyword arguments of a launch: Triton knows `launch_pdl` only for targets that have it, and not in the interpreter."""
    return {"launch_pdl": True} if pdl else {}
