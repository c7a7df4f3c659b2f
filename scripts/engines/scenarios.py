"""What the scoreboard puts the engines' publishers through, and what must come of it."""

from dataclasses import dataclass, field
from enum import Enum


NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23"}


class Must(Enum):
    """What the answers about a worker have to be in the end."""

    EXACT = "0 wrong, exact"
    BOUNDED = "no over-count, not exact where wrong"
    UNPROVEN = "unproven, on the device 0 wrong"
    # The engine names a page by its tokens alone: what it holds cannot be told from its events.
    NOTHING = "no over-count, not exact"


class Daemon(Enum):
    """When it is started."""

    FIRST = "before the engine"
    LIVE = "between batches of a running engine"
    IDLE = "after the engine's last batch"


@dataclass
class Scenario:
    """One row. `options` are those of publish.py."""

    name: str
    engine: str = "vllm"
    version: str = NEWEST["vllm"]
    options: list = field(default_factory=list)
    has_replay: bool = True
    daemon: Daemon = Daemon.FIRST
    ranks: tuple = (0,)
    # Whether the daemon is told that no prompt has a salt: older events have no place for one.
    salts: str = "possible"
    # Whether the daemon is told that nobody asks for full reports: it counts second copies then.
    full_reports: str = "possible"
    must: Must = Must.EXACT


def vllm(name, options="", **more):
    return Scenario(name, options=options.split(), **more)


def sglang(name, options="", **more):
    return Scenario(name, "sglang", more.pop("version", NEWEST["sglang"]), options.split(), **more)


LOSS = "--drop 20 --drop-run 2"
OFFLOAD = "--offload 384 --capacity 128"
NO_REPLAY = {"has_replay": False, "must": Must.BOUNDED}

SCENARIOS = [
    vllm("evictions"),
    vllm("clears", "--clear-every 20"),
    vllm("topic", "--topic kv-events"),
    vllm("dp-ranks", ranks=(0, 1)),
    vllm("lora", "--lora-ratio 0.4"),
    vllm("salt", "--salt-ratio 0.4"),
    vllm("duplicates", "--dup-ratio 0.2"),
    vllm("bytes-hashes", "--bytes-hashes"),
    vllm("windows", "--window 50"),
    # A prefix of which a window has moved on is stored anew, in chunks of which some are held already: second copies.
    vllm("windows-in-chunks", "--window 100 --chunk 48 --lora-ratio 0.2", full_reports="none"),
    vllm("windows-reports", "--window 100 --chunk 48 --lora-ratio 0.2", must=Must.BOUNDED),
    # Requests that do not read the cache make second copies; of windows they leave free blocks that were never full.
    vllm("copies", "--dup-ratio 0.3 --anew-ratio 0.3", full_reports="none"),
    vllm("windows-copies", "--window 50 --dup-ratio 0.3 --anew-ratio 0.3", full_reports="none"),
    # The connector's events name no salt: equal tokens of other tenants are other blocks.
    vllm("offload", OFFLOAD),
    vllm("offload-salt-lora", OFFLOAD + " --salt-ratio 0.4 --lora-ratio 0.3"),
    # A chunk is loaded whole or not at all, and its blocks are known one by one: a match may be a block too long.
    vllm("offload-chunks", OFFLOAD + " --offload-chunk 2 --salt-ratio 0.4", must=Must.UNPROVEN),
    vllm("offload-hashes-only", OFFLOAD + " --offload-hashes-only --salt-ratio 0.4"),
    vllm("offload-lost", OFFLOAD + " --salt-ratio 0.4 " + LOSS),
    vllm("offload-late", OFFLOAD + " --salt-ratio 0.4", daemon=Daemon.LIVE),
    # Such a chunk is named by its last block alone.
    vllm("offload-hashes-chunks", OFFLOAD + " --offload-chunk 2 --offload-hashes-only", must=Must.BOUNDED),
    # A clear speaks of device memory; whether the blocks in host memory went with it no event says.
    vllm("offload-clears", OFFLOAD + " --salt-ratio 0.4 --clear-every 20", must=Must.BOUNDED),
    vllm("windows-lost", "--window 50 --clear-every 30 " + LOSS),
    vllm("lost", LOSS),
    vllm("lost-no-replay", LOSS, **NO_REPLAY),
    vllm("lost-small-buffer", "--drop 100 --drop-run 100 --buffer-steps 20", must=Must.BOUNDED),
    vllm("restart-150-150", "--restart 150"),
    vllm("restart-100-300", "--restart 100 --batches 400"),
    vllm("restart-lossy", "--restart 150 --restart-lossy"),
    vllm("restart-lossy-no-replay", "--restart 150 --restart-lossy", **NO_REPLAY),
    vllm("late", daemon=Daemon.LIVE),
    vllm("late-no-replay", daemon=Daemon.LIVE, **NO_REPLAY),
    vllm("idle", daemon=Daemon.IDLE),
    vllm("idle-8000", "--rate 0 --batches 8000", daemon=Daemon.IDLE),
    vllm("idle-no-replay", daemon=Daemon.IDLE, **NO_REPLAY),
    vllm("burst", "--rate 0 --batches 20000 --buffer-steps 40000"),
    sglang("sglang-evictions"),
    sglang("sglang-clears", "--clear-every 20"),
    sglang("sglang-lora-salt", "--lora-ratio 0.4 --salt-ratio 0.4"),
    sglang("sglang-duplicates", "--dup-ratio 0.2"),
    sglang("sglang-dp-ranks", ranks=(0, 1)),
    sglang("sglang-lost", LOSS),
    sglang("sglang-lost-no-replay", LOSS, **NO_REPLAY),
    sglang("sglang-restart-150-150", "--restart 150"),
    sglang("sglang-restart-100-300", "--restart 100 --batches 400"),
    sglang("sglang-restart-lossy", "--restart 150 --restart-lossy"),
    sglang("sglang-late", daemon=Daemon.LIVE),
    sglang("sglang-idle", daemon=Daemon.IDLE),
    # Its replay socket drops what exceeds 1000 messages for a slow reader, in the middle of an answer.
    sglang("sglang-idle-8000", "--rate 0 --batches 8000", daemon=Daemon.IDLE),
    sglang("sglang-burst", "--rate 0 --batches 20000 --buffer-steps 40000"),
    vllm("vllm-0.9.0", LOSS, version="0.9.0", salts="none"),
    vllm("vllm-0.10.2", LOSS, version="0.10.2", salts="none"),
    vllm("vllm-0.10.2-bytes", LOSS + " --bytes-hashes", version="0.10.2", salts="none"),
    vllm("windows-0.22.0", "--window 50", version="0.22.0"),
    vllm("windows-0.24.0", "--window 50", version="0.24.0"),
    vllm("windows-0.28.0", "--window 50", version="0.28.0"),
    vllm("vllm-0.20.0", LOSS + " --salt-ratio 0.4", version="0.20.0"),
    vllm("vllm-0.24.0", LOSS + " --salt-ratio 0.4 --lora-ratio 0.2", version="0.24.0"),
    vllm("vllm-0.24.0-idle-8000", "--rate 0 --batches 8000", version="0.24.0", daemon=Daemon.IDLE),
    sglang("sglang-0.5.5", version="0.5.5", salts="none", must=Must.NOTHING),
    sglang("sglang-0.5.10", LOSS, version="0.5.10", salts="none"),
    sglang("sglang-0.5.18", LOSS, version="0.5.18", salts="none"),
    sglang("sglang-0.5.18-salt", LOSS + " --salt-ratio 0.4", version="0.5.18", must=Must.BOUNDED),
    sglang("sglang-0.5.20", LOSS + " --salt-ratio 0.4", version="0.5.20"),
]
