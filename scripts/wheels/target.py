"""Owns the target machine: the wheels that it can load, and its values of requirements' markers."""

from __future__ import annotations

from dataclasses import dataclass

from wheels.failure import WheelhouseError

# SGLang's own wheels are built against this one; x86-64 had its first manylinux platforms with 2.5, 2.12 and 2.17.
OLDEST_GLIBC = (2, 34)
_FIRST_GLIBC = 5
_OLD_NAMES = ("manylinux1", "manylinux2010", "manylinux2014")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An x86-64 Linux with CPython `python` (such as "3.12") and glibc `glibc` (such as (2, 39))."""

    python: str
    glibc: tuple[int, int]

    def __post_init__(self) -> None:
        if self.glibc < OLDEST_GLIBC:
            raise WheelhouseError(
                f"--glibc is {self.glibc[0]}.{self.glibc[1]}, but SGLang's wheels need glibc 2.34 or newer "
                "(Debian 12, Ubuntu 22.04, RHEL 9). Such a target cannot run them outside a container."
            )

    def platforms(self) -> list[str]:
        """Return the platform tags of wheels that the target can load, the newest first."""
        newest = [f"manylinux_2_{minor}" for minor in range(self.glibc[1], _FIRST_GLIBC - 1, -1)]
        return [f"{name}_x86_64" for name in (*newest, *reversed(_OLD_NAMES))] + ["linux_x86_64"]

    def pip_options(self) -> list[str]:
        """Return the options that make pip choose for the target instead of its own machine."""
        options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python]
        for platform in self.platforms():
            options += ["--platform", platform]
        return options

    def markers(self) -> dict[str, str]:
        """Return the environment in which the target's pip evaluates the markers of requirements."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }
