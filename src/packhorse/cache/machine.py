"""What a build takes of its machine: processor, memory, disk and network."""

import time
from contextlib import suppress


class Machine:
    """Looks at this process, its children, and the machine; asked now and then."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._process = psutil.Process()
        psutil.cpu_percent()  # the first answer means nothing
        self._before = self._counters()

    def look(self) -> dict[str, float]:
        """What happened since the last look.

        Returns:
            `cpu` (share of all cores), `memory_bytes` (of this process and its children), and bytes per second that
            were read from and written to disks, and received from networks, by the whole machine.
        """
        now, before = self._counters(), self._before
        self._before = now
        seconds = max(now["time"] - before["time"], 1e-9)
        rates = {
            f"{name}_bytes_per_second": (now[name] - before[name]) / seconds
            for name in ("disk_read", "disk_write", "network_received")
        }
        return {"cpu": self._psutil.cpu_percent() / 100, "memory_bytes": float(self._memory()), **rates}

    def _memory(self) -> int:
        total = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(self._psutil.Error):
                total += process.memory_info().rss
        return total

    def _counters(self) -> dict[str, float]:
        disk, network = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        return {
            "time": time.monotonic(),
            "disk_read": disk.read_bytes if disk else 0,
            "disk_write": disk.write_bytes if disk else 0,
            "network_received": network.bytes_recv if network else 0,
        }
