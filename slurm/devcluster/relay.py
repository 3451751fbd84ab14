"""A cable with a delay, for kernels without netem: `relay.py TAP TAP MILLISECONDS` joins two new tap devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
FRAMES_A_TURN = 64


def open_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def relay(first: int, second: int, seconds: float) -> None:
    other = {first: second, second: first}
    queue: deque[tuple[float, int, bytes]] = deque()
    while True:
        deliver(queue)
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, _, _ = select.select([first, second], [], [], wait)
        for tap in ready:
            take(tap, other[tap], queue, seconds)


def deliver(queue: deque[tuple[float, int, bytes]]) -> None:
    now = time.monotonic()
    while queue and queue[0][0] <= now:
        _, tap, frame = queue.popleft()
        with contextlib.suppress(OSError):  # a full or downed tap drops, as a cable would
            os.write(tap, frame)


def take(tap: int, to: int, queue: deque[tuple[float, int, bytes]], seconds: float) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(FRAMES_A_TURN):
            frame = os.read(tap, 65536)
            queue.append((time.monotonic() + seconds, to, frame))


if __name__ == "__main__":
    relay(open_tap(sys.argv[1]), open_tap(sys.argv[2]), float(sys.argv[3]) / 1000)
