#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""relay.py DELAY LOSS FIFO (PROCESS ADDRESS)...: a network of TUN devices, one in the namespace of each process.

A packet arrives DELAY milliseconds after it was sent, in order, or, with a probability of LOSS percent, never. A number
in FIFO, on a line, cuts that machine off: its packets go nowhere from then on. Says "up" when all devices are there.
"""
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def open_device(process, address):
    """The file of a TUN device `wire` in the network namespace of the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    if libc.setns(there, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    subprocess.check_call(["ip", "address", "add", f"{address}/24", "dev", "wire"])
    subprocess.check_call(["ip", "link", "set", "dev", "wire", "up", "txqueuelen", "10000", "mtu", "9000"])
    libc.setns(home, 0)
    os.close(there)
    os.close(home)
    return device


def main():
    delay, loss = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 100
    fifo = os.open(sys.argv[3], os.O_RDWR | os.O_NONBLOCK)
    places = list(zip(sys.argv[4::2], sys.argv[5::2]))
    devices = [open_device(process, address) for process, address in places]
    device_of = {socket.inet_aton(address): device for (_, address), device in zip(places, devices)}
    cut, queue = set(), deque()  # of (time, sender, receiver, packet); all delays are equal, so it is in order
    print("up", flush=True)
    while True:
        wait = max(0, queue[0][0] - time.monotonic()) if queue else None
        for ready in select.select([fifo, *devices], [], [], wait)[0]:
            if ready == fifo:
                cut.update(devices[int(number)] for number in os.read(fifo, 4096).split())
                continue
            while True:
                try:
                    packet = os.read(ready, 65536)
                except BlockingIOError:
                    break
                to = device_of.get(packet[16:20]) if packet[0] >> 4 == 4 else None  # IPv4's destination
                if to is not None and random.random() >= loss:
                    queue.append((time.monotonic() + delay, ready, to, packet))
        while queue and queue[0][0] <= time.monotonic():
            _, sender, to, packet = queue.popleft()
            if sender in cut or to in cut:
                continue
            try:
                os.write(to, packet)
            except OSError:  # its queue is full, or its machine is gone
                pass


main()
