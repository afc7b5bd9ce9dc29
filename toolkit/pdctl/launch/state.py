"""What pdctl remembers of the deployments it started on this machine.

One folder per deployment below ``$PDCTL_STATE_DIR`` (default ``$XDG_STATE_HOME/pdctl``, that is
``~/.local/state/pdctl``): a record, a script and a log per leg. A record is written before its
process starts, so that a killed pdctl forgets nothing.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pdctl.errors import PdctlError
from pdctl.legs import GRACE_SECONDS
from pdctl.render import ROUTER_CONFIG, File

KEPT_LOGS = 3
"""Logs of earlier starts that are kept per leg, ``LEG.log.1`` the newest."""


@dataclass(frozen=True)
class LegRecord:
    """One leg as it was started. ``started_at`` is Unix time in seconds, ``grace`` how many of
    them it may take to end."""

    name: str
    role: str
    url: str
    bidirectional: bool
    launch_id: str
    started_at: float
    grace: float = GRACE_SECONDS


class DeploymentState:
    """The state folder of one deployment."""

    def __init__(self, name: str):
        self.name = name
        self.folder = state_folder() / name

    def script(self, leg: str) -> Path:
        return self.folder / f"{leg}.sh"

    def holds(self, files: Iterable[File]) -> bool:
        """Whether these are the files a leg was started with."""
        try:
            return all(
                (self.folder / file.name).read_text(encoding="utf-8") == file.text for file in files
            )
        except (OSError, UnicodeDecodeError):
            return False

    def log(self, leg: str) -> Path:
        return self.folder / f"{leg}.log"

    def records(self) -> dict[str, LegRecord]:
        """By leg name, engines before the router, in the order of their start."""
        records = []
        for name in _names(self.folder):
            path = self.folder / name
            if path.suffix != ".json" or name == ROUTER_CONFIG:
                continue
            try:
                records.append(_record(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                # Stopped and forgotten since the folder was listed.
                continue
            except OSError as error:
                raise PdctlError(f"{path}: {error.strerror}", 2) from None
            except (ValueError, TypeError) as error:
                raise PdctlError(
                    f"{path}: is not a leg record ({error}); move it away and try again", 2
                ) from None
        records.sort(key=lambda record: (record.role == "router", record.started_at))
        return {record.name: record for record in records}

    def write(self, record: LegRecord, files: Iterable[File]) -> None:
        """Remember a leg that is about to be started, and write what it starts with."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            _replace(self.folder / file.name, file.text, 0o700 if file.executable else 0o600)
        _replace(self.folder / f"{record.name}.json", json.dumps(dataclasses.asdict(record)), 0o600)

    def forget(self, leg: str) -> None:
        """Drop a leg that has stopped; its log stays."""
        (self.folder / f"{leg}.json").unlink(missing_ok=True)
        self.script(leg).unlink(missing_ok=True)

    def secret_file(self) -> Path:
        """The deployment's secret, made when there is none yet; only its owner can read it.

        Raises:
            OSError: it cannot be written.
        """
        path = self.folder / "secret"
        if not path.exists():
            _replace(path, secrets.token_hex(32), 0o600)
        return path

    def rotate_log(self, leg: str) -> Path:
        """Make room for the log of a new start.

        Returns:
            The path of the new, not yet existing log.
        """
        log = self.log(leg)
        for number in range(KEPT_LOGS, 0, -1):
            older = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
            if older.exists():
                shutil.move(older, log.with_name(f"{log.name}.{number}"))
        return log

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One ``up`` or ``down`` of a deployment at a time.

        Raises:
            PdctlError: another one is at work.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise PdctlError(f"{self.folder}: {error.strerror}", 2) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise PdctlError(
                    f"another pdctl is changing the deployment {self.name}; wait for it"
                ) from None
            yield


def state_folder() -> Path:
    """Where the state of all deployments is.

    Raises:
        PdctlError: there is no home folder to put it in.
    """
    own = os.environ.get("PDCTL_STATE_DIR")
    if own:
        return Path(own).absolute()
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    except RuntimeError:
        raise PdctlError("there is no home folder; set PDCTL_STATE_DIR", 2) from None
    return Path(base).absolute() / "pdctl"


def deployments() -> list[str]:
    """Names of the deployments that have legs on record."""
    folder = state_folder()
    return [
        name
        for name in _names(folder)
        if (folder / name).is_dir() and DeploymentState(name).records()
    ]


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing when it does not exist.

    Raises:
        PdctlError: it cannot be read, which is not the same as empty.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PdctlError(f"{folder}: {error.strerror}", 2) from None


def _record(text: str) -> LegRecord:
    record = LegRecord(**json.loads(text))
    for each in dataclasses.fields(LegRecord):
        if type(getattr(record, each.name)) is not each.type:
            raise TypeError(f"{each.name} is of another type")
    return record


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a whole file or nothing."""
    new = path.with_name(f".{path.name}.new")
    # Never readable by others, not even while it is written.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.chmod(mode)
    new.rename(path)
