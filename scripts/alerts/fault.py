"""What is done to a daemon or a gateway, and the alerts that it must raise."""

from dataclasses import dataclass
from typing import Callable


@dataclass
class Fault:
    """What begins it, what goes on while it lasts (once a second), what ends it, and the alerts that it must raise."""
    name: str
    begin: Callable
    end: Callable
    alerts: list
    each_second: Callable = lambda: None
    #: Alerts that must stay silent, although they are near.
    silent: tuple = ()
    #: The job whose scrapes it lets fail.
    stops: str = ""
